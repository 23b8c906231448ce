"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

import inspect
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import eqxlike
from eqxlike import filter_shard
from tests.beside_equinox import both


@pytest.fixture(scope="module")
def mesh():
    return Mesh(jax.devices(), ("batch",))


@pytest.fixture(scope="module")
def split(mesh):
    return NamedSharding(mesh, PartitionSpec("batch"))


@pytest.fixture(scope="module")
def copied(mesh):
    return NamedSharding(mesh, PartitionSpec())


def identity(function):
    return function


anywhere = pytest.mark.parametrize("under", [identity, jax.jit], ids=["eager", "jit"])


def test_has_the_parameters_of_equinox():
    one, other = (inspect.signature(eqx.filter_shard).parameters for eqx in (eqxlike, equinox))
    assert list(one) == list(other)


# --- one placement for all ----------------------------------------------------------------------


@both
def test_a_device_is_where_arrays_go(eqx):
    device = jax.devices()[1]
    moved = eqx.filter_shard((jnp.ones(2), np.ones(2, np.float32)), device)
    assert [array.devices() for array in moved] == [{device}] * 2


@anywhere
def test_an_array_committed_elsewhere_is_moved(under, split):
    x = jax.device_put(jnp.ones(2), jax.devices()[1])
    assert under(lambda: filter_shard(x, split))().sharding == split


def test_an_array_committed_to_a_device_is_moved_to_another():
    first, second = jax.devices()
    assert filter_shard(jax.device_put(jnp.ones(2), first), second).devices() == {second}


def test_under_a_mesh_of_explicit_axes_an_array_is_moved():
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(jax.sharding.AxisType.Explicit,))
    explicit = NamedSharding(mesh, PartitionSpec("batch"))
    with jax.set_mesh(mesh):
        assert filter_shard(jnp.ones(2), explicit).sharding == explicit


@both
@anywhere
def test_a_sharding_is_for_all_arrays(eqx, under, split):
    sharded = under(lambda x: eqx.filter_shard((x + 1, [x]), split))(jnp.ones((2, 3)))
    assert [array.sharding for array in (sharded[0], sharded[1][0])] == [split] * 2


@both
def test_what_is_no_array_is_left_as_it_is(eqx, split):
    tree = ("s", 1.0, None, jnp.sin, jax.ShapeDtypeStruct((3,), jnp.float32))
    assert eqx.filter_shard(tree, split) == tree


@both
def test_statics_pass_under_filter_jit(eqx, split):
    array, text = eqx.filter_jit(lambda x, s: eqx.filter_shard((x, s), split))(jnp.ones(2), "s")
    assert (array.sharding, text) == (split, "s")


@both
@anywhere
def test_a_numpy_array_becomes_a_jax_array(eqx, under, split):
    made = under(lambda: eqx.filter_shard(np.ones(2, np.float32), split))()
    assert (isinstance(made, jax.Array), made.sharding) == (True, split)


@both
def test_a_typed_key_is_placed(eqx, copied):
    assert eqx.filter_shard(jax.random.key(0), copied).sharding == copied


@both
def test_a_module_is_placed_whole(eqx, split):
    class Model(eqx.Module):
        weight: Any
        activation: Any
        name: str = eqx.field(static=True)

    model = eqx.filter_shard(Model(jnp.ones(2), jnp.tanh, "n"), split)
    assert (model.weight.sharding, model.activation, model.name) == (split, jnp.tanh, "n")


@both
@anywhere
def test_a_partition_spec_is_of_the_mesh_in_context(eqx, under, mesh, split):
    with jax.set_mesh(mesh):
        x = jnp.ones(2)
        assert under(lambda x: eqx.filter_shard(x, PartitionSpec("batch")))(x).sharding == split


# --- a tree of placements -----------------------------------------------------------------------


@both
@anywhere
def test_placements_may_be_a_prefix(eqx, under, split, copied):
    sharded = under(lambda x: eqx.filter_shard((x, {"a": x, "b": [x]}), (split, copied)))(
        jnp.ones(2)
    )
    assert [array.sharding for array in jax.tree_util.tree_leaves(sharded)] == [
        split,
        copied,
        copied,
    ]


@both
def test_none_stands_for_what_is_no_array(eqx, split):
    x, text = eqx.filter_shard((jnp.ones(2), "s"), (split, None))
    assert (x.sharding, text) == (split, "s")


def test_none_leaves_an_array_where_it_is(split):
    x = jnp.ones(2)
    assert filter_shard((x, x), (split, None))[1] is x


def test_devices_may_stand_in_the_tree():
    devices = jax.devices()
    placed = filter_shard((jnp.ones(2), jnp.ones(2)), tuple(devices))
    assert [array.devices() for array in placed] == [{device} for device in devices]


# --- composition --------------------------------------------------------------------------------


@both
def test_a_gradient_flows_through(eqx, split):
    gradient = jax.grad(lambda x: (eqx.filter_shard(x, split) ** 2).sum())(jnp.ones(2))
    assert gradient.tolist() == [2, 2]


@both
def test_under_vmap_the_axes_are_those_that_are_not_mapped(eqx, split):
    sharded = jax.vmap(lambda x: eqx.filter_shard(x, split))(jnp.ones((3, 2)))
    assert sharded.sharding.spec == PartitionSpec(None, "batch")


@both
def test_constrains_in_the_jaxpr_as_jax_does(eqx, split):
    jaxprs = [
        str(jax.make_jaxpr(lambda x, place=place: place(x, split))(jnp.ones(2)))
        for place in (eqx.filter_shard, jax.lax.with_sharding_constraint)
    ]
    assert jaxprs[0] == jaxprs[1]


# --- errors -------------------------------------------------------------------------------------


@both
def test_placements_that_are_no_prefix_are_an_error(eqx, split):
    with pytest.raises(ValueError, match="prefix"):
        eqx.filter_shard((jnp.ones(2), jnp.ones(2)), (split,))


@both
@pytest.mark.parametrize("x", [np.ones(3, np.float32), np.ones((), np.float32)], ids=np.shape)
def test_a_sharding_that_does_not_fit_is_the_error_of_jax(eqx, x, split):
    with pytest.raises(ValueError, match=r"PartitionSpec|partitioned 2 times"):
        eqx.filter_shard(x, split)


@both
def test_what_is_no_placement_is_the_error_of_jax(eqx):
    with pytest.raises(TypeError, match="cpu"):
        eqx.filter_shard(jnp.ones(2), "cpu")


def test_error_names_the_path_of_the_array(split):
    tree = {"name": "n", "x": [jnp.ones(2), jnp.ones(3)]}
    with pytest.raises(ValueError, match="partitioned") as caught:
        filter_shard(tree, split)
    assert "This is the array at x['x'][1]." in caught.value.__notes__


@both
def test_single_device_sharding_is_the_same_as_the_device(eqx):
    device = jax.devices()[1]
    assert eqx.filter_shard(jnp.ones(2), device).sharding == SingleDeviceSharding(device)
