"""`error_if`: the report of a failed check, the returned values, and the calls that wait."""

import inspect
import re
import traceback
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from eqxlike import (
    EqxlikeRuntimeError,
    branched_error_if,
    clear_caches,
    error_if,
    filter_jit,
    filter_vmap,
)
from eqxlike._transforms._checks import FailureReport

X = jnp.arange(3.0)
CUBE = jnp.arange(24.0).reshape(2, 3, 4)


def checked(x, limit=10.0):
    return error_if(x, x > limit, "too large")


LINE_OF_CHECK = inspect.getsourcelines(checked)[1] + 1
PLACE = f"(check at {__file__}:{LINE_OF_CHECK} in checked"


def text_of(function, *args):
    with pytest.raises(EqxlikeRuntimeError) as caught:
        function(*args)
    return str(caught.value)


def fails(function, *args):
    return text_of(function, *args).startswith("too large\n(check at ")


@pytest.fixture
def waits(monkeypatch):
    """A list with an item for each call that waits for its result."""
    counted = []
    block = jax.block_until_ready

    def counting_block(tree):
        counted.append(tree)
        return block(tree)

    monkeypatch.setattr(jax, "block_until_ready", counting_block)
    return counted


# --- the message --------------------------------------------------------------------------------


def test_report_has_the_whole_message_and_the_place_of_the_check():
    for function in (checked, filter_jit(checked)):
        assert text_of(function, X + 10) == f"too large\n{PLACE})"
    batched = filter_jit(jax.vmap(checked))
    assert text_of(batched, X + 9) == f"too large\n{PLACE}, failed for batch index 2)"
    # Indices start with the outermost mapped axis.
    nested = jax.vmap(jax.vmap(checked, in_axes=1), in_axes=1)
    x = np.zeros((2, 3, 4), "float32")
    x[1, 2, 3] = 11
    for function in (nested, filter_jit(nested)):
        assert text_of(function, x).endswith("batch index (2, 3))")
    message = "Größe:\n\n  %s {} \\n " + 5000 * "long " + "[eqxlike failure 0]"
    text = text_of(filter_jit(lambda x: error_if(x, x > 1, message)), X)
    assert text.startswith(f"{message}\n(check at")


def test_report_lists_at_most_eight_members_of_a_batch():
    def text(shape, *failing):
        failed = np.zeros(shape, bool)
        for place in failing:
            failed[place] = True
        return FailureReport(("wrong",), "here").text(failed, None)

    assert text((), ()) == "wrong\n(check at here)"
    for found, listed in [
        (text(3, 2), "index 2"),
        (text(3, 0, 2), "indices 0 and 2"),
        (text((2, 3), (0, 0), (0, 1), (1, 2)), "indices (0, 0), (0, 1) and (1, 2)"),
        (text(9, *range(8)), "indices 0, 1, 2, 3, 4, 5, 6 and 7"),
        (text(9, *range(9)), "indices 0, 1, 2, 3, 4, 5, 6, 7 and 1 more"),
        (text(100, *range(100)), "indices 0, 1, 2, 3, 4, 5, 6, 7 and 92 more"),
    ]:
        assert found == f"wrong\n(check at here, failed for batch {listed})"
    # The largest index among the failed members selects the message.
    found = FailureReport("abc", "here").text(np.array([True, False, True]), np.array([0, 2, 1]))
    assert found == "b\n(check at here, failed for batch index 2)"


def test_predicate_mapped_inside_and_index_mapped_outside_are_matched():
    def of_index(index):
        return jax.vmap(lambda x: branched_error_if(x, x > 1, index, ["a", "b"]))(X)

    text = text_of(filter_jit(jax.vmap(of_index)), jnp.array([0, 1]))
    assert text.startswith("b\n")
    assert text.endswith("batch index (1, 2))")


def test_first_failed_check_raises_also_if_some_checks_are_mapped():
    @filter_jit
    def function(x, y, z):
        first = jax.vmap(lambda x: error_if(x, x > 10, "first"))(x)
        second = error_if(y, y > 10, "second")
        third = jax.vmap(lambda z: error_if(z, z > 10, "third"))(z)
        return first.sum() + second + third.sum()

    for x, y, expected in [(X + 10, X[1] + 10, "first"), (X, X[1] + 10, "second"), (X, X[1], "th")]:
        assert text_of(function, x, y, X + 10).startswith(expected)
    assert function(X, X[1], X) == 7


# --- values that pass ---


def test_returned_values_are_identical_bit_by_bit():
    x = jnp.array([-0.0, jnp.inf, -jnp.inf, jnp.nan, 1e-45])
    with jax.checking_leaks():
        same = filter_jit(checked)(x, jnp.inf)
        assert filter_jit(filter_vmap(checked))(X).shape == (3,)
    assert np.asarray(same).tobytes() == np.asarray(x).tobytes()


def test_tree_is_returned_with_its_leaves():
    tree = {"a": (X, None), "b": "text", "c": 1.5, "float0": np.zeros(2, jax.dtypes.float0)}
    same = filter_jit(lambda x: error_if({**tree, "a": (x, None)}, x > 10, ""))(X)
    assert (same["a"][0].tolist(), same["b"], same["c"]) == ([0, 1, 2], "text", 1.5)
    assert same["float0"].dtype == jax.dtypes.float0
    arrays = error_if((X, np.arange(2), np.float32(1)), jnp.array(False), "")
    assert [isinstance(each, jax.Array) for each in arrays] == [True] * 3
    assert (arrays[0] is X, arrays[1].tolist(), arrays[2]) == (True, [0, 1], 1)


def test_only_the_reduced_predicate_is_passed_to_the_callback():
    function = jax.vmap(jax.vmap(lambda x: error_if(x, x > 1, "")))
    callbacks = re.findall(r"custom_call @xla.*callback.*", jax.jit(function).lower(CUBE).as_text())
    assert len(callbacks) == 1
    assert ("tensor<2x3xi1>" in callbacks[0], "f32" in callbacks[0]) == (True, False)
    # A scalar predicate is true whenever the callback runs, so it is not passed.
    text = jax.jit(lambda x: error_if(x, x.sum() > 1, "")).lower(X).as_text()
    assert re.findall(r"custom_call @xla.*callback\w*\((.*?)\)", text) == [""]


def test_gradients_pass_through_a_check_in_a_branch_that_some_members_take():
    def function(x, check):
        square = lambda x: (check(jnp.sin(x)) ** 2).sum()
        return jax.lax.cond(x.sum() > 10, square, lambda x: jnp.cos(x).sum(), x)

    def gradient(check):
        return jax.jit(jax.vmap(jax.grad(lambda x: function(x, check))))(CUBE[0])

    np.testing.assert_array_equal(gradient(checked), gradient(lambda x: x))


def mesh_and_array(axis_type):
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(axis_type,))
    return mesh, jax.device_put(jnp.arange(4.0), NamedSharding(mesh, PartitionSpec("devices")))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_check_on_several_devices_raises_on_all_devices(axis_type):
    # If only the first device raised, the other would wait until XLA ends the process.
    _, x = mesh_and_array(axis_type)
    function = filter_jit(lambda x: checked(x) + x.sum())
    mapped = filter_jit(filter_vmap(checked))
    assert fails(function, x + 10)
    assert function(x).tolist() == [6, 7, 8, 9]
    assert text_of(mapped, x + 8).endswith("batch index 3)")
    assert mapped(x).sharding == x.sharding
    # `jax.effects_barrier`, which JAX calls at exit, does not raise the error again.
    jax.effects_barrier()


def test_check_of_an_array_without_known_device_raises_on_all_devices():
    _, x = mesh_and_array(AxisType.Auto)

    def function(x, y):
        messages = ["a", "b", "c"]
        return branched_error_if(y, y > 10, y.astype(int) - 10, messages) + x.sum()

    mapped = filter_jit(filter_vmap(function, in_axes=(None, 0)))
    assert text_of(mapped, x, X + 10).startswith("c\n")
    assert mapped(x, X).tolist() == [6, 7, 8]
    placed = filter_jit(lambda x: checked(x) + x.sum(), in_shardings=x.sharding)
    assert fails(placed, jnp.arange(4.0) + 10)
    assert placed(jnp.arange(4.0)).tolist() == [6, 7, 8, 9]


# --- raising the error ----------------------------------------------------------------------------


def test_error_without_jit_is_raised_at_the_line_of_the_check():
    calls = [(checked, X[2]), (jax.vmap(checked), X[2:]), (jax.grad(checked), X[2])]
    for function, x in calls:
        with pytest.raises(EqxlikeRuntimeError, match="too large") as caught:
            function(x + 10)
        assert traceback.extract_tb(caught.value.__traceback__)[-1].lineno == LINE_OF_CHECK


def test_error_of_a_compiled_function_has_no_context_or_notes():
    jitted = filter_jit(checked)
    for _ in range(2):
        with pytest.raises(EqxlikeRuntimeError) as caught:
            jitted(X + 10)
    error = caught.value
    assert (error.__context__, error.__cause__, hasattr(error, "__notes__")) == (None, None, False)
    frames = traceback.extract_tb(error.__traceback__)
    assert [frame.filename for frame in frames] == [__file__]


def test_error_of_a_jax_jit_function_has_the_message_and_is_not_logged(caplog, capfd):
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"too large\n.*check at"):
        jax.jit(lambda x: checked(x))(X + 10).block_until_ready()
    assert (caplog.records, capfd.readouterr().err) == ([], "")


def test_error_of_another_callback_is_the_error_of_jax_and_is_logged(caplog):
    def fail(x):
        raise ValueError("mine")

    struct = jax.ShapeDtypeStruct((3,), X.dtype)
    with pytest.raises(jax.errors.JaxRuntimeError, match="mine"):
        filter_jit(lambda x: jax.pure_callback(fail, struct, x))(X).block_until_ready()
    assert len(caplog.records) == 1


def test_failed_call_names_donated_arguments_and_restores_warnings():
    jitted = filter_jit(
        lambda x, tree: (checked(x), tree["a"] + 1, tree["b"] + 1), donate=("tree",)
    )
    jitted(X, {"a": X + 0, "b": X + 1})
    before = list(warnings.filters)
    with pytest.raises(EqxlikeRuntimeError) as caught:
        jitted(X[:2] + 10, {"a": X + 0, "b": X + 1})
    assert warnings.filters == before
    (note,) = caught.value.__notes__
    assert note.startswith("These arrays were donated to the failed call, and are deleted:")
    assert note.endswith("tree['a'], tree['b'].")


# --- calls that wait ------------------------------------------------------------------------------


def test_only_calls_with_a_check_wait(waits):
    jitted = filter_jit(lambda x: checked(x) if x.ndim else x)
    for x, expected in [(X[0], 0), (X, 1), (X[0], 1), (X, 2), (X, 3)]:
        jitted(x)
        assert len(waits) == expected
    assert fails(jitted, X + 10)
    del waits[:]
    is_off = filter_jit(lambda x: error_if(2 * x, x > 10, "", on_error="off"))
    for _ in range(3):
        is_off(X)
    jax.make_jaxpr(jitted)(X)
    assert waits == []
    clear_caches()
    jitted(X)
    assert len(waits) == 1


def test_function_that_calls_a_compiled_one_with_a_check_waits(waits):
    inner = filter_jit(checked)
    inner(X)
    # The check depends on an argument, or on a constant of the program.
    for outer in (filter_jit(lambda x: 2 * inner(x)), filter_jit(lambda x: 2 * inner(X))):
        del waits[:]
        for _ in range(2):
            outer(X)
        assert len(waits) == 2


def test_call_waits_if_a_later_trace_calls_a_traced_function_with_a_check(waits):
    inner = jax.jit(checked)
    five, device = jnp.arange(5.0), SingleDeviceSharding(jax.devices()[0])
    jax.grad(lambda x: inner(x).sum())(five), inner(five)
    # `inner` is only called for arrays of length 5.
    check = lambda x: inner(x) if len(x) == 5 else x
    for outer in (
        filter_jit(lambda x: (check(x), "longer" if len(x) == 5 else "shorter")),
        filter_jit(filter_jit(lambda x: check(x))),
        filter_jit(lambda x: {"output": check(x)}, out_shardings={"output": device}),
        filter_jit(lambda x: check(x).sum(), donate="all"),
    ):
        del waits[:]
        for size, expected in [(3, 0), (3, 0), (5, 1), (5, 2)]:
            outer(jnp.arange(float(size)))
            assert len(waits) == expected
        assert fails(outer, five + 10)


def test_function_compiled_before_the_call_waits_and_raises(waits):
    inner, five = jax.jit(checked), jnp.arange(5.0)
    inner(five)
    jitted = filter_jit(lambda x: inner(x) if len(x) == 5 else x)
    jitted(X)
    compiled = jitted.lower(five).compile()
    assert compiled(five).tolist() == [0, 1, 2, 3, 4]
    assert len(waits) == 1
    assert fails(compiled, five + 10)
