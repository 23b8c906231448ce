"""Rules that choose the sharding of each array, and predefined shardings."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from eqxlike import filter_eval_shape, nn, train
from eqxlike.train import Sharding

MESH = AbstractMesh((4, 2), ("data", "model"))


@pytest.fixture(scope="module")
def model():
    return filter_eval_shape(nn.MLP, 8, 6, 16, 1, key=jax.random.key(0))


def specs(sharding, model):
    return [each.spec for each in jax.tree.leaves(sharding.of_model(model))]


def test_first_matching_rule_applies_and_other_arrays_are_replicated(model):
    narrow, split, columns = AbstractMesh((4, 1), ("data", "model")), P("model"), P(None, "data")
    of_second = lambda path, leaf: leaf.ndim == 2 and "[1]" in path
    last_axis = lambda path, leaf: P(*[None] * (leaf.ndim - 1), "data")
    same = {"layers[0].weight": P(("data",), None), "**.weight": P("model", ("data",))}
    first, every = "layers[0].weight", "layers[*].weight"
    for mesh, rules, expected in [
        (MESH, {first: split, every: columns}, [split, P(), columns, P()]),
        (MESH, [("**.bias", split), ("**", P())], [P(), split, P(), split]),
        (MESH, [(of_second, split)], [P(), P(), split, P()]),
        (MESH, {"**.weight": last_axis}, [columns, P(), columns, P()]),
        (MESH, split, [split] * 4),
        # The last rule may match no array.
        (MESH, {"**.weight": P(), "**.bias": split, "**": P("data")}, [P(), split, P(), split]),
        # Equivalent partition specs are equal.
        (narrow, same, [P("data"), P(), columns, P()]),
    ]:
        assert specs(Sharding(mesh, rules), model) == expected


def test_only_arrays_have_a_sharding_and_frozen_arrays_keep_their_path(getkey):
    leaves = {"weight": jnp.ones(4), "nothing": None, "name": "a leaf", "scalar": jnp.ones(())}
    found = Sharding(MESH, {"['weight']": P("data")}).of_model(leaves)
    assert (found["weight"].spec, found["nothing"], found["name"]) == (P("data"), None, None)
    assert found["scalar"].spec == P()
    model = nn.freeze(nn.Linear(4, 8, key=getkey()), lambda model: model.weight)
    assert specs(Sharding(MESH, {"weight": P("data")}), model) == [P("data"), P()]


def test_invalid_rules_are_refused_with_the_path(model):
    first = r"layers\[0\].weight"
    arrays = rf"{first}, layers\[0\].bias, layers\[1\].weight"
    length = "axis 0 has length 6, and .* splits it into 4 parts. Split an"
    for path, rule, message in [
        ("layer[0].weight", P("data"), rf"matches first. The arrays are {arrays}"),
        ("layers[0].weight", P("rows"), rf"{first}.* not fit the mesh: .*rows of P\('rows',\)"),
        ("layers[0].bias", P(None, "data"), r"of shape \(16,\), has 1 axes, but its rule, .*for 2"),
        ("layers[1].bias", P("data"), length),
        ("**.weight", P("data", "data"), rf"{first}, of shape \(16, 8\), .* duplicate .*`data`"),
        ("**.weight", lambda *_: "data", f"{first}, .* return a jax.sharding.Pa.*, got 'data'"),
        ("**.weight", lambda *_: P(P.UNCONSTRAINED), f"{first}, .* the name of a mesh axis, a tup"),
    ]:
        with pytest.raises(TypeError if callable(rule) else ValueError, match=message):
            Sharding(MESH, {path: rule}).of_model(model)
    with pytest.raises(ValueError, match=r"the rule for '..[.]bias' applies to no array"):
        Sharding(MESH, {"**": P(), "**.bias": P("data")}).of_model(model)


def test_bad_arguments_of_sharding_are_refused():
    pair = r"a pair of a pattern and a PartitionSpec\. .*got"
    for mesh, rules, error, message in [
        (MESH, {"**": "data"}, TypeError, rf"{pair} \('\*\*', 'data'\)"),
        (MESH, {3: P()}, TypeError, rf"{pair} \(3, "),
        (MESH, ["**"], TypeError, rf"{pair} '\*\*'"),
        (MESH, [("**", P(), 1)], TypeError, pair),
        (jax.devices, {}, TypeError, "expected a jax.sharding.Mesh, such as jax.make_mesh ret"),
    ]:
        with pytest.raises(error, match=message):
            Sharding(mesh, rules)
    with pytest.raises(ValueError, match="'rows', but the mesh has data=4, model="):
        Sharding(MESH, {}, batch_axes="rows")


def test_batches_are_split_over_the_first_axis_or_batch_axes():
    for options, expected in [
        ({}, P("data")),
        ({"batch_axes": "model"}, P("model")),
        ({"batch_axes": ("data", "model")}, P(("data", "model"))),
        ({"batch_axes": ()}, P()),
    ]:
        assert Sharding(MESH, {}, **options).batch.spec == expected
    # The compiler chooses the sharding, even if the mesh has explicit axes.
    mesh = jax.make_mesh((2,), ("data",))
    assert mesh.axis_types == (jax.sharding.AxisType.Explicit,)
    assert Sharding(mesh, {}).mesh.axis_types == (jax.sharding.AxisType.Auto,)
    assert list(Sharding(mesh, {}).mesh.devices) == list(mesh.devices)


# --- predefined shardings ---


def test_fsdp_splits_the_longest_divisible_axis():
    sharding = train.fsdp(AbstractMesh((4,), ("data",)), min_size=24)
    whole, rows, columns = P(), P("data"), P(None, "data")
    expected = {(6, 8): columns, (8, 8): rows, (16, 8): rows, (6, 6): whole}
    expected |= {(5, 8, 12): P(None, None, "data"), (12,): whole, (): whole, (24,): rows}
    model = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in expected]
    assert specs(sharding, model) == [*expected.values()]
    with pytest.raises(ValueError, match="min_size must be an integer of at least 0, got -1"):
        train.fsdp(min_size=-1)


@pytest.mark.parametrize("make", [train.fsdp, train.data_parallel])
def test_predefined_shardings_split_batches_over_the_whole_mesh(make):
    assert make(MESH).batch.spec == P(("data", "model"))
    assert make().mesh.size == jax.device_count()
    assert make().mesh.axis_names == ("data",)
    assert make(jax.devices()[:1]).mesh.size == 1
    with pytest.raises(ValueError, match=f"{make.__name__} needs at least one device, got none"):
        make([])
    one = f"{make.__name__} expected a sequence of devices, got one, .*: put it in a list"
    with pytest.raises(TypeError, match=one):
        make(jax.devices()[0])
