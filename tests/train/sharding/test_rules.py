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
    rules = {"layers[0].weight": P("model"), "layers[*].weight": P(None, "data")}
    assert specs(Sharding(MESH, rules), model) == [P("model"), P(), P(None, "data"), P()]


def test_pairs_are_rules_too(model):
    rules = [("**.bias", P("model")), ("**", P())]
    assert specs(Sharding(MESH, rules), model) == [P(), P("model"), P(), P("model")]


def test_pattern_may_be_a_function_of_path_and_leaf(model):
    rules = [(lambda path, leaf: leaf.ndim == 2 and "[1]" in path, P("model"))]
    assert specs(Sharding(MESH, rules), model) == [P(), P(), P("model"), P()]


def test_split_may_be_a_function_of_path_and_leaf(model):
    sharding = Sharding(
        MESH, {"**.weight": lambda path, leaf: P(*[None] * (leaf.ndim - 1), "data")}
    )
    assert specs(sharding, model) == [P(None, "data"), P(), P(None, "data"), P()]


def test_one_split_is_for_all_arrays(model):
    assert specs(Sharding(MESH, P("model")), model) == [P("model")] * 4


def test_splits_that_mean_the_same_are_equal(model):
    mesh = AbstractMesh((4, 1), ("data", "model"))
    rules = {"layers[0].weight": P(("data",), None), "**.weight": P("model", ("data",))}
    assert specs(Sharding(mesh, rules), model) == [P("data"), P(), P(None, "data"), P()]


def test_what_is_no_array_has_no_sharding():
    class Mixed(Module):
        weight: jax.Array
        nothing: None
        name: str
        scalar: jax.Array

    model = Mixed(jnp.ones(4), None, "a leaf", jnp.ones(()))
    found = Sharding(MESH, {"weight": P("data")}).of_model(model)
    assert (found.weight.spec, found.nothing, found.name) == (P("data"), None, None)
    assert found.scalar.spec == P()


def test_frozen_arrays_are_split_by_the_path_that_they_had(getkey):
    model = nn.freeze(nn.Linear(4, 8, key=getkey()), lambda model: model.weight)
    found = Sharding(MESH, {"weight": P("data")}).of_model(model)
    assert [each.spec for each in jax.tree.leaves(found)] == [P("data"), P()]


def test_rest_may_be_empty_for_the_rule_for_all_others(model):
    rules = {"**.weight": P(), "**.bias": P("model"), "**": P("data")}
    assert specs(Sharding(MESH, rules), model) == [P(), P("model"), P(), P("model")]


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        (
            {"layer[0].weight": P("data")},
            ValueError,
            r"the rule for 'layer\[0\].weight' matches no array of the model that an earlier rule "
            r"left. The arrays are layers\[0\].weight, layers\[0\].bias, layers\[1\].weight",
        ),
        (
            {"**": P(), "**.bias": P("data")},
            ValueError,
            "the rule for '..[.]bias' matches no array",
        ),
        (
            {"layers[0].weight": P("rows")},
            ValueError,
            r"layers\[0\].weight, of shape \(16, 8\), is to be split over the mesh axis 'rows', "
            "and the mesh has data=4, model=2",
        ),
        (
            {"layers[0].bias": P(None, "data")},
            ValueError,
            r"layers\[0\].bias, of shape \(16,\), has 1 axes, and its rule says .*, for 2",
        ),
        (
            {"layers[1].bias": P("data")},
            ValueError,
            r"layers\[1\].bias, of shape \(6,\), does not divide: axis 0 has length 6, and .* "
            r"splits it into 4 parts. Split another axis, or leave it whole with PartitionSpec\(\)",
        ),
        (
            {"layers[0].weight": P("data", "data")},
            ValueError,
            r"layers\[0\].weight, of shape \(16, 8\), is to be split over .* 'data' twice",
        ),
        (
            {"**.weight": lambda path, leaf: "data"},
            TypeError,
            r"the rule for layers\[0\].weight, .* must return a jax.sharding.Partit.*, got 'data'",
        ),
        (
            {"**.weight": lambda path, leaf: P(P.UNCONSTRAINED)},
            TypeError,
            r"the rule for layers\[0\].weight, .* the name of a mesh axis, a tuple of such names",
        ),
    ],
)
def test_rule_that_does_not_fit_is_refused_with_the_path(rules, error, message, model):
    with pytest.raises(error, match=message):
        Sharding(MESH, rules).of_model(model)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (
            (MESH, {"**": "data"}),
            {},
            TypeError,
            r"the rule for '\*\*' must give a jax.sharding.Part",
        ),
        ((MESH, {3: P()}), {}, TypeError, "a pattern must be a string or a function .* got 3"),
        ((MESH, ["**"]), {}, TypeError, r"a pair of a pattern and a PartitionSpec, got '\*\*'"),
        (
            (jax.devices, {}),
            {},
            TypeError,
            "expected a jax.sharding.Mesh, as jax.make_mesh returns",
        ),
        (
            (MESH, {}),
            {"batch_axes": "rows"},
            ValueError,
            "batch_axes has 'rows', and the mesh has data=4, model=2",
        ),
    ],
)
def test_sharding_of_another_form_is_refused(arguments, options, error, message):
    with pytest.raises(error, match=message):
        Sharding(*arguments, **options)


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


def test_fsdp_splits_the_longest_axis_that_divides():
    sharding = train.fsdp(AbstractMesh((4,), ("data",)), min_size=24)
    shapes = [(6, 8), (8, 8), (16, 8), (6, 6), (5, 8, 12), (12,), (), (24,)]
    model = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    data = "data"
    expected = [P(None, data), P(data), P(data), P(), P(None, None, data), P(), P(), P(data)]
    assert specs(sharding, model) == expected


@pytest.mark.parametrize("make", [train.fsdp, train.data_parallel])
def test_ready_made_shardings_split_batches_over_a_whole_mesh(make):
    assert make(MESH).batch.spec == P(("data", "model"))
    assert make().mesh.size == jax.device_count()
    assert make(jax.devices()[:1]).mesh.size == 1
    with pytest.raises(ValueError, match=f"{make.__name__} needs at least one device, got none"):
        make([])


def test_min_size_is_a_whole_number():
    with pytest.raises(ValueError, match="min_size must be an integer of at least 0, got -1"):
        train.fsdp(min_size=-1)


@pytest.mark.parametrize("ready_made", [train.data_parallel, train.fsdp])
def test_one_device_in_the_place_of_several_is_refused(ready_made):
    with pytest.raises(TypeError, match=r"expected a sequence of devices, got one, .*: put it in"):
        ready_made(jax.devices()[0])
