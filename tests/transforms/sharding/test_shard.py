"""`filter_shard`: where the arrays of a tree go, on two devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import eqxlike
from eqxlike import filter_shard
from tests.transforms.models import COPIED, MESH, ROWS, SPLIT

anywhere = pytest.mark.parametrize("under", [lambda f: f, jax.jit], ids=["eager", "jit"])


class Model(eqxlike.Module):
    weight: Any
    activation: Any
    name: str = eqxlike.field(static=True)


@anywhere
def test_a_tree_is_placed_by_a_prefix_of_placements(under):
    def place(x):
        x = x + 1
        placed = filter_shard((x, {"a": x, "b": [x]}), (SPLIT, COPIED))
        return placed, filter_shard([x, np.ones(2, np.float32)], SPLIT)

    shardings = [array.sharding for array in jax.tree.leaves(under(place)(jnp.ones(2)))]
    assert shardings == [SPLIT, COPIED, COPIED, SPLIT, SPLIT]


def test_what_is_no_array_is_left_as_it_is():
    tree = ("s", 1.0, None, jnp.sin, jax.ShapeDtypeStruct((3,), jnp.float32))
    assert filter_shard(tree, SPLIT) == tree
    model = filter_shard(Model(np.ones(2, np.float32), jnp.tanh, "n"), SPLIT)
    assert (model.weight.sharding, model.activation, model.name) == (SPLIT, jnp.tanh, "n")
    array, text = eqxlike.filter_jit(lambda x, s: filter_shard((x, s), SPLIT))(jnp.ones(2), "s")
    assert (array.sharding, text) == (SPLIT, "s")
    x, text = filter_shard((jnp.ones(2), "s"), (SPLIT, None))
    assert (x.sharding, text) == (SPLIT, "s")


def test_none_leaves_an_array_where_it_is():
    x = jnp.ones(2)
    assert filter_shard((x, x), (SPLIT, None))[1] is x


def test_devices_may_stand_in_the_tree():
    first, second = devices = jax.devices()
    placed = filter_shard((jnp.ones(2), np.ones(2, np.float32)), tuple(devices))
    assert [array.sharding for array in placed] == [*map(SingleDeviceSharding, devices)]
    # Committed to the one, it is moved to the other.
    assert filter_shard(placed[0], second).devices() == {second}
    assert filter_shard(placed, first)[1].devices() == {first}


@anywhere
def test_an_array_committed_elsewhere_is_moved(under):
    x = jax.device_put(jnp.ones(2), jax.devices()[1])
    assert under(lambda: filter_shard(x, SPLIT))().sharding == SPLIT


@anywhere
def test_a_partition_spec_is_of_the_mesh_in_context(under):
    with jax.set_mesh(MESH):
        x = jnp.ones(2)
        assert under(lambda x: filter_shard(x, ROWS))(x).sharding == SPLIT


def test_constrains_in_the_jaxpr_as_jax_does():
    jaxprs = [
        str(jax.make_jaxpr(lambda x, place=place: place(x, SPLIT))(jnp.ones(2)))
        for place in (filter_shard, jax.lax.with_sharding_constraint)
    ]
    assert jaxprs[0] == jaxprs[1]


def test_error_names_the_path_of_the_array():
    tree = {"name": "n", "x": [jnp.ones(2), jnp.ones(3)]}
    with pytest.raises(ValueError, match="partitioned") as caught:
        filter_shard(tree, SPLIT)
    assert "This is the array at x['x'][1]." in caught.value.__notes__
    with pytest.raises(TypeError, match="cpu") as caught:
        filter_shard([jnp.ones(2)], "cpu")
    assert caught.value.__notes__ == ["This is the array at x[0]."]
    with pytest.raises(
        ValueError, match="`device_or_shardings` is not a prefix of the tree that it shards"
    ):
        filter_shard(tree, {"name": None})
