import dataclasses

import equinox
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn

POOLS = {
    "Avg1d": ("AdaptiveAvgPool1d", (3,)),
    "Avg2d-by-axis": ("AdaptiveAvgPool2d", ((2, 3),)),
    "Avg3d": ("AdaptiveAvgPool3d", (2,)),
    "Max1d-all": ("AdaptiveMaxPool1d", (5,)),
    "Max2d": ("AdaptiveMaxPool2d", (3,)),
    "Max3d-one": ("AdaptiveMaxPool3d", (1,)),
    "Pool": ("AdaptivePool", ((3, 2), 2, jnp.median)),
}
SIZES = (5, 7, 4)


@pytest.mark.parametrize("name", POOLS)
def test_fields_and_outputs_are_those_of_equinox(name, getkey):
    layer, arguments = POOLS[name]
    ours, theirs = (getattr(module, layer)(*arguments) for module in (nn, equinox.nn))
    assert [each.name for each in dataclasses.fields(ours)][:2] == [
        each.name for each in dataclasses.fields(theirs)
    ]
    assert ours.target_shape == theirs.target_shape
    assert ours.operation is theirs.operation
    x = jr.normal(getkey(), (2, *SIZES[: len(ours.target_shape)]))
    np.testing.assert_allclose(jax.jit(ours)(x), jax.jit(theirs)(x), rtol=1e-5, atol=1e-6)


def test_windows_are_disjoint_and_the_first_longer():
    x = jnp.arange(10.0)[None]
    assert nn.AdaptiveMaxPool1d(4)(x).tolist() == [[2, 5, 7, 9]]


def test_overlapping_windows_take_what_they_share_twice():
    x = jnp.arange(10.0)[None]
    assert nn.AdaptiveMaxPool1d(4, overlap=True)(x).tolist() == [[2, 4, 7, 9]]


def test_overlapping_windows_can_be_more_than_the_input_has_entries():
    x = jnp.array([[1.0, 2.0]])
    assert nn.AdaptiveAvgPool1d(3, overlap=True)(x).tolist() == [[1, 1.5, 2]]


def test_list_becomes_a_tuple_so_that_the_field_is_hashable():
    assert nn.AdaptiveAvgPool2d([2, 3]).target_shape == (2, 3)


def test_average_of_small_integers_does_not_overflow():
    assert nn.AdaptiveAvgPool1d(1)(jnp.full((1, 4), 255, jnp.uint8)).tolist() == [[255]]


def test_an_array_in_the_operation_is_trained():
    class Weighted(eqx.Module):
        weight: jax.Array

        def __call__(self, window):
            return self.weight @ window

    pool = nn.AdaptivePool(2, 1, Weighted(jnp.ones(2)))
    gradient = eqx.filter_grad(lambda pool: jnp.sum(pool(jnp.array([[1.0, 2.0, 3.0, 4.0]]))))
    assert gradient(pool).operation.weight.tolist() == [4, 6]


def test_empty_batch_gives_an_empty_batch():
    assert jax.vmap(nn.AdaptiveAvgPool2d(2))(jnp.ones((0, 3, 5, 4))).shape == (0, 3, 2, 2)


def test_jaxpr_moves_no_axis():
    jaxpr = jax.make_jaxpr(nn.AdaptiveMaxPool2d(2))(jnp.ones((3, 4, 7)))
    names = {equation.primitive.name for equation in jaxpr.eqns}
    assert names == {"slice", "reshape", "reduce_max", "concatenate"}


def test_wrong_number_of_axes_is_named():
    with pytest.raises(ValueError, match=r"AdaptiveAvgPool2d expected x of shape \(channels, hei"):
        nn.AdaptiveAvgPool2d(2)(jnp.ones((4, 4)))


def test_target_larger_than_the_input_is_named():
    with pytest.raises(
        ValueError, match=r"AdaptiveAvgPool2d expected at least 3 entries along axis 2 of x, .* 2\)"
    ):
        nn.AdaptiveAvgPool2d(3)(jnp.ones((1, 4, 2)))


@pytest.mark.parametrize("target", [0, (2,), 2.0, (2, None)])
def test_bad_target_is_named(target):
    with pytest.raises(ValueError, match="target_shape must be an integer of at least 1"):
        nn.AdaptiveAvgPool2d(target)
