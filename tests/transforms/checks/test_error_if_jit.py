"""`filter_jit` of functions with a check: they wait and raise our error; others do not wait."""

import contextlib
import threading
import traceback
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from eqxlike import EqxlikeRuntimeError, Module, clear_caches, error_if, filter_grad, filter_jit

X = jnp.arange(3.0)


class Model(Module):
    weight: jax.Array
    name: str = "model"

    @filter_jit
    def __call__(self, x):
        return error_if(self.weight * x, x > 10, "too large"), self.name


def checked(x):
    return error_if(x, x > 10, "too large")


@pytest.fixture
def waits(monkeypatch):
    """Counts the calls that wait."""
    counted = []
    block = jax.block_until_ready

    def counting_block(tree):
        counted.append(tree)
        return block(tree)

    monkeypatch.setattr(jax, "block_until_ready", counting_block)
    return counted


def fails(function, *args):
    with pytest.raises(EqxlikeRuntimeError, match="too large"):
        function(*args)
    return True


# --- what is raised -------------------------------------------------------------------------------


def test_error_is_the_message_alone():
    jitted = filter_jit(checked)
    for x in (X, X + 10, X + 10):
        with contextlib.suppress(EqxlikeRuntimeError):
            jitted(x)
    with pytest.raises(EqxlikeRuntimeError) as caught:
        jitted(X + 10)
    error = caught.value
    assert str(error).startswith("too large\n(check at ")
    assert (error.__context__, error.__cause__) == (None, None)
    frames = traceback.extract_tb(error.__traceback__)
    assert [frame.filename for frame in frames] == [__file__]


@pytest.mark.parametrize("warm", [False, True])
def test_call_after_a_failed_one_is_as_any(warm):
    model = Model(jnp.ones(3))
    if warm:
        model(X)
    assert fails(model, X + 10)
    for _ in range(2):
        product, name = model(X)
        assert (product.tolist(), name) == ([0, 1, 2], "model")
    assert fails(model, X + 10)


def test_failed_call_is_traced_once():
    count = []
    jitted = filter_jit(lambda x: (count.append(1), checked(x))[1])
    assert [fails(jitted, X + 10) for _ in range(3)] == [True] * 3
    assert jitted(X).tolist() == [0, 1, 2]
    assert len(count) == 1


@pytest.mark.usefixtures("compiles_alone")
def test_threads_get_each_its_own_message():
    jitted = filter_jit(
        lambda x, name: error_if(x, x > 10, f"of {name}"),
    )
    texts = {}

    def call(name):
        for _ in range(5):
            try:
                jitted(X + 10, name)
            except EqxlikeRuntimeError as error:
                texts.setdefault(name, set()).add(str(error).split("\n")[0])

    threads = [threading.Thread(target=call, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {name: {f"of {name}"} for name in "abcd"}


def test_error_without_a_check_is_that_of_jax():
    def fail(x):
        raise KeyError("mine")

    struct = jax.ShapeDtypeStruct((3,), X.dtype)
    with pytest.raises(jax.errors.JaxRuntimeError, match="mine"):
        filter_jit(lambda x: jax.pure_callback(fail, struct, x))(X).block_until_ready()


def test_donated_arguments_that_are_gone_are_named():
    jitted = filter_jit(
        lambda x, tree: (checked(x), tree["a"] + 1, tree["b"] + 1), donate=("tree",)
    )
    with pytest.raises(EqxlikeRuntimeError) as caught:
        jitted(X + 10, {"a": X + 0, "b": X + 1})
    (note,) = caught.value.__notes__
    assert note.startswith("Donated to the call that failed, and so no longer there:")
    assert note.endswith("tree['a'], tree['b'].")


def test_nothing_is_said_of_donation_where_nothing_is_donated():
    with pytest.raises(EqxlikeRuntimeError) as caught:
        filter_jit(checked)(X + 10)
    assert not hasattr(caught.value, "__notes__")


def test_warnings_are_restored_after_a_failed_call():
    jitted = filter_jit(lambda x: checked(x).sum(), donate="all")
    jitted(X + 0)
    before = list(warnings.filters)
    assert fails(jitted, jnp.arange(5.0) + 10)
    assert warnings.filters == before


# --- who waits ------------------------------------------------------------------------------------


def test_function_with_a_check_waits_at_each_call(waits):
    jitted = filter_jit(checked)
    for _ in range(3):
        jitted(X)
    assert len(waits) == 3


def test_function_without_a_check_never_waits(waits):
    jitted = filter_jit(lambda x: 2 * x)
    for _ in range(3):
        jitted(X)
    assert waits == []


def test_call_for_a_shape_without_a_check_does_not_wait(waits):
    jitted = filter_jit(lambda x: checked(x) if x.ndim else x)
    jitted(X[0])
    jitted(X)
    assert len(waits) == 1
    jitted(X[0])
    assert len(waits) == 1
    assert fails(jitted, X + 10)


def test_check_that_is_off_makes_no_call_wait(waits):
    filter_jit(lambda x: error_if(x, x > 10, "", on_error="off"))(X)
    assert waits == []


@pytest.mark.parametrize("is_static", [False, True])
def test_function_that_calls_a_compiled_one_with_a_check_waits(waits, is_static):
    inner = filter_jit(checked)
    inner(X)
    # Of an argument, or of a constant in the program.
    outer = filter_jit(lambda x: 2 * inner(X if is_static else x))
    for _ in range(2):
        outer(X)
    assert len(waits) == 3


def test_function_that_calls_one_that_jax_has_traced_waits(waits):
    inner = jax.jit(checked)
    inner(X)
    outer = filter_jit(lambda x: (2 * inner(x), "doubled"))
    for _ in range(2):
        assert outer(X)[0].tolist() == [0, 2, 4]
    assert len(waits) == 2
    assert fails(outer, X + 10)


def test_function_that_returns_what_one_that_jax_has_traced_returns_waits(waits):
    inner = jax.jit(checked)
    inner(X)
    outer = filter_jit(lambda x: inner(x))
    for _ in range(2):
        assert outer(X).tolist() == [0, 1, 2]
    assert len(waits) == 2


# What calls `inner`, which JAX has traced before, only for arrays of the longer shape.
MET_LATER = {
    "function": lambda inner: filter_jit(lambda x: inner(x) if len(x) == 5 else x),
    "with a static output": lambda inner: filter_jit(
        lambda x: (inner(x), "longer") if len(x) == 5 else (x, "shorter")
    ),
    "in a loop": lambda inner: filter_jit(
        lambda x: jax.lax.fori_loop(0, 2, lambda _, x: inner(x) if len(x) == 5 else x, x)
    ),
    "mapped over": lambda inner: filter_jit(
        lambda x: jax.vmap(inner)(x[None]) if len(x) == 5 else x
    ),
    "differentiated": lambda inner: filter_jit(
        filter_grad(lambda x: (inner(x) if len(x) == 5 else x).sum())
    ),
    "in another function": lambda inner: filter_jit(
        filter_jit(lambda x: inner(x) if len(x) == 5 else x)
    ),
    "with shardings of its output": lambda inner: filter_jit(
        lambda x: {"output": inner(x) if len(x) == 5 else x},
        out_shardings={"output": SingleDeviceSharding(jax.devices()[0])},
    ),
    "that donates": lambda inner: filter_jit(
        lambda x: (inner(x) if len(x) == 5 else x).sum(), donate="all"
    ),
}


@pytest.mark.parametrize("name", MET_LATER)
def test_function_that_jax_has_traced_and_that_a_later_trace_meets_makes_it_wait(waits, name):
    inner = jax.jit(checked)
    jax.grad(lambda x: jax.vmap(inner)(x[None]).sum())(jnp.arange(5.0)), inner(jnp.arange(5.0))
    outer = MET_LATER[name](inner)
    for _ in range(2):
        outer(jnp.arange(3.0))
    before = len(waits)
    for _ in range(3):
        outer(jnp.arange(5.0))
    assert (before, len(waits) - before) == (0, 3)
    assert fails(outer, jnp.arange(5.0) + 10)


def test_function_compiled_ahead_of_time_for_a_later_shape_waits(waits):
    inner = jax.jit(checked)
    inner(jnp.arange(5.0))
    outer = filter_jit(lambda x: inner(x) if len(x) == 5 else x)
    outer(jnp.arange(3.0))
    outer.lower(jnp.arange(5.0)).compile()(jnp.arange(5.0))
    assert len(waits) == 1


def test_function_that_looks_for_checks_is_traced_once_for_each_shape():
    inner = jax.jit(checked)
    inner(X)
    shapes = []

    @filter_jit
    def outer(x):
        shapes.append(x.shape)
        return inner(x)

    for size in (3, 4, 5, 3, 4, 5):
        outer(jnp.arange(float(size)))
    assert shapes == [(3,), (4,), (5,)]


def test_function_with_shardings_of_its_output_waits(waits):
    mesh = jax.make_mesh((2,), ("devices",))
    sharding = NamedSharding(mesh, PartitionSpec("devices"))
    x = jax.device_put(jnp.arange(4.0), sharding)
    jitted = filter_jit(lambda x: (checked(x), x), out_shardings=(sharding, None))
    for _ in range(2):
        assert jitted(x)[0].sharding == sharding
    assert len(waits) == 2
    assert fails(jitted, x + 10)


def test_traced_call_does_not_wait(waits):
    inner = filter_jit(checked)
    inner(X)
    jax.make_jaxpr(inner)(X)
    assert len(waits) == 1


def test_call_inside_a_transformation_raises():
    assert fails(filter_grad(lambda x: filter_jit(checked)(x).sum()), X + 10)


def test_function_forgotten_and_made_anew_waits(waits):
    jitted = filter_jit(checked)
    jitted(X)
    clear_caches()
    jitted(X)
    assert len(waits) == 2


def test_function_compiled_ahead_of_time_waits_and_raises(waits):
    compiled = filter_jit(checked).lower(X).compile()
    assert compiled(X).tolist() == [0, 1, 2]
    assert len(waits) == 1
    assert fails(compiled, X + 10)
    assert compiled(X).tolist() == [0, 1, 2]
