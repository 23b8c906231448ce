"""Lowering and compiling before a call."""

import equinox
import jax
import jax.numpy as jnp
import pytest

from eqxlike import clear_caches, filter_jit
from tests.transforms.jit.models import Affine, X, double, equal


def test_compiled_function_module_and_method_accept_the_arguments_of_a_call():
    compiled = filter_jit(lambda x, y=2, *, z=3: x * y * z).lower(X, 2).compile()
    assert equal(compiled(x=X, z=3), 6 * X)
    compiled = filter_jit(Affine(jnp.ones(3))).lower(X).compile()
    assert equal(compiled(X), X)
    compiled = Affine(jnp.ones(3)).jitted.__func__.lower(Affine(jnp.ones(3)), X).compile()
    assert equal(compiled(Affine(2 * jnp.ones(3)), X), 2 * X)


def test_errors_of_static_values_and_compiler_options():
    lowered = filter_jit(double).lower(X, "a")
    with pytest.raises(TypeError, match="compiled for"):
        lowered.compile()(X, "b")
    with pytest.raises(Exception, match="no_such_option"):
        lowered.compile({"no_such_option": 1})


def test_compiled_function_outlives_clear_caches_and_a_failed_trace():
    def function(x):
        if x.shape == (2,):
            raise ValueError("boom")
        return 2 * x

    jitted = filter_jit(function)
    compiled = jitted.lower(X).compile()
    with pytest.raises(ValueError, match="boom"):
        jitted(X[:2])
    assert equal(compiled(X), 2 * X)
    clear_caches()
    assert equal(compiled(X), 2 * X)


def test_struct_instead_of_an_array_is_lowered():
    model = Affine(jax.ShapeDtypeStruct((3,), jnp.float32))
    # In a call, the same struct is a static value.
    assert filter_jit(lambda model: model.scale.shape)(model) == (3,)
    ours, theirs = (jit(lambda it: 2 * it.scale) for jit in (filter_jit, equinox.filter_jit))
    assert equal(ours.lower(model).compile()(Affine(X)), 2 * X)
    with pytest.raises(TypeError, match="unsupported operand"):
        theirs.lower(model)


def test_cost_memory_and_text_equal_jax():
    x = jnp.ones((4, 4))
    ours, jax_own = (jit(lambda x: x @ x).lower(x) for jit in (filter_jit, jax.jit))
    assert ours.cost_analysis() == jax_own.cost_analysis()
    ours, jax_own = ours.compile(), jax_own.compile()
    assert ours.cost_analysis()["flops"] == jax_own.cost_analysis()["flops"]
    sizes = [it.memory_analysis().argument_size_in_bytes for it in (ours, jax_own)]
    assert sizes[0] == sizes[1] == 64
    assert "HloModule" in ours.as_text()
