"""Stacked layers are all-gathered one at a time."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import eqxlike as eqx
from eqxlike import nn, train
from eqxlike._programs import collectives
from tests.nn.arrays import filled

DEPTH, WIDTH = 16, 32
OPTIMISER = optax.sgd(1e-2)
FSDP = train.fsdp(min_size=1)


def make_layer(key):
    return nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, key=key)


def make_linear(key):
    return nn.Linear(WIDTH, WIDTH, key=key)


def linears(depth=4, **options):
    return nn.ScanStack(make_linear, depth, **options, key=jax.random.key(0))


def squares(model, batch, key):
    return jnp.mean((jax.vmap(model)(batch) - 1) ** 2)


def batch():
    numbers = np.random.default_rng(0).normal(size=(4, WIDTH))
    return numbers.astype(jax.dtypes.canonicalize_dtype(float))


def compiled(model, sharding, loss=squares):
    state = train.TrainState.create(model, OPTIMISER, key=jax.random.key(1))
    step = train.make_step(loss, OPTIMISER, sharding=sharding)
    return step.lower(train.shard(state, sharding), batch()).compile()


def losses(model, sharding, loss=squares, count=4):
    state = train.TrainState.create(model, OPTIMISER, key=jax.random.key(1))
    if sharding is not None:
        state = train.shard(state, sharding)
    step, found = train.make_step(loss, OPTIMISER, sharding=sharding), []
    for _ in range(count):
        state, value = step(state, batch())
        found.append(float(value))
    return found


def by_computation(text):
    """The collectives of each HLO computation, and the names of the loop bodies."""
    found = {}
    for part in re.split(r"\n\n(?=%|ENTRY )", text):
        name = re.match(r"(?:ENTRY )?%?([\w.-]+)", part)
        each = collectives(types.SimpleNamespace(as_text=lambda part=part: part))
        if name and each:
            found[name[1]] = each
    return found, set(re.findall(r"body=%?([\w.-]+)", text))


def of_kind(found, kind):
    """The collectives of a kind by computation, without collectives of scalars."""
    kept = {
        name: [each for each in parts if each.kind == kind and any(each.shapes)]
        for name, parts in found.items()
    }
    return {name: each for name, each in kept.items() if each}


def test_layer_is_gathered_in_both_loops_and_its_gradient_summed_in_one():
    model = filled(nn.ScanStack, make_layer, DEPTH, key=jax.random.key(0))
    text = compiled(model, FSDP).as_text()
    found, bodies = by_computation(text)
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
    # Saved activations are not recomputed.
    assert text.count(" dot(") == compiled(model, train.data_parallel()).as_text().count(" dot(")


def in_a_row():
    frozen = nn.freeze(linears(unroll=2), lambda stack: stack.layers.weight)
    inner = lambda key: nn.ScanStack(make_linear, 2, key=key)
    nested = nn.ScanStack(inner, 3, key=jax.random.key(0))
    return nn.Sequential([nn.LayerNorm(WIDTH), frozen, nested, linears(remat=True)])


def make_ensemble(size):
    keys = jax.random.split(jax.random.key(0), size)
    return eqx.filter_vmap(lambda key: nn.ScanStack(make_linear, 2, key=key))(keys)


def side_by_side():
    """A stack that is unstacked, an ensemble whose size equals its depth, and a smaller one."""
    return linears(2), make_ensemble(4), make_ensemble(3)


def of_each(models, batch, key):
    stack, *ensembles = models

    def one_by_one(x):
        for layer in stack.unstack():
            x = layer(x)
        return x

    apply = eqx.filter_vmap(
        lambda model, batch: jax.vmap(model)(batch), in_axes=(eqx.if_array(0), None)
    )
    parts = [jnp.mean((apply(each, batch) - 1) ** 2) for each in ensembles]
    return squares(one_by_one, batch, key) + sum(parts)


def test_losses_equal_losses_on_one_device():
    def loss(models, batch, key):
        row, side = models
        return squares(row, batch, key) + of_each(side, batch, key)

    with jax.enable_x64(True):
        model = filled(lambda: (in_a_row(), side_by_side()))
        expected = losses(model, None, loss)
        np.testing.assert_allclose(losses(model, FSDP, loss), expected, rtol=0, atol=1e-12)


def test_stack_may_be_passed_to_a_shard_map_and_split_over_two_axes():
    def in_parts(model, batch, key):
        arrays, static = eqx.partition(model, eqx.is_array)

        def of_part(arrays, batch):
            return jax.lax.pmean(squares(eqx.combine(arrays, static), batch, key), "data")

        over = jax.shard_map(of_part, mesh=FSDP.mesh, in_specs=(P(), P("data")), out_specs=P())
        return over(arrays, batch)

    model = filled(linears)
    expected = losses(model, None)
    np.testing.assert_allclose(losses(model, FSDP, in_parts), expected, atol=1e-5)
    mesh = jax.make_mesh((1, 2), ("data", "model"))
    rules = {"layers.weight": P(None, "model", "data"), "**": P(None, "data")}
    sharding = train.Sharding(mesh, rules)
    np.testing.assert_allclose(losses(model, sharding), expected, atol=1e-5)


class Reporting(eqx.Module):
    linear: nn.Linear
    report: object = eqx.field(static=True)

    def __call__(self, x, *, key=None):
        jax.debug.callback(self.report, jnp.sum(self.linear.bias))
        return self.linear(x)


def test_a_callback_in_a_layer_runs_once():
    reported, counts = [], []

    def make(key):
        return Reporting(nn.Linear(WIDTH, WIDTH, key=key), reported.append)

    model = filled(nn.ScanStack, make, 4, key=jax.random.key(0))
    for sharding in (train.data_parallel(), FSDP):
        reported.clear()
        losses(model, sharding, count=1)
        jax.effects_barrier()
        counts.append(len(reported))
    assert counts[0] == counts[1] > 0


def test_fsdp_splits_within_layers_if_possible():
    class Layer(eqx.Module):
        weight: jax.Array

    sharding = train.fsdp(AbstractMesh((4,), ("data",)), min_size=1)
    for depth, shape, expected in [
        (64, (8, 4), P(None, "data")),
        (64, (3, 8), P(None, None, "data")),
        # Arrays that cannot be split within a layer are split by layer and gathered at once.
        (64, (3, 3), P("data")),
        (3, (3, 3), P()),
    ]:
        make = lambda key, depth=depth, shape=shape: nn.ScanStack(
            lambda key: Layer(jnp.ones(shape)), depth, key=key
        )
        model = eqx.filter_eval_shape(make, jax.random.key(0))
        assert sharding.of_model(model).layers.weight.spec == expected
