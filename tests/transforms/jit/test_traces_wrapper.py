"""Wrappers of one function share its traces, and so do lowering and calling."""

import copy

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from eqxlike import Module, checking_partitions, clear_caches, filter_jit
from tests.transforms.jit.traced import Affine, Traced


def test_wrapping_a_function_again_is_no_new_trace():
    count = 0

    def function(x):
        nonlocal count
        count += 1
        return 2 * x

    for _ in range(5):
        filter_jit(function)(jnp.ones(2))
    assert count == 1


def test_wrapping_a_function_with_other_options_is_a_new_trace():
    count = 0

    def function(x):
        nonlocal count
        count += 1
        return 2 * x

    filter_jit(function)(jnp.ones(2))
    filter_jit(function, donate="all")(jnp.ones(2))
    assert count == 2


def test_modules_of_one_class_share_a_trace_of_their_call():
    count = 0

    class Model(Module):
        weight: object

        def __call__(self, x):
            nonlocal count
            count += 1
            return self.weight * x

    for index in range(5):
        filter_jit(Model(jnp.full(2, index)))(jnp.ones(2, jnp.int32))
    assert count == 1


def test_methods_of_modules_of_one_class_share_a_trace():
    count = 0

    class Model(Module):
        weight: object

        @filter_jit
        def apply(self, x):
            nonlocal count
            count += 1
            return self.weight * x

    for index in range(5):
        Model(jnp.full(2, index)).apply(jnp.ones(2, jnp.int32))
    assert count == 1


def test_wrapper_that_was_copied_shares_the_trace():
    count = 0

    def function(x):
        nonlocal count
        count += 1
        return 2 * x

    wrapper = filter_jit(function)
    wrapper(jnp.ones(2))
    copy.copy(wrapper)(jnp.ones(2))
    jtu.tree_map(lambda leaf: leaf, wrapper)(jnp.ones(2))
    assert count == 1


def test_clear_caches_is_one_trace_more():
    traced = Traced(lambda x: 2 * x)
    traced(jnp.ones(2))
    clear_caches()
    traced(jnp.ones(2))
    traced(jnp.ones(2))
    assert traced.count == 2


def test_lowering_compiling_and_calling_is_one_trace():
    traced = Traced(lambda x: 2 * x)
    traced.jitted.lower(jnp.ones(2)).compile()
    traced(jnp.ones(2))
    traced(jnp.ones(2))
    assert traced.count == 1


def test_lowering_from_shapes_and_calling_is_one_trace():
    traced = Traced(lambda module: 2 * module.scale)
    traced.jitted.lower(Affine(jax.ShapeDtypeStruct((2,), jnp.float32)))
    traced(Affine(jnp.ones(2)))
    assert traced.count == 1


def test_out_shardings_take_no_second_trace():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    traced = Traced(lambda x: 2 * x, out_shardings=sharding)
    traced(jnp.ones(2))
    traced(jnp.ones(2))
    assert traced.count == 1


def test_in_shardings_take_no_second_trace():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    traced = Traced(lambda x: 2 * x, in_shardings=sharding)
    traced(jnp.ones(2))
    traced(jnp.ones(2))
    assert traced.count == 1


def test_checking_mode_takes_no_second_trace():
    traced = Traced(lambda module: module.scale)
    traced(Affine(jnp.ones(2)))
    with checking_partitions():
        traced(Affine(jnp.ones(2)))
    traced(Affine(jnp.ones(2)))
    assert traced.count == 1
