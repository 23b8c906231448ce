"""`find_nonfinite` names the operation and the layer that produce a NaN or an infinity."""

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
    """The file and line of the only line of a function that contains a text."""
    lines, first = inspect.getsourcelines(function)
    (found,) = [number for number, line in enumerate(lines, start=first) if text in line]
    return f"{pathlib.Path(__file__)}:{found}"


def test_report_names_layer_operation_line_and_ranges():
    found = find_nonfinite(in_a_network(Log), TWO)
    assert str(found) == (
        "The first infinity of the forward pass was made by `log` in model.layers[1] (Log):\n"
        f"  at {line_of(Log.__call__, 'jnp.log')} in Log.__call__\n"
        "  input float32[2]: 0 to 1\n"
        "  output float32[2]: 0, 1 infinite, the first at [1]\n"
        "  It reaches output."
    )


def test_layer_of_an_argument_is_found_in_transformations():
    for transform in (eqx.filter_jit, eqx.filter_checkpoint):
        found = find_nonfinite(transform(mean), in_a_network(Log), TWO[None])
        assert (found.layer, found.layer_type, found.operation) == ("model.layers[1]", "Log", "log")
        assert found.source.startswith(line_of(Log.__call__, "jnp.log"))


def test_gradient_is_searched_if_the_forward_pass_is_finite():
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
    carry = jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, one_over(c[1])), (0, x[1]))
    return carry[1]


def one_over(x):
    return 1 / (x - 1)


def of_nested(x):
    body = lambda carry, each: (jax.lax.cond(each > 1, one_over, lambda c: c, carry), None)
    return jax.jit(lambda x: jax.lax.scan(body, x[0], x)[0])(x)


custom_jvp, custom_vjp = jax.custom_jvp(one_over), jax.custom_vjp(one_over)
custom_jvp.defjvps(lambda tangent, output, x: tangent)
custom_vjp.defvjp(lambda x: (one_over(x), None), lambda _, cotangent: (cotangent,))
# Functions, the loop iterations in which they divide by zero, and the function that divides.
DIVISIONS = [
    (of_scan, (1,), "of_scan"),
    (of_scan_backwards, (0,), "of_scan_backwards"),
    (of_while, (1,), "one_over"),
    (of_nested, (1,), "one_over"),
    (lambda x: jax.lax.cond(x.sum() > 0, one_over, lambda x: x, x), (), "one_over"),
    *((wrap(one_over), (), "one_over") for wrap in (jax.jit, jax.checkpoint)),
    *((function, (), "one_over") for function in (custom_jvp, custom_vjp)),
]


def test_operation_inside_another_is_found():
    for function, turns, name in DIVISIONS:
        found = find_nonfinite(function, jnp.array([1.0, 2.0]))
        assert (found.operation, found.kind, found.turns) == ("div", "infinity", turns)
        assert re.search(rf"test_nonfinite\.py:\d+ in .*{name}", found.source)
        assert ("by `div`, turn 1 of the loop:" in str(found)) == (turns == (1,))


def attend(x, mask):
    return jax.nn.softmax(jnp.where(mask, x, -jnp.inf))


MASKED = {
    "alone": lambda x, mask, by: jnp.where(mask, x, -jnp.inf) / by,
    "softmax after": lambda x, mask, by: attend(jnp.where(mask, x, -jnp.inf) / by, True),
    "row of a loop": lambda x, mask, by: jax.lax.map(
        lambda row: jnp.where(mask, row, -jnp.inf) / by, x[None]
    ),
}


def test_infinity_of_a_mask_is_ignored_and_does_not_hide_another():
    mask = jnp.array([True, False])
    assert find_nonfinite(attend, TWO, mask) is None
    found = find_nonfinite(attend, TWO, jnp.array([False, False]))
    assert (found.kind, found.operation) == ("NaN", "sub")
    found = [find_nonfinite(each, TWO, mask, jnp.array(0.0)) for each in MASKED.values()]
    found += [find_nonfinite(lambda x, by: x / by, jnp.array([-jnp.inf, 1.0]), jnp.array(0.0))]
    for each in found:
        assert (each.kind, each.operation, each.came_with) == ("infinity", "div", "")


def test_infinity_of_a_constant_is_reported_as_the_constant():
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
    text = "The first {} of the forward pass comes from x.\n  It reaches output."
    found = find_nonfinite(mean, in_a_network(Log), TWO[None] * jnp.nan)
    assert str(found) == text.format("NaN")
    found = find_nonfinite(lambda shift, x: 2 * x + shift, jnp.ones(2), x=TWO * jnp.inf)
    assert str(found) == text.format("infinity")


class Nothing(eqx.Module):
    inner: nn.Linear

    def __call__(self, x):
        return 0.0 * self.inner(x)

    def method(self, x):
        return self(x)


def test_weight_whose_infinity_became_a_nan_is_named_also_in_transformations():
    linear = nn.Linear(2, 2, key=jax.random.key(0))
    model = Nothing(eqx.tree_at(lambda each: each.weight, linear, jnp.full((2, 2), jnp.inf)))
    for transformed, *shape in [
        (model, 2),
        (model.method, 2),
        (eqx.filter_vmap(model), 3, 2),
        (eqx.filter_jit(eqx.filter_vmap(model)), 3, 2),
        (eqx.filter_jit(eqx.filter_vmap(model.method)), 3, 2),
    ]:
        found = find_nonfinite(transformed, jnp.ones(shape))
        assert (found.kind, found.operation, found.layer) == ("NaN", "mul", "model")
        assert found.came_with == "model.inner.weight"
        assert "\n  The infinite input comes from model.inner.weight.\n" in str(found)


def over_rows(function):
    return lambda x: jax.lax.scan(lambda carry, row: (carry, function(row)), 0.0, x)[1]


def test_each_iteration_of_a_loop_is_searched_separately():
    # The NaN is reported before the infinite argument.
    function = over_rows(lambda row: jnp.where(jnp.isinf(row), row, jnp.log(row)))
    found = find_nonfinite(function, jnp.array([jnp.inf, -1.0]))
    assert (found.kind, found.operation, found.turns) == ("NaN", "log", (1,))
    assert found.came_with == ""
    # The first row is infinite and is not an input of the second.
    function = over_rows(lambda row: jnp.where(row < 0, jnp.log(row), 0.0))
    found = find_nonfinite(lambda x: function(1 / x), jnp.array([0.0, -1.0]), gradient=False)
    assert (found.operation, found.turns, found.then) == ("log", (1,), None)


def test_callbacks_in_a_loop_are_called_once_in_each_iteration():
    seen = []

    def inverse(x):
        jax.debug.callback(lambda x: seen.append(float(x)), x, ordered=True)
        return 1 / x

    assert find_nonfinite(over_rows(inverse), jnp.zeros(3), gradient=False).turns == (0,)
    jax.effects_barrier()
    assert seen == [0.0] * 3


def test_training_step_is_searched():
    optimiser = optax.adam(1e-3)
    state = train.TrainState.create(Log(jnp.ones(2)), optimiser, key=jax.random.key(1))
    step = train.make_step(lambda model, x, key: jnp.mean(model(x)), optimiser)
    found = find_nonfinite(step, state, TWO, gradient=False)
    assert (found.layer, found.operation) == ("state.model", "log")


@jax.jit
def apply(layer, x):
    return layer(x)


def test_layer_is_the_argument_of_this_call():
    def function(first, second, x):
        return apply(second, x)

    def average(model, other, x):
        return jax.tree.map(lambda a, b: (a + b) / 2, model, other)(x)

    log, norm = Log(jnp.ones(2)), Norm(jnp.ones(2))
    assert find_nonfinite(function, norm, log, TWO).layer == "second"
    assert find_nonfinite(lambda log, x: apply(log, x), log, TWO).layer == "log"
    found = find_nonfinite(average, log, Log(jnp.ones(2)), TWO)
    assert (found.layer, found.operation) == ("model", "log")


def test_gradient_excludes_frozen_arrays_and_a_key_serves_both_passes():
    found = find_nonfinite(mean, nn.freeze(Norm(jnp.ones(2))), jnp.zeros((1, 2)))
    assert found.reaches == "the gradient of x"
    noise = lambda x, key: x * jax.random.normal(key, (2,))
    assert find_nonfinite(noise, TWO, jax.random.key(0)) is None


def test_search_runs_without_implicit_transfers_and_keeps_donated_arguments():
    with eqx.transfers("explicit"):
        found = find_nonfinite(lambda x: jnp.log(x) * 2, TWO)
    assert found.operation == "log"
    step, x = eqx.filter_jit(lambda x: x / 0.0, donate="all"), jnp.ones(2)
    assert find_nonfinite(step, x).operation == "div"
    assert not x.is_deleted()
    without_turns = lambda x: jax.lax.scan(lambda c, y: (c, y), x / 0.0, jnp.zeros((0, 2)))
    assert find_nonfinite(without_turns, TWO).operation == "div"


def test_programs_without_values_or_gradients_raise():
    tree = {"a": jax.ShapeDtypeStruct((2,), jnp.float32)}
    loop = lambda x: jax.lax.while_loop(lambda c: c < 3, lambda c: c + 1, x)
    traced = jax.jit(lambda x: find_nonfinite(jnp.sin, x))
    struct = r"x\['a'\] has no value: it is a `jax.ShapeDtypeStruct`"
    for error, message, call in (
        (ValueError, "runs the program on values, but x has no value", lambda: traced(TWO)),
        (ValueError, struct, lambda: find_nonfinite(lambda x: x, tree)),
        (TypeError, "`find_nonfinite` expects a function", lambda: find_nonfinite(3.0)),  # pyright: ignore
        (ValueError, "Reverse-mode", lambda: find_nonfinite(loop, TWO[0])),
    ):
        with pytest.raises(error, match=message) as raised:
            call()
    assert "Pass `gradient=False`" in raised.value.__notes__[-1]
