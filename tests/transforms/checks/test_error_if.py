"""What a failed check says and where it is made; what a check that passes leaves as it was."""

import inspect
import re
import traceback

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from eqxlike import (
    EqxlikeRuntimeError,
    EqxlikeTracetimeError,
    branched_error_if,
    error_if,
    filter_jit,
    filter_vmap,
)

X = jnp.arange(3.0)
CUBE = jnp.arange(24.0).reshape(2, 3, 4)


def checked(x, limit=10.0):
    return error_if(x, x > limit, "too large")


LINE_OF_CHECK = inspect.getsourcelines(checked)[1] + 1


def text_of(function, *args):
    with pytest.raises(EqxlikeRuntimeError) as caught:
        function(*args)
    return str(caught.value)


# --- the message --------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda f: f, filter_jit, jax.vmap], ids=["eager", "jit", "vmap"])
def test_message_says_where_the_check_stands(wrap):
    assert f"(check at {__file__}:{LINE_OF_CHECK} in checked" in text_of(wrap(checked), X + 10)


def test_message_of_a_bool_says_where_the_check_stands():
    def fail():
        return error_if(X, True, "too large")

    line = inspect.getsourcelines(fail)[1] + 1
    with pytest.raises(EqxlikeTracetimeError) as caught:
        fail()
    place = f"{__file__}:{line} in {fail.__qualname__}"
    assert str(caught.value) == f"too large\n(check at {place})"


@pytest.mark.parametrize("jit", [lambda f: f, filter_jit], ids=["eager", "jit"])
def test_message_is_whole(jit):
    message = "Größe:\n\n  %s {} \\n " + 5000 * "long " + "[eqxlike failure 0]"
    text = text_of(jit(lambda x: error_if(x, x > 1, message)), X)
    assert text.startswith(f"{message}\n(check at")


@pytest.mark.parametrize("jit", [lambda f: f, filter_jit], ids=["eager", "jit"])
def test_message_names_the_members_of_nested_batches_that_fail(jit):
    mapped = jit(jax.vmap(jax.vmap(checked)))
    for failing, said in [
        ([(1, 2)], "batch index (1, 2))"),
        ([(0, 2), (1, 0)], "batch indices (0, 2) and (1, 0))"),
        ([(0, 0), (0, 1), (1, 2)], "batch indices (0, 0), (0, 1) and (1, 2))"),
    ]:
        x = np.zeros((2, 3, 4), "float32")
        x[tuple(zip(*failing, strict=True))] = 11
        assert f", failed for {said}" in text_of(mapped, x)


def test_message_names_one_index_for_one_batch():
    assert text_of(filter_jit(jax.vmap(checked)), X + 9).endswith(", failed for batch index 2)")


def test_message_names_few_of_many_members():
    text = text_of(filter_jit(jax.vmap(checked)), 20 + jnp.arange(100.0))
    assert text.endswith("batch indices 0, 1, 2, 3, 4, 5, 6, 7 and 92 more)")


def test_indices_are_outermost_first_whatever_axes_are_mapped():
    x = np.zeros((2, 3, 4), "float32")
    x[1, 2, 3] = 11
    mapped = jax.vmap(jax.vmap(checked, in_axes=1), in_axes=1)
    assert text_of(filter_jit(mapped), x).endswith("batch index (2, 3))")


def test_batch_of_a_scan_is_named():
    def total(x):
        return jax.lax.scan(lambda total, x: (checked(total + x, 2), None), 0.0, x)[0]

    x = np.zeros((4, 3), "float32")
    x[2] = 1
    assert text_of(filter_jit(jax.vmap(total)), x).endswith("batch index 2)")


def test_predicate_mapped_inside_and_index_outside_are_matched():
    def of_index(index):
        return jax.vmap(lambda x: branched_error_if(x, x > 1, index, ["a", "b"]))(X)

    text = text_of(filter_jit(jax.vmap(of_index)), jnp.array([0, 1]))
    assert text.startswith("b\n")
    assert text.endswith("batch index (1, 2))")


# --- which check ----------------------------------------------------------------------------------


def three_checks(x, y):
    a = error_if(jnp.sin(x), x > 10, "first")
    b = error_if(y, y > 10, "second")
    c = error_if(2 * y, y > 10, "third")
    return (c * b + a).sum()


WRAPPERS = {
    "jit": lambda f: f,
    "vmap": jax.vmap,
    "grad": lambda f: jax.grad(f, argnums=(0, 1)),
    "grad of vmap": lambda f: jax.grad(lambda x, y: jax.vmap(f)(x, y).sum(), argnums=1),
    "scan": lambda f: lambda x, y: jax.lax.scan(lambda c, y: (c, f(x, y)), 0, y),
    "checkpoint": lambda f: jax.value_and_grad(jax.checkpoint(f)),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_first_that_fails_is_raised(name):
    wrapped = filter_jit(WRAPPERS[name](three_checks))
    x = jnp.ones(3) if "vmap" in name or name == "scan" else jnp.array(1.0)
    assert text_of(wrapped, x, x + 10).startswith("second")
    assert text_of(wrapped, x + 10, x + 10).startswith("first")


def test_first_that_fails_is_raised_where_one_of_them_is_mapped():
    first = lambda x: error_if(x, x > 10, "first")
    second = lambda x: error_if(x, x > 10, "second")
    functions = [
        lambda x, y: jax.vmap(first)(x).sum() + second(y),
        lambda x, y: first(y) + jax.vmap(second)(x).sum(),
        lambda x, y: jax.vmap(first)(x).sum() + jax.vmap(second)(x).sum(),
    ]
    for function in functions:
        assert text_of(filter_jit(function), X + 10, X[2] + 10).startswith("first")


def test_check_that_follows_one_in_another_function_is_made():
    inner = jax.jit(lambda x: error_if(x, x > 10, "inner"))

    @filter_jit
    def outer(x, y):
        return inner(x) + error_if(y, y > 10, "outer")

    assert text_of(outer, X, X + 10).startswith("outer")
    assert text_of(outer, X + 10, X).startswith("inner")


def test_check_after_a_loop_with_one_is_made():
    @filter_jit
    def function(x):
        total, _ = jax.lax.scan(lambda c, x: (checked(c + x), None), 0.0, x)
        return error_if(total, total > 2, "later")

    assert text_of(function, X).startswith("later")
    assert text_of(function, X + 10).startswith("too large")


def test_check_in_the_function_of_a_custom_derivative():
    @jax.custom_jvp
    def function(x):
        return checked(x)

    function.defjvp(lambda primals, tangents: (function(*primals), 2 * tangents[0]))
    assert jax.jit(jax.value_and_grad(function))(X[2]) == (2, 2)
    assert "too large" in text_of(filter_jit(jax.value_and_grad(function)), X[2] + 10)


# --- what passes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("derivative", [jax.grad, jax.jacfwd, jax.hessian])
def test_derivatives_are_those_without_the_check(derivative):
    value = filter_jit(derivative(lambda x: checked(x) ** 3))(X[2])
    assert value == 12


def test_values_are_the_same_to_the_bit():
    x = jnp.array([-0.0, jnp.inf, -jnp.inf, jnp.nan, 1e-45])
    same = filter_jit(checked)(x, jnp.inf)
    assert np.asarray(same).tobytes() == np.asarray(x).tobytes()


def test_tree_comes_back_with_its_leaves():
    tree = {"a": (X, None), "b": "text", "c": 1.5, "float0": np.zeros(2, jax.dtypes.float0)}
    same = filter_jit(lambda x: error_if({**tree, "a": (x, None)}, x > 10, ""))(X)
    assert (same["a"][0].tolist(), same["b"], same["c"]) == ([0, 1, 2], "text", 1.5)
    assert same["float0"].dtype == jax.dtypes.float0


def test_only_the_reduced_predicate_goes_to_the_callback():
    function = jax.vmap(jax.vmap(lambda x: error_if(x, x > 1, "")))
    callbacks = re.findall(r"custom_call @xla.*callback.*", jax.jit(function).lower(CUBE).as_text())
    assert len(callbacks) == 1
    assert ("tensor<2x3xi1>" in callbacks[0], "f32" in callbacks[0]) == (True, False)


def test_a_predicate_that_is_not_mapped_is_not_given_to_the_callback():
    # It is true where the callback runs; given away, it would be computed once more for that.
    text = jax.jit(lambda x: error_if(x, x.sum() > 1, "")).lower(X).as_text()
    assert re.findall(r"custom_call @xla.*callback\w*\((.*?)\)", text) == [""]


def test_check_is_not_entered_where_it_passes(monkeypatch):
    entered = []
    monkeypatch.setattr("eqxlike._transforms._checks._check.Check._on_failure", entered.append)
    jax.block_until_ready(jax.jit(jax.vmap(checked))(X))
    assert entered == []


def test_gradients_of_a_batch_pass_a_check_in_a_branch_that_some_take():
    def function(x, check):
        square = lambda x: (check(jnp.sin(x)) ** 2).sum()
        return jax.lax.cond(x.sum() > 10, square, lambda x: jnp.cos(x).sum(), x)

    def gradient(check):
        return jax.jit(jax.vmap(jax.grad(lambda x: function(x, check))))(CUBE[0])

    np.testing.assert_array_equal(gradient(checked), gradient(lambda x: x))


def test_trace_leaks_nothing():
    with jax.checking_leaks():
        assert filter_jit(filter_vmap(three_checks))(X, X).shape == (3,)


# --- several devices ------------------------------------------------------------------------------


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_check_on_several_devices_raises_on_all_of_them(axis_type):
    # On the first alone, and the other would wait for it until XLA ends the process.
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(axis_type,))
    x = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, PartitionSpec("devices")))
    function = filter_jit(lambda x: checked(x) + x.sum())
    mapped = filter_jit(filter_vmap(checked))
    assert "too large" in text_of(function, x + 10)
    assert function(x).tolist() == [6, 7, 8, 9]
    assert text_of(mapped, x + 8).endswith("batch index 3)")
    assert mapped(x).sharding == x.sharding


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_check_of_what_lies_on_no_known_device_raises_on_all_of_them(axis_type):
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(axis_type,))
    x = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, PartitionSpec("devices")))

    def function(x, y):
        messages = ["a", "b", "c"]
        return branched_error_if(y, y > 10, y.astype(int) - 10, messages) + x.sum()

    mapped = filter_jit(filter_vmap(function, in_axes=(None, 0)))
    assert text_of(mapped, x, X + 10).startswith("c\n")
    assert mapped(x, X).tolist() == [6, 7, 8]
    placed = filter_jit(lambda x: checked(x) + x.sum(), in_shardings=x.sharding)
    assert "too large" in text_of(placed, jnp.arange(4.0) + 10)
    assert placed(jnp.arange(4.0)).tolist() == [6, 7, 8, 9]


def test_failure_on_several_devices_is_not_raised_again_as_python_exits():
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, PartitionSpec("devices")))
    assert "too large" in text_of(filter_jit(checked), x + 10)
    # What JAX waits for at the exit.
    jax.effects_barrier()


def test_check_in_shard_map_raises():
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("devices")
    function = filter_jit(jax.shard_map(checked, mesh=mesh, in_specs=spec, out_specs=spec))
    assert "too large" in text_of(function, 8 + jnp.arange(4.0))
    assert function(jnp.arange(4.0)).tolist() == [0, 1, 2, 3]


# --- how it is raised -----------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda f: f, jax.vmap, jax.grad], ids=["plain", "vmap", "grad"])
def test_without_jit_it_is_raised_where_the_check_stands(wrap):
    function = wrap(lambda x: checked(x))
    with pytest.raises(EqxlikeRuntimeError, match="too large") as caught:
        function(X[2:] + 10 if wrap is jax.vmap else X[2] + 10)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].lineno == LINE_OF_CHECK


def test_in_a_function_of_jax_the_text_of_its_error_has_the_message():
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"too large\n.*check at"):
        jax.jit(checked)(X + 10).block_until_ready()


def test_functions_of_equinox_wait_for_it_too():
    with pytest.raises(jax.errors.JaxRuntimeError, match="too large"):
        equinox.filter_jit(checked)(X + 10)


def test_failure_is_not_logged(caplog, capfd):
    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.jit(checked)(X + 10).block_until_ready()
    assert (caplog.records, capfd.readouterr().err) == ([], "")


def test_error_of_another_callback_is_logged(caplog):
    def fail(x):
        raise ValueError("mine")

    struct = jax.ShapeDtypeStruct((3,), X.dtype)
    with pytest.raises(jax.errors.JaxRuntimeError, match="mine"):
        jax.jit(lambda x: jax.pure_callback(fail, struct, x))(X).block_until_ready()
    assert len(caplog.records) == 1
