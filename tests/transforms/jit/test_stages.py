"""Lowering and compiling ahead of a call, with JAX's own stages."""

import jax
import jax.numpy as jnp
import pytest

from eqxlike import clear_caches, filter_jit
from tests.transforms.jit.models import Affine, X, double, equal


def test_compiled_takes_the_same_arguments_in_another_spelling():
    def function(x, y=2, *, z=3):
        return x * y * z

    compiled = filter_jit(function).lower(X, 2).compile()
    assert equal(compiled(x=X, z=3), 6 * X)


def test_compiled_module_and_method_take_the_arguments_of_their_call():
    compiled = filter_jit(Affine(jnp.ones(3))).lower(X).compile()
    assert equal(compiled(X), X)
    compiled = Affine(jnp.ones(3)).jitted.__func__.lower(Affine(jnp.ones(3)), X).compile()
    assert equal(compiled(Affine(2 * jnp.ones(3)), X), 2 * X)


def test_compiled_with_another_static_is_an_error():
    compiled = filter_jit(double).lower(X, "a").compile()
    with pytest.raises(TypeError, match="compiled for"):
        compiled(X, "b")


def test_compiled_outlives_clear_caches_and_a_failure_for_other_arguments():
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


def test_lowered_from_a_shape_that_was_a_static_argument_before():
    shape = Affine(jax.ShapeDtypeStruct((3,), jnp.float32))
    assert filter_jit(lambda shape: shape.scale.shape)(shape) == (3,)
    lowered = filter_jit(lambda model: 2 * model.scale).lower(shape)
    assert equal(lowered.compile()(Affine(X)), 2 * X)


def test_cost_memory_and_text_are_those_of_jax():
    x = jnp.ones((4, 4))
    ours, jax_own = (jit(lambda x: x @ x).lower(x) for jit in (filter_jit, jax.jit))
    assert ours.cost_analysis() == jax_own.cost_analysis()
    ours, jax_own = ours.compile(), jax_own.compile()
    assert ours.cost_analysis()["flops"] == jax_own.cost_analysis()["flops"]
    sizes = [it.memory_analysis().argument_size_in_bytes for it in (ours, jax_own)]
    assert sizes[0] == sizes[1] == 64
    assert "HloModule" in ours.as_text()


def test_compiler_options_reach_the_compiler():
    with pytest.raises(Exception, match="no_such_option"):
        filter_jit(double).lower(X).compile({"no_such_option": 1})
