"""`find_nonfinite` names the operation that made a NaN or an infinity, and its layer."""

import inspect
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqxlike as eqx
from eqxlike import nn, train
from eqxlike.debug import find_nonfinite

TWO = jnp.array([1.0, -2.0])


class Log(eqx.Module):
    scale: jax.Array

    def __call__(self, x, *, key=None):
        return jnp.log(self.scale * x)


class Norm(eqx.Module):
    scale: jax.Array

    def __call__(self, x, *, key=None):
        square = jnp.sum((self.scale * x) ** 2)
        return jnp.where(square > 0, jnp.sqrt(square), 0.0)


def in_a_network(layer):
    return nn.Sequential([nn.Lambda(jax.nn.relu), layer(jnp.ones(2)), nn.Lambda(jnp.sum)])


def mean(model, x):
    return jnp.mean(jax.vmap(model)(x))


def line_of(function, text):
    """The file and line in this file where a function has a text."""
    lines, first = inspect.getsourcelines(function)
    (found,) = [number for number, line in enumerate(lines, start=first) if text in line]
    return f"{pathlib.Path(__file__)}:{found}"


def test_text_says_layer_operation_line_and_ranges():
    found = find_nonfinite(in_a_network(Log), TWO)
    assert str(found) == "\n".join(
        [
            "The first infinity of the forward pass was made by `log` in model.layers[1] (Log):",
            f"  at {line_of(Log.__call__, 'jnp.log')} in Log.__call__",
            "  input float32[2]: 0 to 1",
            "  output float32[2]: 0, 1 infinite, the first at [1]",
            "  It reaches output.",
        ]
    )


def test_layer_of_an_argument_is_found_through_transformations():
    for transform in (eqx.filter_jit, eqx.filter_checkpoint):
        found = find_nonfinite(transform(mean), in_a_network(Log), TWO[None])
        assert (found.layer, found.layer_type, found.operation) == ("model.layers[1]", "Log", "log")
        assert found.source.startswith(line_of(Log.__call__, "jnp.log"))


def test_gradient_is_searched_where_the_forward_pass_is_finite():
    model = in_a_network(Norm)
    found = find_nonfinite(model, -jnp.ones(2))
    assert (found.during, found.kind, found.layer) == ("gradient", "infinity", "model.layers[1]")
    assert found.source.startswith(line_of(Norm.__call__, "jnp.sqrt"))
    assert found.then.kind == "NaN"
    assert found.reaches == "the gradient of model.layers[1].scale"
    assert "and was turned into NaN by `mul` in model.layers[1] (Norm):" in str(found)
    assert find_nonfinite(model, -jnp.ones(2), gradient=False) is None


def of_scan(x):
    def body(carry, each):
        return carry / (carry - each), carry

    return jax.lax.scan(body, x[1], x)[0]


def of_scan_backwards(x):
    return jax.lax.scan(lambda c, y: (c, 1 / (y - 1.0)), 0.0, x, reverse=True)[1]


def of_while(x):
    def body(carry):
        count, bottom = carry
        return count + 1, 1 / (bottom - 1)

    return jax.lax.while_loop(lambda carry: carry[0] < 2, body, (0, x[1]))[1]


def of_cond(x):
    return jax.lax.cond(x.sum() > 0, lambda x: 1 / (x - 1), lambda x: x, x)


def of_jit(x):
    return jax.jit(lambda x: 1 / (x - 1))(x)


def of_checkpoint(x):
    return jax.checkpoint(lambda x: 1 / (x - 1))(x)


def of_custom_jvp(x):
    function = jax.custom_jvp(lambda x: 1 / (x - 1))
    function.defjvps(lambda tangent, output, x: tangent)
    return function(x)


def of_custom_vjp(x):
    function = jax.custom_vjp(lambda x: 1 / (x - 1))
    function.defvjp(lambda x: (x, None), lambda _, cotangent: (cotangent,))
    return function(x)


def of_nested(x):
    def body(carry, each):
        return jax.lax.cond(each > 1, lambda c: 1 / (c - 1), lambda c: c, carry), None

    return jax.jit(lambda x: jax.lax.scan(body, x[0], x)[0])(x)


TURNS = {of_scan: (1,), of_scan_backwards: (0,), of_while: (1,), of_nested: (1,)}
TURNS |= dict.fromkeys((of_cond, of_jit, of_checkpoint, of_custom_jvp, of_custom_vjp), ())


def test_operation_inside_another_is_found():
    for function, turns in TURNS.items():
        found = find_nonfinite(function, jnp.array([1.0, 2.0]))
        assert (found.operation, found.kind, found.turns) == ("div", "infinity", turns)
        assert re.search(rf"test_nonfinite\.py:\d+ in {function.__name__}", found.source)
        assert ("by `div`, turn 1 of the loop:" in str(found)) == (turns == (1,))


def attend(x, mask):
    return jax.nn.softmax(jnp.where(mask, x, -jnp.inf))


DIVISIONS = {
    "alone": lambda x, mask, by: jnp.where(mask, x, -jnp.inf) / by,
    "softmax after": lambda x, mask, by: attend(jnp.where(mask, x, -jnp.inf) / by, True),
    "row of a loop": lambda x, mask, by: jax.lax.map(
        lambda row: jnp.where(mask, row, -jnp.inf) / by, x[None]
    ),
}


def test_infinity_of_a_mask_is_no_fault_and_hides_none_that_is_made_next_to_it():
    mask = jnp.array([True, False])
    assert find_nonfinite(attend, TWO, mask) is None
    found = find_nonfinite(attend, TWO, jnp.array([False, False]))
    assert (found.kind, found.operation) == ("NaN", "sub")
    found = [find_nonfinite(each, TWO, mask, jnp.array(0.0)) for each in DIVISIONS.values()]
    found += [find_nonfinite(lambda x, by: x / by, jnp.array([-jnp.inf, 1.0]), jnp.array(0.0))]
    for each in found:
        assert (each.kind, each.operation, each.came_with) == ("infinity", "div", "")


def test_infinity_of_a_constant_that_is_moved_or_grows_is_said_to_be_that():
    def moved(x):
        return jnp.flip(jnp.cumsum(jnp.where(x > 1, x, jnp.inf) * 2.0))

    for function in (moved, lambda x: x + jnp.inf):
        text = str(find_nonfinite(function, TWO))
        assert "infinity of the forward pass comes from a constant of the program." in text


def test_arguments_and_results_have_dtypes_and_ranges():
    for dtype in (jnp.float16, jnp.bfloat16, jnp.complex64):
        found = find_nonfinite(lambda x: x / jnp.zeros_like(x), TWO.astype(dtype), gradient=False)
        assert (found.inputs[0].lowest, found.inputs[0].dtype) == (-2.0, np.dtype(dtype).name)
    found = find_nonfinite(lambda x: (1e6 * x).astype(jnp.float16), TWO)
    assert (found.operation, found.inputs[0].highest) == ("convert_element_type", 1e6)
    found = find_nonfinite(lambda x: x / 0.0, TWO, gradient=False)
    assert [each.dtype for each in found.inputs] == ["float32"] * 2


def test_argument_that_is_not_finite_is_named():
    text = str(find_nonfinite(mean, in_a_network(Log), TWO[None] * jnp.nan))
    assert text == "The first NaN of the forward pass comes from x.\n  It reaches output."
    found = find_nonfinite(lambda shift, x: 2 * x + shift, jnp.ones(2), x=TWO * jnp.inf)
    assert str(found) == (
        "The first infinity of the forward pass comes from x.\n  It reaches output."
    )


def test_weight_whose_infinity_became_a_nan_is_named():
    linear = nn.Linear(2, 2, key=jax.random.key(0))
    linear = eqx.tree_at(lambda each: each.weight, linear, jnp.full((2, 2), jnp.inf))
    found = find_nonfinite(lambda model, x: 0.0 * model(x), linear, jnp.ones(2))
    assert (found.kind, found.operation, found.came_with) == ("NaN", "mul", "model.weight")
    assert "\n  The infinite input comes from model.weight.\n" in str(found)


class Nothing(eqx.Module):
    inner: nn.Linear

    def __call__(self, x):
        return 0.0 * self.inner(x)

    def method(self, x):
        return self(x)


def test_weight_of_a_transformed_model_is_named_as_its_layers_are():
    linear = nn.Linear(2, 2, key=jax.random.key(0))
    model = Nothing(eqx.tree_at(lambda each: each.weight, linear, jnp.full((2, 2), jnp.inf)))
    for transformed, *shape in [
        (model.method, 2),
        (eqx.filter_vmap(model), 3, 2),
        (eqx.filter_jit(eqx.filter_vmap(model)), 3, 2),
        (eqx.filter_jit(eqx.filter_vmap(model.method)), 3, 2),
    ]:
        found = find_nonfinite(transformed, jnp.ones(shape))
        assert (found.layer, found.came_with) == ("model", "model.inner.weight")


def test_nan_in_a_stack_is_told_before_an_infinite_argument():
    def body(carry, row):
        return carry, jnp.where(jnp.isinf(row), row, jnp.log(row))

    found = find_nonfinite(lambda x: jax.lax.scan(body, 0.0, x)[1], jnp.array([jnp.inf, -1.0]))
    assert (found.kind, found.operation, found.turns) == ("NaN", "log", (1,))
    assert found.came_with == ""


def test_row_that_is_finite_is_not_blamed_on_another():
    def body(carry, row):
        return carry, jnp.where(row < 0, jnp.log(row), 0.0)

    found = find_nonfinite(
        lambda x: jax.lax.scan(body, 0.0, 1 / x)[1], jnp.array([0.0, -1.0]), gradient=False
    )
    assert (found.operation, found.turns, found.then) == ("log", (1,), None)


def test_callbacks_in_a_loop_are_called_once_a_turn():
    seen = []

    def body(carry, x):
        jax.debug.callback(lambda x: seen.append(float(x)), x, ordered=True)
        return carry, 1 / x

    def function(x):
        return jax.lax.scan(body, 0.0, x)[1]

    assert find_nonfinite(function, jnp.zeros(3), gradient=False).turns == (0,)
    jax.effects_barrier()
    assert seen == [0.0] * 3


def test_step_of_a_training_is_run_as_it_is():
    optimiser = optax.adam(1e-3)
    state = train.TrainState.create(Log(jnp.ones(2)), optimiser, key=jax.random.key(1))
    step = train.make_step(lambda model, x, key: jnp.mean(model(x)), optimiser)
    found = find_nonfinite(step, state, TWO, gradient=False)
    assert (found.layer, found.operation) == ("state.model", "log")


def test_models_of_one_form_are_mapped_onto_each_other():
    def average(model, other, x):
        both = jax.tree.map(lambda a, b: (a + b) / 2, model, other)
        return both(x)

    found = find_nonfinite(average, Log(jnp.ones(2)), Log(jnp.ones(2)), TWO)
    assert (found.layer, found.operation) == ("model", "log")


@jax.jit
def apply(layer, x):
    return layer(x)


def test_layers_in_a_jitted_function_are_those_of_this_call():
    def function(first, second, x):
        return apply(second, x)

    log, norm = Log(jnp.ones(2)), Norm(jnp.ones(2))
    assert find_nonfinite(function, norm, log, TWO).layer == "second"
    assert find_nonfinite(lambda log, x: apply(log, x), log, TWO).layer == "log"


def test_gradient_is_that_of_what_is_not_frozen_and_a_key_serves_both_passes():
    found = find_nonfinite(mean, nn.freeze(Norm(jnp.ones(2))), jnp.zeros((1, 2)))
    assert found.reaches == "the gradient of x"
    noise = lambda x, key: x * jax.random.normal(key, (2,))
    assert find_nonfinite(noise, TWO, jax.random.key(0)) is None


def test_it_runs_where_hidden_copies_are_refused_and_donated_arguments_stay():
    with eqx.transfers("explicit"):
        found = find_nonfinite(lambda x: jnp.log(x) * 2, TWO)
    assert found.operation == "log"
    step, x = eqx.filter_jit(lambda x: x / 0.0, donate="all"), jnp.ones(2)
    assert find_nonfinite(step, x).operation == "div"
    assert not x.is_deleted()
    without_turns = lambda x: jax.lax.scan(lambda c, y: (c, y), x / 0.0, jnp.zeros((0, 2)))
    assert find_nonfinite(without_turns, TWO).operation == "div"


def test_what_has_no_values_or_cannot_be_called_or_differentiated_is_refused():
    with pytest.raises(ValueError, match="runs the program on values, but x has no value"):
        jax.jit(lambda x: find_nonfinite(lambda x: x, x))(TWO)
    with pytest.raises(ValueError, match=r"x\['a'\] has no value: it is a `jax.ShapeDtypeStruct`"):
        find_nonfinite(lambda x: x, {"a": jax.ShapeDtypeStruct((2,), jnp.float32)})
    with pytest.raises(TypeError, match="`find_nonfinite` expects a function"):
        find_nonfinite(3.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="Reverse-mode") as raised:
        find_nonfinite(lambda x: jax.lax.while_loop(lambda c: c < 3, lambda c: c + 1, x), TWO[0])
    assert "Pass `gradient=False`" in raised.value.__notes__[-1]
