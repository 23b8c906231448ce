"""A step over two devices does what it does on one."""

import collections
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqxlike as eqx
from eqxlike import nn, train
from tests.train.sharding import trainings

SHARDINGS = {
    "data parallel": train.data_parallel(),
    "FSDP": train.fsdp(min_size=16),
    "FSDP of some": train.fsdp(min_size=64),
    "one device": train.fsdp(jax.devices()[1:], min_size=1),
    "model parallel": train.Sharding(
        jax.make_mesh((1, 2), ("data", "model")),
        {"first.*": P("model"), "norm.*": P("model"), "last.weight": P(None, "model")},
    ),
    "batch on no axis": train.Sharding(
        jax.make_mesh((2,), ("model",)), {"first.weight": P("model")}, batch_axes=()
    ),
}


@pytest.fixture(scope="module")
def alone():
    return trainings.run(None, 5)


@pytest.mark.parametrize("sharding", SHARDINGS.values(), ids=SHARDINGS)
def test_losses_are_those_of_one_device_in_one_program(sharding, alone):
    trained = trainings.run(sharding, 5)
    np.testing.assert_allclose(trained.losses, alone.losses, rtol=1e-5)
    for one, other in zip(
        jax.tree.leaves((trained.state.model, trained.state.model_state)),
        jax.tree.leaves((alone.state.model, alone.state.model_state)),
        strict=True,
    ):
        if eqx.is_array(one):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
    assert (trained.num_traces, trained.num_compiled_later) == (1, 0)
    placed = train.shard(trainings.start(), sharding)
    assert trainings.shardings_of(trained.state) == trainings.shardings_of(placed)


def test_loss_scale_adapts_as_on_one_device(alone):
    trained = trainings.run(SHARDINGS["FSDP"], 3, loss_scale=train.DynamicLossScale(period=2))
    np.testing.assert_allclose(trained.losses, alone.losses[:3], rtol=1e-5)
    assert trained.state.loss_scale.scale == 2.0**16
    assert trained.num_compiled_later == 0


def squares(model, batch, key):
    return jnp.mean(jax.vmap(model)(batch) ** 2)


def make_step(model, sharding, getkey, **options):
    """A state and a step, of a model that maps four features."""
    optimiser = optax.adam(0.01)
    state = train.TrainState.create(model, optimiser, key=getkey())
    step = train.make_step(squares, optimiser, sharding=sharding, **options)
    return (state if sharding is None else train.shard(state, sharding)), step


def batch_of(count):
    return np.arange(4.0 * count, dtype=np.float32).reshape(count, 4) / count


def test_update_that_is_not_finite_halts_every_part(getkey):
    sharding = train.fsdp(min_size=1)
    state, step = make_step(nn.Linear(4, 4, key=getkey()), sharding, getkey)
    before = np.asarray(state.model.weight)
    batch = batch_of(4)
    # One example, and so one device alone, has it.
    batch[3, 2] = np.inf
    state, _ = step(state, batch)
    assert state.is_halted
    np.testing.assert_array_equal(state.model.weight, before)
    assert state.model.weight.sharding.spec == P("data")


def test_placed_batches_give_the_same(getkey):
    sharding = train.data_parallel()
    model = nn.Linear(4, 4, key=getkey())
    losses = []
    for batch in (batch_of(4), jax.device_put(batch_of(4), sharding.batch)):
        state, step = make_step(model, sharding, getkey)
        losses.append(float(step(state, batch)[1]))
    assert losses[0] == losses[1]


def test_frozen_parameters_are_split_and_stay(getkey):
    model = nn.MLP(4, 4, 8, 1, key=getkey())
    frozen = nn.freeze(model, lambda model: model.layers[0])
    state, step = make_step(frozen, train.fsdp(min_size=1), getkey)
    state, _ = step(state, batch_of(4))
    weight = state.model.layers[0].weight
    assert weight.sharding.spec == P("data")
    np.testing.assert_array_equal(weight, model.layers[0].weight)
    assert not np.array_equal(state.model.layers[1].weight, model.layers[1].weight)


def test_stacked_layers_are_split_in_each_layer_or_by_layer(getkey):
    def make_layer(key):
        return nn.Linear(4, 4, key=key)

    model = nn.ScanStack(make_layer, 2, key=getkey())
    state, step = make_step(model, None, getkey)
    state, expected = step(state, batch_of(4))
    mesh = jax.make_mesh((2,), ("data",))
    for spec in (P("data"), P(None, "data"), P(None, None, "data")):
        sharding = train.Sharding(mesh, {"layers.weight": spec})
        other, other_step = make_step(model, sharding, getkey)
        other, loss = other_step(other, batch_of(4))
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
        assert other.model.layers.weight.sharding.spec == spec
        np.testing.assert_allclose(
            other.model.layers.weight, state.model.layers.weight, rtol=1e-5, atol=1e-6
        )


def test_scalars_and_arrays_of_odd_length_are_trained_whole(getkey):
    class Scaled(eqx.Module):
        scale: jax.Array
        shift: jax.Array

        def __call__(self, x):
            return self.scale * x[:3] + self.shift

    state, step = make_step(Scaled(jnp.ones(()), jnp.ones(3)), train.fsdp(min_size=0), getkey)
    state, _ = step(state, batch_of(4))
    assert {each.spec for each in trainings.shardings_of(state)} == {P()}
    assert state.model.scale < 1


@pytest.mark.parametrize(("sharding", "waits"), [("FSDP", True), ("one device", False)])
def test_call_waits_where_devices_share_threads(sharding, waits, monkeypatch):
    # Of two steps that run at once one can take the thread that the other waits for.
    sharding, waited = SHARDINGS[sharding], []
    step = train.make_step(trainings.squares, trainings.OPTIMISER, sharding=sharding)
    state = train.shard(trainings.start(), sharding)
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    for batch in trainings.batches(2):
        state, _ = step(state, batch)
    assert len(waited) == 2 * waits
    many = eqx.filter_jit(lambda state, batch: step(step(state, batch)[0], batch)[0])
    many(state, batch)
    assert len(waited) == 3 * waits


@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_many_steps_are_one_program_over_devices_too(steps_per_call, getkey):
    traces = []

    def loss(model, batch, key):
        traces.append(None)
        return squares(model, batch, key)

    model, sharding, optimiser = nn.Linear(4, 4, key=getkey()), SHARDINGS["FSDP"], optax.adam(0.01)
    state = train.TrainState.create(model, optimiser, key=getkey())
    step = train.make_step(loss, optimiser, sharding=sharding)
    result = train.fit(
        train.shard(state, sharding),
        step,
        train.prefetch([batch_of(4)] * 4, sharding=sharding),
        num_steps=4,
        steps_per_call=steps_per_call,
    )
    assert len(traces) == 1
    assert result.state.model.weight.sharding.spec == P("data")
    expected_step = train.make_step(squares, optimiser)
    expected = train.fit(state, expected_step, [batch_of(4)] * 4, num_steps=4)
    np.testing.assert_allclose(result.history, expected.history, rtol=1e-5)


def test_state_that_lies_otherwise_is_brought_where_it_belongs(getkey):
    model, optimiser = nn.Linear(4, 4, key=getkey()), optax.adam(0.01)
    state = train.TrainState.create(model, optimiser, key=getkey())
    step = train.make_step(squares, optimiser, sharding=SHARDINGS["FSDP"])
    state, _ = step(train.shard(state, SHARDINGS["data parallel"]), batch_of(4))
    assert state.model.weight.sharding.spec == P("data")
    assert state.optimiser_state[0].mu.weight.sharding.spec == P("data")


def exchanged(model, sharding, getkey, **options):
    state, step = make_step(model, sharding, getkey, **options)
    return train.collectives(step.lower(state, batch_of(4)).compile())


def sizes_by_kind(found):
    """How many numbers each array has that is sent, by kind; single numbers are left out.

    The compiler may send an array transposed.
    """
    sizes = collections.defaultdict(list)
    for each in found:
        sizes[each.kind] += [math.prod(shape) for shape in each.shapes if shape]
    return {kind: sorted(each) for kind, each in sizes.items() if each}


def test_data_parallel_step_sums_gradients_and_no_more(getkey):
    model = nn.MLP(4, 3, 8, 1, key=getkey())
    found = exchanged(model, train.data_parallel(), getkey)
    assert sizes_by_kind(found) == {"all-reduce": [3, 8, 24, 32]}, found


def test_fsdp_step_gathers_split_parameters_sums_gradients_and_no_more(getkey):
    model = nn.MLP(4, 3, 8, 1, key=getkey())
    found = exchanged(model, train.fsdp(min_size=24), getkey)
    # Nothing is scattered on CPU: each device keeps its part of the whole sum.
    assert sizes_by_kind(found) == {"all-gather": [24, 32], "all-reduce": [3, 8, 24, 32]}, found


def test_step_on_one_device_sends_nothing(getkey):
    model = nn.MLP(4, 4, 8, 1, key=getkey())
    assert exchanged(model, train.fsdp(jax.devices()[:1], min_size=1), getkey) == ()
