"""`filter_shard` on two devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import eqxlike
from eqxlike import filter_shard
from tests.transforms.models import COPIED, MESH, ROWS, SPLIT

in_and_outside_jit = pytest.mark.parametrize("under", [lambda f: f, jax.jit], ids=["eager", "jit"])


class Model(eqxlike.Module):
    weight: Any
    activation: Any
    name: str = eqxlike.field(static=True)


@in_and_outside_jit
def test_tree_is_placed_by_a_prefix_of_placements(under):
    def place(x):
        x = x + 1
        placed = filter_shard((x, {"a": x, "b": [x]}), (SPLIT, COPIED))
        return placed, filter_shard([x, np.ones(2, np.float32)], SPLIT)

    shardings = [array.sharding for array in jax.tree.leaves(under(place)(jnp.ones(2)))]
    assert shardings == [SPLIT, COPIED, COPIED, SPLIT, SPLIT]


def test_other_leaves_than_arrays_stay_the_same():
    tree = ("s", 1.0, None, jnp.sin, jax.ShapeDtypeStruct((3,), jnp.float32))
    assert filter_shard(tree, SPLIT) == tree
    model = filter_shard(Model(np.ones(2, np.float32), jnp.tanh, "n"), SPLIT)
    assert (model.weight.sharding, model.activation, model.name) == (SPLIT, jnp.tanh, "n")
    for array, text in (
        eqxlike.filter_jit(lambda x, s: filter_shard((x, s), SPLIT))(jnp.ones(2), "s"),
        filter_shard((jnp.ones(2), "s"), (SPLIT, None)),
    ):
        assert (array.sharding, text) == (SPLIT, "s")


def test_placement_may_be_none_or_a_device():
    x = jnp.ones(2)
    assert filter_shard((x, x), (SPLIT, None))[1] is x
    first, second = devices = jax.devices()
    placed = filter_shard((x, np.ones(2, np.float32)), tuple(devices))
    assert [array.sharding for array in placed] == [*map(SingleDeviceSharding, devices)]
    # A committed array is moved to the other device.
    assert filter_shard(placed[0], second).devices() == {second}
    assert filter_shard(placed, first)[1].devices() == {first}


@in_and_outside_jit
def test_committed_array_is_moved(under):
    x = jax.device_put(jnp.ones(2), jax.devices()[1])
    assert under(lambda: filter_shard(x, SPLIT))().sharding == SPLIT


@in_and_outside_jit
def test_partition_spec_refers_to_the_mesh_in_context(under):
    with jax.set_mesh(MESH):
        x = jnp.ones(2)
        assert under(lambda x: filter_shard(x, ROWS))(x).sharding == SPLIT


def test_jaxpr_equals_the_jaxpr_of_a_sharding_constraint():
    ours, theirs = (
        str(jax.make_jaxpr(lambda x, place=place: place(x, SPLIT))(jnp.ones(2)))
        for place in (filter_shard, jax.lax.with_sharding_constraint)
    )
    assert ours == theirs


def test_error_names_the_path_of_the_array():
    tree = {"name": "n", "x": [jnp.ones(2), jnp.ones(3)]}
    for error, message, args, path in (
        (ValueError, "partitioned", (tree, SPLIT), "x['x'][1]"),
        (TypeError, "cpu", ([jnp.ones(2)], "cpu"), "x[0]"),
    ):
        with pytest.raises(error, match=message) as caught:
            filter_shard(*args)
        assert f"This is the array at {path}." in caught.value.__notes__
    message = "`device_or_shardings` is not a prefix of the tree that it shards"
    with pytest.raises(ValueError, match=message):
        filter_shard(tree, {"name": None})
