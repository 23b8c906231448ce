import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

from eqxlike import (
    Module,
    debug,
    filter,
    filter_jit,
    is_array,
    is_inexact_array,
    nn,
    tree_at,
    tree_equal,
)
from eqxlike.train import (
    DynamicLossScale,
    TrainState,
    fit,
    keep_if_finite,
    make_evaluate,
    make_step,
)


def squared_error(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def snapshot(state):
    """A state that survives donation."""
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if is_array(leaf) else leaf, state)


@pytest.fixture
def model(getkey):
    return nn.MLP(3, "scalar", 4, 1, key=getkey())


@pytest.fixture
def batch(getkey):
    return jr.normal(getkey(), (5, 3)), jr.normal(getkey(), (5,))


@pytest.mark.parametrize("optimiser", [optax.sgd(0.1), optax.adam(0.1), optax.adamw(0.1)])
def test_makes_the_updates_of_plain_jax_and_optax(optimiser, model, batch, getkey):
    state = TrainState.create(model, optimiser, key=getkey())
    step = make_step(squared_error, optimiser)
    leaves, treedef = jax.tree.flatten(model)
    parameters = [leaf for leaf in leaves if is_array(leaf)]

    def loss(parameters):
        rest = iter(parameters)
        filled = [next(rest) if is_array(leaf) else leaf for leaf in leaves]
        return squared_error(jax.tree.unflatten(treedef, filled), batch, None)

    @jax.jit
    def plain_step(parameters, plain_state):
        value, gradients = jax.value_and_grad(loss)(parameters)
        with jax.numpy_dtype_promotion("standard"):
            updates, plain_state = optimiser.update(gradients, plain_state, parameters)
        return value, optax.apply_updates(parameters, updates), plain_state

    plain_state = optimiser.init(parameters)
    for _ in range(3):
        expected, parameters, plain_state = plain_step(parameters, plain_state)
        state, value = step(state, batch)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    trained = [leaf for leaf in jax.tree.leaves(state.model) if is_array(leaf)]
    for our, plain in zip(trained, parameters, strict=True):
        np.testing.assert_allclose(our, plain, rtol=1e-4, atol=1e-6)
    assert state.step == 3


def test_is_traced_once(model, batch, getkey):
    traces = []

    def loss(model, batch, key):
        traces.append(None)
        return squared_error(model, batch, key)

    step = make_step(loss, optax.adam(0.1))
    state = TrainState.create(model, optax.adam(0.1), key=getkey())
    for _ in range(4):
        state, _ = step(state, batch)
    state, _ = step(state, jax.tree.map(np.asarray, batch))
    assert len(traces) == 1


def test_is_traced_once_for_weakly_typed_parameters(getkey):
    class Scale(Module):
        scale: jax.Array

    traces = []

    def loss(model, batch, key):
        traces.append(None)
        return jnp.sum(model.scale * batch)

    step = make_step(loss, optax.sgd(0.1))
    state = TrainState.create(Scale(jnp.asarray(1.0)), optax.sgd(0.1), key=getkey())
    for _ in range(3):
        state, _ = step(state, jnp.ones(3))
    assert len(traces) == 1


def test_state_is_donated_and_the_model_it_came_from_is_not(model, batch, getkey):
    first = TrainState.create(model, optax.adam(0.1), key=getkey())
    second, _ = make_step(squared_error, optax.adam(0.1))(first, batch)
    assert first.model.layers[0].weight.is_deleted()
    assert not any(array.is_deleted() for array in batch)
    assert model(jnp.ones(3)).shape == second.model(jnp.ones(3)).shape == ()


def test_every_step_has_a_key_of_its_own_and_the_state_says_which(model, batch, getkey):
    def loss(model, batch, key):
        return squared_error(model, batch, key), jr.key_data(key)

    step = make_step(loss, optax.sgd(0.1), has_aux=True)
    start = TrainState.create(model, optax.sgd(0.1), key=getkey())

    def keys(state):
        found = []
        for _ in range(3):
            state, _, key = step(state, batch)
            found.append(tuple(key.tolist()))
        return found

    first = keys(snapshot(start))
    assert len(set(first)) == 3
    assert keys(snapshot(start)) == first


def test_model_in_mixed_precision_is_trained_in_float32(model, batch, getkey):
    mixed = nn.MixedPrecision(model, "params=float32,compute=bfloat16,output=float32")
    optimiser = optax.adam(0.1)
    step = make_step(squared_error, optimiser)
    first = TrainState.create(mixed, optimiser, key=getkey())
    moments = snapshot(first).optimiser_state[0]
    state, exact = first, TrainState.create(model, optimiser, key=getkey())
    for _ in range(10):
        state, loss = step(state, batch)
        exact, exact_loss = step(exact, batch)
    arrays = jax.tree.leaves((state.model, state.optimiser_state[0].mu, loss))
    assert {leaf.dtype.name for leaf in arrays if is_array(leaf)} == {"float32"}
    assert jax.tree.structure(state.optimiser_state[0]) == jax.tree.structure(moments)
    assert first.model.model.layers[0].weight.is_deleted()
    assert first.optimiser_state[0].mu.model.layers[0].weight.is_deleted()
    np.testing.assert_allclose(loss, exact_loss, rtol=0.05)


def test_optimiser_gets_the_loss_as_its_value(model, batch, getkey):
    optimiser = optax.polyak_sgd(max_learning_rate=0.1)
    state = TrainState.create(model, optimiser, key=getkey())
    step = make_step(squared_error, optimiser)
    losses = []
    for _ in range(20):
        state, loss = step(state, batch)
        losses.append(float(loss))
    assert losses[-1] < losses[0]


def test_integer_arrays_and_other_leaves_stay(getkey):
    class Mixed(Module):
        weight: jax.Array
        count: jax.Array
        name: str

    state = TrainState.create(
        Mixed(jnp.ones(2), jnp.arange(2), "name"), optax.sgd(1.0), key=getkey()
    )
    step = make_step(lambda model, batch, key: jnp.sum(model.weight * batch), optax.sgd(1.0))
    state, _ = step(state, jnp.ones(2))
    assert state.model.weight.tolist() == [0, 0]
    assert state.model.count.tolist() == [0, 1]
    assert state.model.name == "name"


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_loss_that_is_not_finite_leaves_the_state_as_it_was(bad, model, batch, getkey):
    state = TrainState.create(model, optax.adam(0.1), key=getkey())
    step = make_step(
        lambda model, batch, key: squared_error(model, batch[:2], key) + batch[2], optax.adam(0.1)
    )
    good, poisoned = (*batch, jnp.array(0.0)), (*batch, jnp.array(bad))
    state, _ = step(state, good)
    before = snapshot(state)
    state, loss = step(state, poisoned)
    np.testing.assert_array_equal(loss, bad)
    assert state.is_halted
    assert tree_equal(
        (state.model, state.optimiser_state, state.step, state.key),
        (before.model, before.optimiser_state, before.step, before.key),
    )
    state, _ = step(state, good)
    assert state.is_halted
    assert tree_equal((state.model, state.step), (before.model, before.step))


def test_parameters_that_are_not_finite_leave_the_state_as_it_was(getkey):
    model = nn.Linear(2, 2, key=getkey())
    # At 0 the root is finite and its gradient is not.
    step = make_step(
        lambda model, x, key: jnp.sqrt(jnp.sum((model.weight * x) ** 2)), optax.sgd(0.1)
    )
    state = TrainState.create(model, optax.sgd(0.1), key=getkey())
    state, loss = step(state, jnp.zeros((1, 2)))
    assert loss == 0
    assert state.is_halted
    assert tree_equal(state.model, model)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.complex64])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_any_parameter_that_is_not_finite_is_found(dtype, bad, getkey):
    def state_with(last):
        ones = {"a": jnp.ones((3, 2)), "c": jnp.arange(2), "d": jnp.ones((0, 2))}
        return TrainState.create(ones | {"b": last}, optax.sgd(0.1), key=getkey())

    good, poisoned = np.ones(4, dtype), np.ones(4, dtype)
    poisoned[2] = bad
    old, new, all_bad = map(state_with, map(jnp.asarray, (good, poisoned, np.full(4, bad, dtype))))
    keep = filter_jit(keep_if_finite)
    kept = keep(old, new, jnp.array(0.0))
    assert kept.is_halted
    assert tree_equal(kept.model, old.model)
    # What was there before the step does not matter.
    assert not keep(all_bad, old, jnp.array(0.0)).is_halted


@pytest.mark.parametrize("loss_scale", [None, DynamicLossScale()], ids=["plain", "scaled"])
@pytest.mark.parametrize("check_finite", [False, True])
def test_no_key_is_used_twice(check_finite, loss_scale, model, batch, getkey):
    def loss(model, model_state, batch, key):
        state_key, noise_key = jr.split(model_state["key"])
        noise = jr.normal(key, ()) + jr.normal(noise_key, ())
        return squared_error(model, batch, None) + noise, {"key": state_key}

    with jax.debug_key_reuse(True):
        step = make_step(loss, optax.sgd(0.1), check_finite=check_finite)
        first = TrainState.create(
            model,
            optax.sgd(0.1),
            key=getkey(),
            loss_scale=loss_scale,
            model_state={"key": getkey()},
        )
        runs = [fit(first, step, [batch] * 3, num_steps=3) for _ in range(2)]
        state, expected = first, []
        for _ in range(3):
            state, value = step(state, batch)
            expected.append(float(value))
    assert len(set(expected)) == 3
    assert list(runs[0].history) == list(runs[1].history) == expected


def test_step_of_ones_own_that_keeps_its_key_is_found_by_jax(model, batch, getkey):
    def step(state, batch):
        noise = jr.normal(state.key, ())
        return keep_if_finite(state, state, noise), noise

    with jax.debug_key_reuse(True), pytest.raises(jax.errors.KeyReuseError):
        filter_jit(step)(TrainState.create(model, optax.sgd(0.1), key=getkey()), batch)


class Scales(Module):
    """With parameters of one number and of several."""

    slope: jax.Array
    weight: jax.Array
    constant: jax.Array

    def __init__(self):
        self.slope = jnp.array(1.0)
        self.weight = jnp.ones(3)
        self.constant = jnp.array([-jnp.inf, 0.0])


@pytest.mark.parametrize("name", ["slope", "weight"])
def test_infinite_moment_of_an_optimiser_leaves_the_state_as_it_was(name, getkey):
    # The square of the gradient overflows, and the update is 0 from then on.
    def loss(model, scale, key):
        return scale * jnp.sum(getattr(model, name))

    optimiser, model = optax.adam(0.1), nn.freeze(Scales(), lambda model: model.constant)
    steep = jnp.array(1e30)
    parameters = filter(model, is_inexact_array)
    gradient = jax.tree.map(jnp.zeros_like, parameters)
    gradient = tree_at(lambda model: getattr(model, name), gradient, replace_fn=lambda x: x + steep)
    with jax.numpy_dtype_promotion("standard"):
        updates, moments = optimiser.update(gradient, optimiser.init(parameters))
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(updates))
    assert jnp.isinf(getattr(moments[0].nu, name)).all()

    step = make_step(loss, optimiser)
    state, _ = step(TrainState.create(model, optimiser, key=getkey()), jnp.array(1.0))
    before = snapshot(state)
    state, value = step(state, steep)
    assert state.is_halted
    assert jnp.isfinite(value)
    assert tree_equal((state.model, state.optimiser_state), (before.model, before.optimiser_state))


def test_numbers_that_are_infinite_on_purpose_do_not_halt(getkey):
    # The best loss before there was one; and a frozen constant.
    optimiser = optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=2))
    model = nn.freeze(Scales(), lambda model: model.constant)
    state = TrainState.create(model, optimiser, key=getkey())
    assert jnp.isinf(state.optimiser_state[1].best_value)
    step = make_step(lambda model, x, key: jnp.sum(model.weight * x) ** 2, optimiser)
    new = keep_if_finite(snapshot(state), snapshot(state), jnp.array(0.0))
    assert not new.is_halted
    for _ in range(3):
        state, _ = step(state, jnp.ones(3))
    assert not state.is_halted
    assert state.step == 3


def test_model_without_parameters_is_finite(getkey):
    state = TrainState.create({"count": jnp.arange(2)}, optax.sgd(0.1), key=getkey())
    assert not keep_if_finite(state, state, jnp.array(0.0)).is_halted


def test_check_can_be_left_out(model, batch, getkey):
    step = make_step(
        lambda model, batch, key: squared_error(model, batch, key) * jnp.nan,
        optax.sgd(0.1),
        check_finite=False,
    )
    state, _ = step(TrainState.create(model, optax.sgd(0.1), key=getkey()), batch)
    assert state.step == 1
    assert not state.is_halted
    assert jnp.isnan(state.model.layers[0].weight).all()


@pytest.mark.parametrize(
    ("optimiser", "expected"),
    [
        (
            optax.sgd(0.1),
            r"state of its optimiser, \(EmptyState, EmptyState\), and got a TrainState",
        ),
        (
            optax.identity(),
            r"its optimiser, EmptyState, and .* with \(ScaleByAdamState, EmptyState\)",
        ),
        (
            optax.sgd(0.1, momentum=0.9),
            r"\(TraceState, EmptyState\), and .* with \(ScaleByAdamState, EmptyState\): state\.opt",
        ),
        (
            optax.adamw(0.1),
            r"\(ScaleByAdamState, EmptyState, EmptyState\), and got a TrainState with",
        ),
    ],
    ids=["sgd", "identity", "momentum", "adamw"],
)
def test_another_optimiser_than_the_state_was_made_with_is_refused(
    optimiser, expected, model, batch, getkey
):
    state = TrainState.create(model, optax.adam(0.1), key=getkey())
    with pytest.raises(ValueError, match=expected) as caught:
        make_step(squared_error, optimiser)(state, batch)
    assert "Give make_step the optimiser that TrainState.create got" in str(caught.value)


def test_model_that_was_changed_under_its_optimiser_is_refused_with_the_place(model, batch, getkey):
    state = TrainState.create(model, optax.adam(0.1), key=getkey())
    wider = tree_at(lambda state: state.model.layers[0].weight, state, jnp.ones((5, 3)))
    found, expected = (
        rf"{name}\[0\]\.mu\.layers\[0\]\.weight is an array of shape \({size}, 3\)"
        for name, size in ((r"state\.optimiser_state", 4), (r"optimiser\.init\(model\)", 5))
    )
    with pytest.raises(ValueError, match=f"{found} .*, and {expected}"):
        make_step(squared_error, optax.adam(0.1))(wider, batch)
    frozen = tree_at(lambda state: state.model, state, nn.freeze(model))
    with pytest.raises(ValueError, match=r"if the model was changed .* create the state anew"):
        make_step(squared_error, optax.adam(0.1))(frozen, batch)


def test_optimiser_with_another_rate_is_the_same(model, batch, getkey):
    state = TrainState.create(model, optax.adam(0.1), key=getkey())
    assert make_step(squared_error, optax.adam(0.01))(state, batch)[0].step == 1


def test_optimiser_whose_beginning_hangs_on_numbers_is_taken(model, batch, getkey):
    def init(parameters):
        return max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(parameters))

    plain = optax.sgd(0.1)
    optimiser = optax.GradientTransformation(
        init, lambda updates, state, params: (plain.update(updates, plain.init(params))[0], state)
    )
    state = TrainState.create(model, optimiser, key=getkey())
    assert make_step(squared_error, optimiser)(state, batch)[0].step == 1


def test_model_in_the_place_of_a_state_is_refused(model, batch):
    step = make_step(squared_error, optax.adam(0.1))
    with pytest.raises(TypeError, match=r"The step expected a TrainState, and got MLP\. Make one"):
        step(model, batch)


@pytest.mark.usefixtures("plain_dispatch")
def test_state_that_a_step_used_up_is_named_by_path(model, batch, getkey):
    step = make_step(squared_error, optax.adam(0.1))
    state = TrainState.create(model, optax.adam(0.1), key=getkey())
    step(state, batch)
    with pytest.raises((RuntimeError, ValueError), match="deleted") as caught:
        step(state, batch)
    expected = "step, these are no longer there, since they were donated to a call: state.model.la"
    assert expected in "".join(caught.value.__notes__)


def test_function_that_makes_an_optimiser_is_refused():
    with pytest.raises(TypeError, match=r"make_step expected an optax\.G.*: call adam to get one"):
        make_step(squared_error, optax.adam)


@pytest.mark.parametrize("loss_scale", [None, DynamicLossScale(4.0)])
def test_complex_parameters_go_down_hill(loss_scale):
    class Complex(Module):
        weight: jax.Array

    def loss(model, x, key):
        return jnp.sum(jnp.abs(model.weight * x - 1) ** 2)

    optimiser = optax.sgd(0.1)
    start = Complex(jnp.array([1 + 2j, 3 - 1j]))
    state = TrainState.create(start, optimiser, key=jr.key(0), loss_scale=loss_scale)
    step = make_step(loss, optimiser)
    losses = []
    for _ in range(3):
        state, value = step(state, jnp.ones(2, complex))
        losses.append(float(value))
    # Each step takes a fifth off the distance to 1.
    np.testing.assert_allclose(losses, [9 * 0.64**number for number in range(3)], rtol=1e-5)


@pytest.mark.parametrize("wrong", [jnp.ones(2), jnp.ones(()), (0.0, 1, 2)], ids=str)
def test_loss_with_aux_that_returns_no_pair_is_refused(wrong, model, batch, getkey):
    optimiser = optax.sgd(0.1)
    state = TrainState.create(model, optimiser, key=getkey())
    step = make_step(lambda model, batch, key: wrong, optimiser, has_aux=True)
    with pytest.raises(
        TypeError, match=r"has_aux=True\): the loss is to return \(loss, aux\), got"
    ):
        step(state, batch)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (lambda loss: (loss, {"aux": loss}), r"got \(f32\[\], {'aux': f32\[\]}\): .*has_aux=True"),
        (lambda loss: loss[None], r"got f32\[1\]: take the mean over the batch"),
    ],
    ids=["pair", "vector"],
)
def test_loss_that_is_no_number_is_refused(returned, expected, model, batch, getkey):
    optimiser = optax.sgd(0.1)
    state = TrainState.create(model, optimiser, key=getkey())
    step = make_step(lambda *arguments: returned(squared_error(*arguments)), optimiser)
    with pytest.raises(TypeError, match=rf"make_step expected a loss of shape \(\).* {expected}"):
        step(state, batch)


def test_loss_that_takes_no_key_is_told_what_it_is_called_with(model, batch, getkey):
    optimiser = optax.sgd(0.1)
    state = TrainState.create(model, optimiser, key=getkey())

    def keyless(model, batch):
        return squared_error(model, batch, None)

    message = (
        r"make_step calls `loss\(model, batch, key\)`, and keyless does not take that: too many"
    )
    with pytest.raises(TypeError, match=message):
        make_step(keyless, optimiser)(state, batch)


@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_steps_and_measures_of_two_functions_are_no_retraces(steps_per_call, model, batch, getkey):
    def twice(model, batch, key):
        return 2 * squared_error(model, batch, key)

    optimiser = optax.sgd(0.1)
    with debug.explain_retraces(lambda trace: None) as retraces:
        for loss in (squared_error, twice):
            state = TrainState.create(model, optimiser, key=getkey())
            step = make_step(loss, optimiser)
            fit(state, step, [batch] * 4, num_steps=4, steps_per_call=steps_per_call)
        for measure in (lambda model, batch: {"a": batch[0]}, lambda model, batch: {"b": batch[1]}):
            make_evaluate(measure, [batch])(state)
    assert retraces == []


def test_step_is_told_by_its_loss(model, batch, getkey):
    optimiser = optax.sgd(0.1)
    step = make_step(squared_error, optimiser)
    state = TrainState.create(model, optimiser, key=getkey())
    with debug.explain_retraces(lambda trace: None) as retraces:
        state, _ = step(state, batch)
        step(state, jax.tree.map(lambda each: each[:2], batch))
    assert retraces[0].function == "squared_error"
    assert step.__qualname__ == "make_step(squared_error)"
