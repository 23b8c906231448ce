"""One training step: updates, keys, halts, loss scales, model states and errors."""

import dataclasses

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import eqxlike as eqx
from eqxlike import debug, is_array, nn, tree_at, tree_equal
from eqxlike.train import (
    DynamicLossScale,
    TrainState,
    fit,
    keep_if_finite,
    make_evaluate,
    make_step,
)
from eqxlike.train._state import copy_arrays
from tests.train.linear import squared_error

SGD, ADAM = optax.sgd(0.1), optax.adam(0.1)
FLOAT16 = "params=float32,compute=float16,output=float32"


def root_of_squares(model, batch, key):
    """A loss that is finite at 0 and whose gradient is not."""
    return jnp.sqrt(jnp.sum((model.weight * batch) ** 2))


def start(model, optimiser=SGD, **options):
    return TrainState.create(model, optimiser, key=jr.key(7), **options)


@pytest.fixture(scope="module")
def model():
    return nn.MLP(3, "scalar", 4, 1, key=jr.key(0))


@pytest.fixture(scope="module")
def layer():
    return nn.Linear(3, "scalar", key=jr.key(0))


@pytest.fixture(scope="module")
def batch():
    x = np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)
    return jax.device_put((x, x.sum(axis=1) + 1))


def test_step_makes_the_updates_of_plain_jax_and_optax(model, batch):
    optimiser, traces = optax.adamw(0.1), []

    def counted(*arguments):
        traces.append(None)
        return squared_error(*arguments)

    # The optimiser state does not contain the learning rate.
    first = state = start(model, optax.adamw(0.3))
    step = make_step(counted, optimiser)
    parameters, static = eqx.partition(model, is_array)
    plain_state = optimiser.init(parameters)

    @jax.jit
    def plain_step(parameters, plain_state):
        loss = lambda parameters: squared_error(eqx.combine(parameters, static), batch, None)
        value, gradients = jax.value_and_grad(loss)(parameters)
        with jax.numpy_dtype_promotion("standard"):
            updates, plain_state = optimiser.update(gradients, plain_state, parameters)
        return value, optax.apply_updates(parameters, updates), plain_state

    for number in range(3):
        expected, parameters, plain_state = plain_step(parameters, plain_state)
        state, value = step(state, batch if number < 2 else jax.tree.map(np.asarray, batch))
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert tree_equal(state.model, eqx.combine(parameters, static), rtol=1e-4, atol=1e-6)
    assert (state.step, len(traces)) == (3, 1)
    # The state is donated. The original model and the batch are not.
    assert first.model.layers[0].weight.is_deleted()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((batch, model)) if is_array(leaf))


def plateau():
    return optax.chain(ADAM, optax.contrib.reduce_on_plateau(patience=1))


def sam(**options):
    ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    return optax.contrib.sam(ADAM, ascent, **options)


ALL = ("value", "grad", "value_fn")
LINE_SEARCH = optax.partition(
    {"weight": optax.lbfgs(), "bias": SGD},
    {"weight": "weight", "bias": "bias"},
    mask_compatible_extra_args=True,
)


@pytest.mark.parametrize(
    ("optimiser", "names"),
    [
        (optax.chain(optax.clip(1.0), optax.lbfgs()), ALL),
        (optax.chain(SGD, optax.scale_by_backtracking_linesearch(9, store_grad=True)), ALL),
        (optax.MultiSteps(plateau(), 2), ALL[:1]),
        (sam(), ()),
        (optax.chain(optax.clip(1.0), sam(opaque_mode=True)), ("grad_fn",)),
        (optax.contrib.sophia(0.1, update_interval=2), ("obj_fn",)),
        (LINE_SEARCH, ALL),
        (optax.chain(optax.clip(1.0), optax.lookahead(ADAM, 3, 0.5)), ()),
    ],
)
def test_optimisers_are_called_with_the_extra_arguments_of_plain_optax(optimiser, names, batch):
    def of_batch(model, batch, key):
        return jnp.mean((batch[0] @ model["weight"] + model["bias"] - batch[1]) ** 2)

    model = {"weight": jnp.zeros(3), "bias": jnp.zeros(())}
    state, step = start(model, optimiser), make_step(of_batch, optimiser)
    is_lookahead = hasattr(state.optimiser_state, "slow")
    parameters = optax.LookaheadParams.init_synced(model) if is_lookahead else model
    plain_state = optimiser.init(parameters)

    @jax.jit
    def plain_step(parameters, plain_state):
        fast = parameters.fast if is_lookahead else parameters

        def value_fn(given):
            # In a partition, an optimiser only sees its own parameters.
            masked = {name for name in fast if isinstance(given[name], optax.MaskedNode)}
            return of_batch({**given, **{name: fast[name] for name in masked}}, batch, None)

        value, grad = jax.value_and_grad(value_fn)(fast)
        known = {"value": value, "grad": grad, "value_fn": value_fn, "obj_fn": value_fn}
        known["grad_fn"] = lambda parameters, _: jax.grad(value_fn)(parameters)
        extra = {name: known[name] for name in names}
        updates, new = optimiser.update(grad, plain_state, parameters, **extra)
        return optax.apply_updates(parameters, updates), new, value

    for _ in range(6):
        with jax.numpy_dtype_promotion("standard"):
            parameters, plain_state, expected = plain_step(parameters, plain_state)
        state, loss = step(state, batch)
        np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-6)
    if is_lookahead:
        for name, slow in parameters.slow.items():
            np.testing.assert_allclose(state.optimiser_state.slow[name], slow, rtol=1e-4)


@pytest.mark.parametrize("optimiser", [optax.lbfgs(), sam(opaque_mode=True)])
def test_an_optimiser_evaluates_the_loss_of_the_same_step(optimiser, batch):
    """The loss has a key, a model state, frozen arrays and a loss scale."""

    def loss(model, model_state, batch, key):
        noise_key, state_key = jr.split(key)
        noise = jr.normal(noise_key) + jr.normal(model_state["key"])
        x = batch[0] * model_state["scale"] + 0.1 * noise
        value = jnp.mean((x @ model.weight[0] + model.bias[0] - batch[1]) ** 2)
        return value, ({"key": state_key, "scale": model_state["scale"] / 2}, "aux")

    layer = nn.freeze(nn.Linear(3, 1, key=jr.key(0)), lambda layer: layer.bias)

    @jax.jit
    def plain_step(weight, plain_state, model_state, key):
        def value_fn(weight):
            model = tree_at(lambda layer: layer.weight, nn.unfreeze(layer), weight)
            return loss(model, model_state, batch, key)[0]

        value, grad = jax.value_and_grad(value_fn)(weight)
        extra = {"value": value, "grad": grad, "value_fn": value_fn}
        if plain_state[0].__class__ is not optax.ScaleByLBFGSState:
            extra = {"grad_fn": lambda weight, _: jax.grad(value_fn)(weight)}
        updates, plain_state = optimiser.update(grad, plain_state, weight, **extra)
        return weight + updates, plain_state

    histories, step = [], make_step(loss, optimiser, has_aux=True)
    for loss_scale in (None, DynamicLossScale(2.0**10)):
        model_state = {"key": jr.key(3), "scale": jnp.ones(())}
        state = start(layer, optimiser, model_state=model_state, loss_scale=loss_scale)
        weight, plain_state = layer.weight, optimiser.init(layer.weight)
        for _ in range(3):
            key, given = jr.clone(jr.fold_in(state.key, state.step)), copy_arrays(state.model_state)
            with jax.debug_key_reuse(False), jax.numpy_dtype_promotion("standard"):
                weight, plain_state = plain_step(weight, plain_state, given, key)
            state, value, aux = step(state, batch)
            histories.append(float(value))
            assert aux == "aux"
            np.testing.assert_allclose(state.model.weight, weight, rtol=1e-3, atol=1e-5)
        assert state.model_state["scale"] == 0.125
    np.testing.assert_allclose(histories[:3], histories[3:], rtol=1e-4)


def test_models_and_optimisers_that_cannot_train_are_refused(batch, layer):
    def update(updates, state, parameters, *, hessian, **extra):
        return updates, state

    odd = optax.GradientTransformationExtraArgs(lambda parameters: optax.EmptyState(), update)
    with pytest.raises(TypeError, match="hessian") as caught:
        make_step(squared_error, odd)(start(layer, odd), batch)
    arguments = "(gradients, state, parameters, value, g"
    note = f"EmptyState raised this. make_step called it with {arguments}"
    assert note in str(caught.value.__notes__)
    for model, reason in [
        (nn.freeze(layer), r"model\.weight is frozen, model\.bias is frozen"),
        ({"a": jnp.arange(3), "b": 1.0}, r"model\['a'\] is int32, model\['b'\] is the number 1\.0"),
        ((), r"the model, \(\), has no arrays"),
    ]:
        with pytest.raises(ValueError, match=f"make_step has nothing to train: {reason}\\. It"):
            fit(start(model), make_step(squared_error, SGD), [batch], num_steps=1)
    step = make_step(lambda model, model_state, batch, key: (jnp.ones(()), model_state), SGD)
    with pytest.warns(UserWarning, match=r"is frozen.* It changes only the model_state"):
        step(start(nn.freeze(layer), model_state={"a": jnp.ones(())}), batch)
    by_labels = optax.partition({"1": SGD, "2": SGD}, jax.tree.map(lambda a: str(a.ndim), layer))
    with pytest.raises(TypeError, match=r"called a Linear\. .* pass `lambda _: labels` instead"):
        start(layer, by_labels)
    with pytest.raises(TypeError, match=r"got the state of optax\.Looka.*state\.slow` has"):
        make_step(squared_error, SGD)(start(optax.LookaheadParams(layer, layer)), batch)


def test_complex_parameters_descend_the_gradient():
    def loss(weight, x, key):
        return jnp.sum(jnp.abs(weight * x - 1) ** 2)

    loss_scale, losses = DynamicLossScale(4.0), []
    state, step = start(jnp.array([1 + 2j, 3 - 1j]), loss_scale=loss_scale), make_step(loss, SGD)
    for _ in range(3):
        state, value = step(state, jnp.ones(2, complex))
        losses.append(float(value))
    # Each step reduces the distance to 1 by a fifth.
    np.testing.assert_allclose(losses, [9 * 0.64**number for number in range(3)], rtol=1e-5)


# --- keys ---


def test_no_key_is_reused_and_keys_depend_only_on_the_state(layer, batch):
    def loss(model, model_state, batch, key):
        state_key, noise_key = jr.split(model_state["key"])
        noise = jr.normal(key, ()) + jr.normal(noise_key, ())
        return squared_error(model, batch, None) + noise, {"key": state_key}

    # The test suite enables the check for reused keys.
    step = make_step(loss, SGD)
    first = start(layer, loss_scale=DynamicLossScale(), model_state={"key": jr.key(3)})
    runs = [fit(first, step, [batch] * 3, num_steps=3) for _ in range(2)]
    state, expected = first, []
    for _ in range(3):
        state, value = step(state, batch)
        expected.append(float(value))
    assert len(set(expected)) == 3
    assert list(runs[0].history) == list(runs[1].history) == expected


# --- halts ---


def test_nonfinite_loss_does_not_change_the_state(layer, batch):
    loss = lambda model, batch, key: squared_error(model, batch[:2], key) + batch[2]
    step = make_step(loss, ADAM)
    good = (*batch, jnp.array(0.0))
    first, _ = step(start(layer, ADAM), good)
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        state, loss = step(copy_arrays(first), (*batch, jnp.array(bad)))
        np.testing.assert_array_equal(loss, bad)
        assert state.is_halted
        kept = tree_at(lambda state: state.is_halted, state, jnp.array(False))
        assert tree_equal(kept, first)
    state, _ = step(state, good)
    assert state.is_halted
    assert tree_equal((state.model, state.step), (first.model, first.step))


@pytest.mark.usefixtures("plain_dispatch")
def test_nonfinite_parameters_and_model_states_halt():
    model = nn.Linear(2, 2, key=jr.key(0))
    state, loss = make_step(root_of_squares, SGD)(start(model), jnp.zeros((1, 2)))
    assert (loss, bool(state.is_halted)) == (0, True)
    assert tree_equal(state.model, model)

    def remember(weight, model_state, x, key):
        return jnp.sum(weight), {"last": x}

    state = start(jnp.ones(()), model_state={"last": jnp.zeros(())})
    state, loss = make_step(remember, SGD)(state, jnp.array(jnp.inf))
    assert (loss, bool(state.is_halted), state.model_state["last"]) == (1, True, 0)
    keep = jax.jit(keep_if_finite)
    # The values before the step do not matter.
    bad, good = (start({"a": np.full(4, value, np.float32)}) for value in (np.nan, 1))
    assert keep(good, bad, 0.0).is_halted
    assert not keep(bad, good, 0.0).is_halted
    # Arrays of the optimiser are checked, its scalars are not.
    for last, halts in ((np.full(1, np.nan, np.float32), True), (np.float32(np.nan), False)):
        old = dataclasses.replace(good, optimiser_state=np.ones_like(last))
        assert keep(old, dataclasses.replace(old, optimiser_state=last), 0.0).is_halted == halts
    empty = start({"count": jnp.arange(2)})
    assert not keep(empty, empty, 0.0).is_halted
    # Some numbers are infinite on purpose: the initial best loss, a frozen constant.
    model = tree_at(lambda model: model.bias, model, jnp.array([-jnp.inf, 0.0]))
    optimiser = optax.chain(ADAM, optax.contrib.reduce_on_plateau(patience=2))
    state = start(nn.freeze(model, lambda model: model.bias), optimiser)
    assert jnp.isinf(state.optimiser_state[1].best_value)
    assert not keep(state, state, 0.0).is_halted


def test_an_infinite_moment_halts():
    # The square of the gradient overflows, so that all later updates are 0.
    def loss(model, steepness, key):
        return steepness * model["slope"]

    step, unchecked = make_step(loss, ADAM), make_step(loss, ADAM, check_finite=False)
    first, _ = step(start({"slope": jnp.array(1.0)}, ADAM), jnp.array(1.0))
    spoilt, _ = unchecked(copy_arrays(first), jnp.array(1e30))
    assert jnp.isfinite(spoilt.model["slope"])
    assert jnp.isinf(spoilt.optimiser_state[0].nu["slope"])
    state, value = step(copy_arrays(first), jnp.array(1e30))
    assert (bool(state.is_halted), bool(jnp.isfinite(value))) == (True, True)
    assert tree_equal((state.model, state.optimiser_state), (first.model, first.optimiser_state))


@pytest.mark.parametrize(
    ("loss_scale", "platform"), [(None, "default"), (DynamicLossScale(4.0), "cpu")]
)
def test_a_skipped_update_changes_only_the_step(loss_scale, platform, batch, monkeypatch):
    # A GPU selects arrays, a CPU branches.
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda **branches: branches[platform]())

    def loss(model, model_state, batch, key):
        value, state = squares(model, model_state, batch[:2], key)
        # The loss is finite and its gradients are not.
        return value + jnp.sqrt(batch[2]) * model[0].bias[0], state

    model, model_state = nn.make_with_state(normalised)(jr.key(0))
    model = tree_at(lambda model: model[0].bias, model, jnp.zeros(2))
    state = start(model, ADAM, model_state=model_state, loss_scale=loss_scale)
    step = make_step(loss, ADAM, check_finite="skip")
    state, _ = step(state, (*batch, 0.0))
    for bad in ((*batch, -1.0), (np.full_like(batch[0], np.nan), batch[1], 0.0)):
        before = copy_arrays(state)
        state, value = step(state, bad)
        assert jnp.isnan(value)
        assert (bool(state.is_halted), state.step) == (True, before.step + 1)
        kept = (before.step, before.is_halted)
        same = tree_at(lambda state: (state.step, state.is_halted), state, kept)
        assert tree_equal(same, before)
    before = copy_arrays(state)
    state, value = step(state, (*batch, 0.0))
    assert (bool(jnp.isfinite(value)), bool(state.is_halted)) == (True, False)
    assert not tree_equal(state.model, before.model)
    with pytest.raises(ValueError, match=r'False, "skip" or "state"; got \'halt\''):
        make_step(loss, ADAM, check_finite="halt")


@pytest.mark.parametrize(
    ("optimiser", "check_finite"),
    [
        (optax.chain(optax.clip(9.0), optax.apply_if_finite(SGD, 2)), False),
        (optax.MultiSteps(SGD, 1, should_skip_update_fn=optax.skip_not_finite), True),
    ],
)
def test_update_that_the_optimiser_skips_keeps_the_model_state(
    optimiser, check_finite, stateful, batch
):
    state = start(stateful.model, optimiser, model_state=stateful.model_state)
    step, before = make_step(squares, optimiser, check_finite=check_finite), copy_arrays(state)
    state, value = step(state, jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), batch))
    assert (bool(jnp.isnan(value)), bool(state.is_halted), state.step) == (True, False, 1)
    assert tree_equal((state.model, state.model_state), (before.model, before.model_state))
    state, value = step(state, batch)
    assert jnp.isfinite(value)
    assert state.model_state.get(state.model[1].batch_counter) == 1


def test_debug_nans_works_with_donated_arrays(layer, batch):
    """Tests steps and `fit`, which are compiled before `debug_nans` is enabled."""
    steps = [make_step(squared_error, SGD, check_finite=check) for check in (True, False)]
    bad = (np.full((8, 3), np.nan, np.float32), batch[1])

    def run_all(data):
        yield lambda: fit(start(layer), steps[0], [batch, data], num_steps=2)
        yield lambda: fit(start(layer), steps[0], [batch, data], num_steps=2, steps_per_call=2)
        for step in steps:
            yield lambda step=step: step(start(layer), data)

    for run in run_all(batch):
        run()
    with jax.debug_nans(True):
        for number, run in enumerate([*run_all(bad), *run_all(bad)]):
            # After the first error of a direct call, the arrays of the step are deleted.
            is_lost = number in (2, 3)
            message = "because its arguments were donated" if is_lost else r"\(nan\) encountered in"
            with pytest.raises(FloatingPointError, match=message) as caught:
                run()
            assert ("state.model.weight" in str(getattr(caught.value, "__notes__", ""))) == is_lost


# --- with a loss scale ---


GOOD, STEEP, BAD = (np.full((1, 2), value, np.float32) for value in (1, 0, np.nan))


@pytest.fixture(scope="module")
def linear():
    return nn.Linear(2, 2, use_bias=False, key=jr.key(2))


@pytest.fixture(scope="module")
def root_step():
    return make_step(root_of_squares, SGD)


def scaled(model, optimiser, *args, **options):
    return start(model, optimiser, loss_scale=DynamicLossScale(*args, **options))


def test_a_loss_scale_trains_gradients_that_underflow_and_skips_an_overflow(layer, batch):
    # In float16 the gradients of about 1e-9 underflow to 0.
    def loss(model, batch, key):
        return 1e-9 * squared_error(model, batch, key)

    optimiser = optax.sgd(2e8, momentum=0.1)
    mixed, step = nn.MixedPrecision(layer, FLOAT16), make_step(loss, optimiser)
    states = [start(mixed, optimiser), scaled(mixed, optimiser, 2.0**20), start(layer, optimiser)]
    curves = []
    for _ in range(10):
        states, losses = zip(*(step(state, batch) for state in states), strict=True)
        curves.append(losses)
    plain_curve, curve, exact_curve = 1e9 * np.array(curves).T
    assert tree_equal(states[0].model, mixed)
    assert np.ptp(plain_curve) == 0
    assert curve[-1] < 0.1 * curve[0]
    np.testing.assert_allclose(curve, exact_curve, atol=0.01 * curve[0])
    state = states[1]
    assert state.loss_scale.counter == 10
    arrays = jax.tree.leaves((state.model, state.optimiser_state, losses[1]))
    assert {leaf.dtype.name for leaf in arrays if is_array(leaf)} == {"float32"}
    state = tree_at(lambda state: state.loss_scale.scale, state, jnp.array(2.0**60))
    before = copy_arrays(state)
    state, loss = step(state, batch)
    assert tree_equal((state.model, state.optimiser_state), (before.model, before.optimiser_state))
    assert (state.loss_scale.scale, state.loss_scale.counter) == (2.0**59, 0)
    assert jnp.isfinite(loss)
    # The step number increases, so that the next key differs.
    assert (bool(state.is_halted), state.step) == (False, 11)


def test_nonfinite_gradients_at_the_smallest_scale_and_nonfinite_losses_halt(root_step, linear):
    state = scaled(linear, SGD, 4.0)
    for _ in range(2):
        state, _ = root_step(state, STEEP)
    assert (bool(state.is_halted), state.loss_scale.scale) == (False, 1)
    before = copy_arrays(state)
    state, loss = root_step(state, STEEP)
    assert (bool(state.is_halted), loss) == (True, 0)
    assert tree_equal(tree_at(lambda state: state.is_halted, state, jnp.array(False)), before)
    state, _ = root_step(state, GOOD)
    assert tree_equal((state.model, state.step), (linear, before.step))
    state, loss = root_step(scaled(linear, SGD), BAD)
    assert (bool(state.is_halted), bool(jnp.isnan(loss))) == (True, True)
    assert state.loss_scale.scale == 2.0**15
    assert tree_equal(state.model, linear)


def test_loss_and_aux_are_not_scaled(linear):
    def loss(model, batch, key):
        return root_of_squares(model, batch, key).astype(jnp.float16), "beside"

    _, value, aux = make_step(loss, SGD, has_aux=True)(scaled(linear, SGD), GOOD)
    assert (value.dtype, aux) == (jnp.float16, "beside")
    expected = np.sqrt(np.sum((np.asarray(linear.weight) * GOOD) ** 2))
    np.testing.assert_allclose(value, expected, rtol=1e-3)


# --- with a model's state ---


def normalised(key):
    norm = nn.BatchNorm(2, "batch", mode="batch")
    return nn.Sequential([nn.Linear(3, 2, key=key), norm, nn.Lambda(jnp.sum)])


def squares(model, state, batch, key):
    in_batch = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
    out, state = in_batch(batch[0], state)
    return jnp.mean((out - 1) ** 2), state


@pytest.fixture
def stateful():
    model, model_state = nn.make_with_state(normalised)(jr.key(0))
    return start(model, model_state=model_state)


def test_model_state_is_updated_by_each_step_and_kept_when_halted(stateful, batch):
    step, by_hand = make_step(squares, SGD), eqx.filter_jit(squares)
    first, state = stateful, copy_arrays(stateful)
    for _ in range(3):
        before = copy_arrays(state)
        state, loss = step(state, batch)
        expected, model_state = by_hand(before.model, before.model_state, batch, None)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        assert tree_equal(state.model_state, model_state, rtol=1e-5)
    assert state.model_state.get(state.model[1].batch_counter) == 3
    result = fit(first, step, [batch] * 3, num_steps=3)
    assert result.state.model_state.get(first.model[1].batch_counter) == 3
    assert first.model_state.get(first.model[1].batch_counter) == 0
    before = copy_arrays(state.model_state)
    state, _ = step(state, jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), batch))
    assert state.is_halted
    assert tree_equal(state.model_state, before)


def test_skipped_update_does_not_change_the_statistics(stateful, batch):
    # The gradient of the root at 0 is not finite at any loss scale.
    def loss(model, state, batch, key):
        value, state = squares(model, state, batch, key)
        return jnp.sqrt(0 * value), (state, "beside")

    kept = copy_arrays(stateful.model_state)
    state = start(stateful.model, loss_scale=DynamicLossScale(), model_state=kept)
    state, _, aux = make_step(loss, SGD, has_aux=True)(state, batch)
    assert (bool(state.is_halted), state.loss_scale.scale, aux) == (False, 2.0**14, "beside")
    assert tree_equal(state.model_state, stateful.model_state)


def test_losses_that_return_another_model_state_are_refused(stateful, batch):
    without = lambda *args: squares(*args)[0]
    other = lambda *args: (squares(*args)[0], nn.State(()))
    for loss, has_aux, message in [
        (without, False, r"must return \(loss, model_state\), got f32\[\]"),
        (squares, True, r"must return \(loss, \(model_state, aux\)\), got \("),
        (other, False, r"(?s)model_state like the one it got, State.*; got State\(\): the old"),
    ]:
        with pytest.raises(TypeError, match=message):
            make_step(loss, SGD, has_aux=has_aux)(copy_arrays(stateful), batch)

    def step_to(old, new):
        loss = lambda weight, model_state, batch, key: (jnp.sum(weight), {"b": new})
        return make_step(loss, SGD)(start(jnp.ones(2), model_state={"b": old}), None)[0]

    # The error compares values, not their text.
    for old, new, *shown in [
        (1, True, "1", "True"),
        (jnp.ones(2), jnp.ones(3), r"an array of shape \(2,\) .*", r"an array of shape \(3,\) .*"),
    ]:
        before, after = (rf"the {each} model_state\['b'\] is " for each in ("old", "new"))
        with pytest.raises(TypeError, match=f": {before}{shown[0]}, and {after}{shown[1]}\\."):
            step_to(old, new)
    # The loss may return NumPy arrays.
    assert step_to(jnp.zeros(2), np.ones(2, np.float32)).model_state["b"].tolist() == [1, 1]


# --- errors and names ---


def test_state_of_another_optimiser_is_refused(model, batch):
    state = start(model, ADAM)
    for optimiser, expected in [
        (SGD, r"its optimiser, \(EmptyState, EmptyState\), but the TrainState has"),
        (optax.identity(), r"optimiser, EmptyState, .* has \(ScaleByAdamState, EmptyState\)"),
    ]:
        with pytest.raises(ValueError, match=expected) as caught:
            make_step(squared_error, optimiser)(state, batch)
        assert "Pass the same optimiser to make_step and TrainState.create" in str(caught.value)
    wider = tree_at(lambda state: state.model.layers[0].weight, state, jnp.ones((5, 3)))
    moment = r"\[0\]\.mu\.layers\[0\]\.weight is an array of shape"
    found, expected = (
        rf"state\.optimiser_state{moment} \(4, 3\)",
        rf"init\(model\){moment} \(5, 3\)",
    )
    with pytest.raises(ValueError, match=rf"{found} .*, and optimiser\.{expected}"):
        make_step(squared_error, ADAM)(wider, batch)


def test_optimisers_may_start_from_the_values_of_parameters(layer, batch):
    init = lambda params: max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(params))
    update = lambda updates, state, params: (SGD.update(updates, SGD.init(params))[0], state)
    optimiser = optax.GradientTransformation(init, update)
    assert make_step(squared_error, optimiser)(start(layer, optimiser), batch)[0].step == 1


def test_bad_states_optimisers_and_losses_are_refused(model, batch):
    state, step = start(model), make_step(squared_error, ADAM)

    def keyless(model, batch):
        return squared_error(model, batch, None)

    def returning(returned, has_aux=False):
        return lambda: make_step(lambda *_: returned, SGD, has_aux=has_aux)(state, batch)

    pair = r"has_aux=True\): the loss must return \(loss, aux\), got"
    number = r"a number, of shape \(\); got"
    to_call = r"make_step expected the optimiser .* optax\.G.*: call it, `adam"
    parameters = r"make_step calls `loss\(model, batch, key\)`, but keyless does not accept .*: too"
    for call, message in [
        (lambda: step(model, batch), r"The step expected a TrainState, got MLP\. Create one"),
        (lambda: step(state, *batch), r"it takes \(state, batch\), and got 3\. .* a tuple"),
        (lambda: make_step(squared_error, optax.adam), to_call),
        (lambda: make_step(ADAM, step), r"make_step\(loss, optimiser\) expected `loss` to be a"),
        (returning(jnp.ones(2), has_aux=True), pair),
        (returning((0.0, 1, 2), has_aux=True), pair),
        (returning((0.0, {"aux": 1})), rf"{number} \(0\.0, {{'aux': 1}}\): .*has_aux="),
        (returning(jnp.ones(1)), rf"{number} f32\[1\]: take the mean over the batch"),
        (returning("text"), f"{number} 'text'"),
        (lambda: make_step(keyless, SGD)(state, batch), f"{parameters} many.*model_state="),
    ]:
        with pytest.raises(TypeError, match=message):
            call()


@pytest.mark.usefixtures("plain_dispatch")
def test_error_of_a_donated_state_names_the_path(model, batch):
    state, step = start(model), make_step(squared_error, SGD)
    step(state, batch)
    with pytest.raises((RuntimeError, ValueError), match="deleted") as caught:
        step(state, batch)
    note = "These arguments of step are deleted, since they were donated to a call: state.model.la"
    assert note in "".join(caught.value.__notes__)


def test_steps_of_several_functions_are_not_reported_as_retraces(layer, batch):
    def twice(model, batch, key):
        return 2 * squared_error(model, batch, key)

    with debug.explain_retraces(lambda trace: None) as retraces:
        for loss in (squared_error, twice):
            step = make_step(loss, SGD)
            for steps_per_call in (1, 2):
                fit(start(layer), step, [batch] * 4, num_steps=4, steps_per_call=steps_per_call)
        for measure in (lambda model, batch: {"a": batch[0]}, lambda model, batch: {"b": batch[1]}):
            make_evaluate(measure, [batch])(start(layer))
    assert retraces == []
    with debug.explain_retraces(lambda trace: None) as retraces:
        step = make_step(squared_error, SGD)
        state, _ = step(start(layer), batch)
        step(state, jax.tree.map(lambda each: each[:2], batch))
    assert retraces[0].function == "squared_error"
    assert step.__qualname__ == "make_step(squared_error)"
