"""The split of each array by rules, and the shardings that are ready made."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from eqxlike import Module, filter_eval_shape, nn, train
from eqxlike.train import Sharding

MESH = AbstractMesh((4, 2), ("data", "model"))


@pytest.fixture(scope="module")
def model():
    return filter_eval_shape(nn.MLP, 8, 6, 16, 1, key=jax.random.key(0))


def specs(sharding, model):
    return [each.spec for each in jax.tree.leaves(sharding.of_model(model))]


def test_first_rule_that_matches_counts_and_what_none_matches_is_whole(model):
    narrow, split = AbstractMesh((4, 1), ("data", "model")), P("model")
    for mesh, rules, expected in [
        (
            MESH,
            {"layers[0].weight": split, "layers[*].weight": P(None, "data")},
            [split, P(), P(None, "data"), P()],
        ),
        (MESH, [("**.bias", split), ("**", P())], [P(), split, P(), split]),
        (
            MESH,
            [(lambda path, leaf: leaf.ndim == 2 and "[1]" in path, split)],
            [P(), P(), split, P()],
        ),
        (
            MESH,
            {"**.weight": lambda path, leaf: P(*[None] * (leaf.ndim - 1), "data")},
            [P(None, "data"), P(), P(None, "data"), P()],
        ),
        (MESH, split, [split] * 4),
        # The rest may be empty for the rule for all others.
        (MESH, {"**.weight": P(), "**.bias": split, "**": P("data")}, [P(), split, P(), split]),
        # Splits that mean the same are equal.
        (
            narrow,
            {"layers[0].weight": P(("data",), None), "**.weight": P("model", ("data",))},
            [P("data"), P(), P(None, "data"), P()],
        ),
    ]:
        assert specs(Sharding(mesh, rules), model) == expected


def test_what_is_no_array_has_no_sharding_and_frozen_arrays_keep_their_path(getkey):
    class Mixed(Module):
        weight: jax.Array
        nothing: None
        name: str
        scalar: jax.Array

    found = Sharding(MESH, {"weight": P("data")}).of_model(
        Mixed(jnp.ones(4), None, "a leaf", jnp.ones(()))
    )
    assert (found.weight.spec, found.nothing, found.name) == (P("data"), None, None)
    assert found.scalar.spec == P()
    model = nn.freeze(nn.Linear(4, 8, key=getkey()), lambda model: model.weight)
    assert specs(Sharding(MESH, {"weight": P("data")}), model) == [P("data"), P()]


FIRST = r"layers\[0\].weight"
ARRAYS = rf"{FIRST}, layers\[0\].bias, layers\[1\].weight"
REFUSED = [
    ({"layer[0].weight": P("data")}, rf"matches first. The arrays are {ARRAYS}"),
    ({"**": P(), "**.bias": P("data")}, "the rule for '..[.]bias' applies to no array"),
    ({"layers[0].weight": P("rows")}, f"{FIRST}.* axis 'rows', but the mesh has data=4, model"),
    (
        {"layers[0].bias": P(None, "data")},
        r"of shape \(16,\), has 1 axes, but its rule, .*, is for 2",
    ),
    ({"layers[1].bias": P("data")}, "axis 0 has length 6, and .* splits it into 4 parts. Split an"),
    ({"**.weight": P("data", "data")}, rf"{FIRST}, of shape \(16, 8\), names .* 'data' twice"),
    ({"**.weight": lambda *_: "data"}, f"{FIRST}, .* must return a jax.sharding.Pa.*, got 'data'"),
    ({"**.weight": lambda *_: P(P.UNCONSTRAINED)}, f"{FIRST}, .* the name of a mesh axis, a tup"),
]


def test_rule_that_does_not_fit_is_refused_with_the_path(model):
    for rules, message in REFUSED:
        error = TypeError if callable(rules.get("**.weight")) else ValueError
        with pytest.raises(error, match=message):
            Sharding(MESH, rules).of_model(model)


def test_sharding_of_another_form_is_refused():
    for (mesh, rules), options, error, message in [
        ((MESH, {"**": "data"}), {}, TypeError, r"rule for '\*\*' must be a jax.sharding.Part"),
        ((MESH, {3: P()}), {}, TypeError, "a pattern must be a string or a function .* got 3"),
        ((MESH, ["**"]), {}, TypeError, r"a pair of a pattern and a PartitionSpec, got '\*\*'"),
        ((MESH, [("**", P(), 1)]), {}, TypeError, "a pair of a pattern and a PartitionSpec, got"),
        (
            (jax.devices, {}),
            {},
            TypeError,
            "expected a jax.sharding.Mesh, such as jax.make_mesh ret",
        ),
        ((MESH, {}), {"batch_axes": "rows"}, ValueError, "'rows', but the mesh has data=4, model="),
    ]:
        with pytest.raises(error, match=message):
            Sharding(mesh, rules, **options)


def test_axes_are_left_to_the_compiler_whatever_the_mesh_said():
    mesh = jax.make_mesh((2,), ("data",))
    assert mesh.axis_types == (jax.sharding.AxisType.Explicit,)
    assert Sharding(mesh, {}).mesh.axis_types == (jax.sharding.AxisType.Auto,)
    assert list(Sharding(mesh, {}).mesh.devices) == list(mesh.devices)


def test_examples_are_split_over_the_first_axis_or_those_that_are_named():
    assert Sharding(MESH, {}).batch.spec == P("data")
    assert Sharding(MESH, {}, batch_axes="model").batch.spec == P("model")
    assert Sharding(MESH, {}, batch_axes=("data", "model")).batch.spec == P(("data", "model"))
    assert Sharding(MESH, {}, batch_axes=()).batch.spec == P()


# --- ready made ---


def test_fsdp_splits_the_longest_axis_that_divides():
    sharding = train.fsdp(AbstractMesh((4,), ("data",)), min_size=24)
    shapes = [(6, 8), (8, 8), (16, 8), (6, 6), (5, 8, 12), (12,), (), (24,)]
    model = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    data = "data"
    expected = [P(None, data), P(data), P(data), P(), P(None, None, data), P(), P(), P(data)]
    assert specs(sharding, model) == expected
    with pytest.raises(ValueError, match="min_size must be an integer of at least 0, got -1"):
        train.fsdp(min_size=-1)


@pytest.mark.parametrize("make", [train.fsdp, train.data_parallel])
def test_ready_made_shardings_split_batches_over_a_whole_mesh(make):
    assert make(MESH).batch.spec == P(("data", "model"))
    assert make().mesh.size == jax.device_count()
    assert make().mesh.axis_names == ("data",)
    assert make(jax.devices()[:1]).mesh.size == 1
    with pytest.raises(ValueError, match=f"{make.__name__} needs at least one device, got none"):
        make([])
    one = f"{make.__name__} expected a sequence of devices, got one, .*: put it in a list"
    with pytest.raises(TypeError, match=one):
        make(jax.devices()[0])
