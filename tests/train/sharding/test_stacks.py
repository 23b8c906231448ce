"""Layers that are stored stacked are brought together one at a time."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import eqxlike as eqx
from eqxlike import nn, train
from eqxlike.train import Exchange, Memory

DEPTH, WIDTH = 16, 32
OPTIMISER = optax.adam(1e-2)
FSDP = train.fsdp(min_size=1)


def make_layer(key):
    return nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, key=key)


def make_stack(depth=DEPTH, **options):
    return nn.ScanStack(make_layer, depth, **options, key=jax.random.key(0))


def squares(model, batch, key):
    return jnp.mean((jax.vmap(model)(batch) - 1) ** 2)


def batch():
    return np.random.default_rng(0).normal(size=(4, WIDTH))


def compiled(model, sharding, loss=squares):
    state = train.TrainState.create(model, OPTIMISER, key=jax.random.key(1))
    step = train.make_step(loss, OPTIMISER, sharding=sharding)
    return step.lower(train.shard(state, sharding), batch().astype(np.float32)).compile()


def losses(model, sharding, loss=squares, count=4):
    state = train.TrainState.create(model, OPTIMISER, key=jax.random.key(1))
    if sharding is not None:
        state = train.shard(state, sharding)
    step = train.make_step(loss, OPTIMISER, sharding=sharding)
    found = []
    for _ in range(count):
        state, value = step(state, batch().astype(jax.dtypes.canonicalize_dtype(float)))
        found.append(float(value))
    return found


def by_computation(program):
    """The collectives of each computation that has some, and the names of the bodies of loops."""
    text = program.as_text()
    found = {}
    for part in re.split(r"\n\n(?=%|ENTRY )", text):
        name = re.match(r"(?:ENTRY )?%?([\w.-]+)", part)
        each = train.collectives(types.SimpleNamespace(as_text=lambda part=part: part))
        if name and each:
            found[name[1]] = each
    return found, set(re.findall(r"body=%?([\w.-]+)", text))


def of_kind(found, kind):
    """The collectives of a kind, by computation; those of single numbers are left out."""
    kept = {
        name: [each for each in parts if each.kind == kind and any(each.shapes)]
        for name, parts in found.items()
    }
    return {name: each for name, each in kept.items() if each}


@pytest.mark.parametrize("remat", [False, True])
def test_layer_is_gathered_in_both_loops_and_its_gradient_summed_in_one(remat):
    found, bodies = by_computation(compiled(make_stack(remat=remat), FSDP))
    gathers, sums = of_kind(found, "all-gather"), of_kind(found, "all-reduce")
    assert len(gathers) == 2
    assert len(sums) == 1
    assert {*gathers, *sums} <= bodies
    weight_bytes = 4 * 2 * WIDTH * WIDTH
    for each in gathers.values():
        sizes = [collective.num_bytes for collective in each]
        assert sizes.count(weight_bytes) == 2, each
        assert max(sizes) == weight_bytes
    assert not of_kind(found, "reduce-scatter")


def test_step_takes_less_memory_than_with_the_layers_together():
    model = make_stack()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model) if eqx.is_array(leaf))
    by_axis_of_layers = train.Sharding(FSDP.mesh, P("data"))
    by_layer, at_once = (
        compiled(model, sharding).memory_analysis().temp_size_in_bytes
        for sharding in (FSDP, by_axis_of_layers)
    )
    # Half of the model is on the other device.
    assert by_layer < at_once - size / 2, (by_layer, at_once, size)


def test_kept_activations_are_not_computed_again():
    counts = {
        compiled(make_stack(), sharding).as_text().count(" dot(")
        for sharding in (train.data_parallel(), FSDP)
    }
    assert len(counts) == 1


def one_by_one(model, batch, key):
    def apply(x):
        for layer in model.unstack():
            x = layer(x)
        return x

    return squares(apply, batch, key)


def of_ensemble(models, batch, key):
    apply = eqx.filter_vmap(
        lambda model, batch: jax.vmap(model)(batch), in_axes=(eqx.if_array(0), None)
    )
    return jnp.mean((apply(models, batch) - 1) ** 2)


def make_ensemble(size):
    return eqx.filter_vmap(lambda key: nn.ScanStack(make_layer, 4, key=key))(
        jax.random.split(jax.random.key(0), size)
    )


MODELS = {
    "plain": (lambda: make_stack(4), squares),
    "remat": (lambda: make_stack(4, remat=True), squares),
    "unroll": (lambda: make_stack(4, unroll=2), squares),
    "frozen": (
        lambda: nn.freeze(make_stack(4), lambda stack: stack.layers.layers[0].weight),
        squares,
    ),
    "nested": (
        lambda: nn.ScanStack(
            lambda key: nn.ScanStack(make_layer, 2, key=key), 3, key=jax.random.key(0)
        ),
        squares,
    ),
    "in a Sequential": (
        lambda: nn.Sequential([nn.LayerNorm(WIDTH), make_stack(4)]),
        squares,
    ),
    "one by one": (lambda: make_stack(4), one_by_one),
    "ensemble of as many": (lambda: make_ensemble(4), of_ensemble),
    "ensemble of fewer": (lambda: make_ensemble(3), of_ensemble),
}


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-12)])
@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_one_device(name, dtype, tolerance):
    make, loss = MODELS[name]
    with jax.enable_x64(dtype == "float64"):
        np.testing.assert_allclose(
            losses(make(), FSDP, loss), losses(make(), None, loss), rtol=0, atol=tolerance
        )


def test_stack_goes_whole_into_a_shard_map():
    def in_parts(model, batch, key):
        arrays, static = eqx.partition(model, eqx.is_array)

        def of_part(arrays, batch):
            return jax.lax.pmean(squares(eqx.combine(arrays, static), batch, key), "data")

        over = jax.shard_map(of_part, mesh=FSDP.mesh, in_specs=(P(), P("data")), out_specs=P())
        return over(arrays, batch)

    np.testing.assert_allclose(
        losses(make_stack(4), FSDP, in_parts), losses(make_stack(4), None), atol=1e-5
    )


def test_split_over_two_axes_keeps_the_one_that_is_not_the_batch():
    mesh = jax.make_mesh((1, 2), ("data", "model"))
    rules = {"layers.layers[0].weight": P(None, "model", "data"), "**": P(None, "data")}
    sharding = train.Sharding(mesh, rules)
    np.testing.assert_allclose(
        losses(make_stack(4), sharding), losses(make_stack(4), None), atol=1e-5
    )


class Reporting(eqx.Module):
    linear: nn.Linear
    report: object = eqx.field(static=True)

    def __call__(self, x, *, key=None):
        jax.debug.callback(self.report, jnp.sum(self.linear.bias))
        return self.linear(x)


def test_what_a_layer_reports_is_reported_once():
    reported = []
    model = nn.ScanStack(
        lambda key: Reporting(nn.Linear(WIDTH, WIDTH, key=key), reported.append),
        4,
        key=jax.random.key(0),
    )
    counts = []
    for sharding in (train.data_parallel(), FSDP):
        reported.clear()
        losses(model, sharding, count=1)
        jax.effects_barrier()
        counts.append(len(reported))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    ("depth", "shape", "expected"),
    [
        (64, (8, 4), P(None, "data")),
        (64, (3, 8), P(None, None, "data")),
        # What cannot be split within a layer is split by layer, and is together at once.
        (64, (3, 3), P("data")),
        (3, (3, 3), P()),
    ],
)
def test_fsdp_splits_within_layers_where_it_can(depth, shape, expected):
    class Layer(eqx.Module):
        weight: jax.Array

    def make(key):
        return nn.ScanStack(lambda key: Layer(jnp.ones(shape)), depth, key=key)

    model = eqx.filter_eval_shape(make, jax.random.key(0))
    sharding = train.fsdp(AbstractMesh((4,), ("data",)), min_size=1)
    assert sharding.of_model(model).layers.weight.spec == expected


@pytest.mark.parametrize(("unroll", "num_layers"), [(1, 1), (3, 3), (99, DEPTH)])
def test_plan_has_the_layers_of_a_turn_together_and_gathers_twice(unroll, num_layers):
    model = eqx.filter_eval_shape(
        lambda key: nn.ScanStack(
            lambda key: nn.Linear(8, 8, use_bias=False, key=key), DEPTH, unroll=unroll, key=key
        ),
        jax.random.key(0),
    )
    plan = train.plan(model, OPTIMISER, train.fsdp(AbstractMesh((4,), ("data",)), min_size=1))
    layer = 4 * 8 * 8
    assert plan.gathered == Memory(num_layers * layer, num_layers * layer)
    assert plan.exchanges == (
        Exchange("all-gather", "parameters", 1, 2 * DEPTH * layer),
        Exchange("reduce-scatter", "gradients", 1, DEPTH * layer),
    )
