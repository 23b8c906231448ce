"""A step and an evaluation on two devices give the same results as on one device."""

import collections
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqxlike as eqx
from eqxlike import nn, train
from eqxlike._programs import collectives
from eqxlike.train._sharding import place_batch
from tests.nn.arrays import filled
from tests.train.linear import mean_square
from tests.train.sharding import trainings

OPTIMISER = optax.sgd(0.01, momentum=0.9)
FSDP = train.fsdp(min_size=1)
DATA_PARALLEL = train.data_parallel()


def test_losses_equal_losses_on_one_device_and_compile_once():
    sharding, options = train.fsdp(min_size=16), {"loss_scale": train.DynamicLossScale(period=2)}
    alone, trained = trainings.run(None, 5), trainings.run(sharding, 5, **options)
    np.testing.assert_allclose(trained.losses, alone.losses, rtol=1e-5)
    found, expected = (jax.device_get(each.state) for each in (trained, alone))
    assert eqx.tree_equal(found.model, expected.model, rtol=1e-3, atol=1e-5)
    assert eqx.tree_equal(found.model_state, expected.model_state, rtol=1e-3, atol=1e-5)
    assert (trained.num_traces, trained.num_compiled_later) == (1, 0)
    placed = train.shard(trainings.start(**options), sharding)
    assert trainings.shardings_of(trained.state) == trainings.shardings_of(placed)
    assert trained.state.loss_scale.scale == 2.0**17


def linear():
    return filled(nn.Linear, 4, 4, key=jax.random.key(0))


def make_state(model):
    return train.TrainState.create(model, OPTIMISER, key=jax.random.key(1))


def make_step(model, sharding):
    """A state and a step for a model with four input features."""
    state, step = make_state(model), train.make_step(mean_square, OPTIMISER, sharding=sharding)
    return (state if sharding is None else train.shard(state, sharding)), step


def batch_of(count):
    return np.arange(4.0 * count, dtype=np.float32).reshape(count, 4) / count


def test_states_and_batches_of_another_sharding_are_moved():
    _, step = make_step(linear(), FSDP)
    losses = []
    for batch in (batch_of(4), jax.device_put(batch_of(4), FSDP.batch)):
        state, loss = step(train.shard(make_state(linear()), DATA_PARALLEL), batch)
        losses.append(float(loss))
        assert state.model.weight.sharding.spec == P("data")
        assert state.optimiser_state[0].trace.weight.sharding.spec == P("data")
    assert losses[0] == losses[1]
    # A nonfinite example, on one device, halts the whole state.
    before, batch = np.asarray(state.model.weight), batch_of(4)
    batch[3, 2] = np.inf
    state, _ = step(state, batch)
    assert state.is_halted
    np.testing.assert_array_equal(state.model.weight, before)
    assert state.model.weight.sharding.spec == P("data")


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_call_waits_if_devices_share_threads(num_devices, monkeypatch):
    # If two steps run at the same time, one can occupy the thread that the other needs.
    waits, waited = num_devices == 2, []
    state, step = make_step(linear(), train.fsdp(jax.devices()[-num_devices:], min_size=1))
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    for _ in range(2):
        state, _ = step(state, batch_of(4))
    assert len(waited) == 2 * waits
    many = eqx.filter_jit(lambda state, batch: step(step(state, batch)[0], batch)[0])
    many(state, batch_of(4))
    assert len(waited) == 3 * waits


def test_many_steps_on_several_devices_are_one_program():
    traces = []

    def loss(*arguments):
        traces.append(None)
        return mean_square(*arguments)

    state = make_state(linear())
    step = train.make_step(loss, OPTIMISER, sharding=FSDP)
    histories = []
    for steps_per_call in (1, 2):
        ahead = train.prefetch([batch_of(4)] * 4, sharding=FSDP)
        options = {"num_steps": 4, "steps_per_call": steps_per_call}
        result = train.fit(train.shard(state, FSDP), step, ahead, **options)
        assert len(traces) == 1
        assert result.state.model.weight.sharding.spec == P("data")
        histories.append(result.history)
    alone = train.make_step(mean_square, OPTIMISER)
    expected = train.fit(state, alone, [batch_of(4)] * 4, num_steps=4)
    np.testing.assert_allclose(histories, [expected.history] * 2, rtol=1e-5)


def sizes_by_kind(sharding):
    """The sizes of the arrays in the collectives of a step, by kind, without scalars.

    Sizes are compared instead of shapes, because the compiler may transpose an array.
    """
    state, step = make_step(filled(nn.MLP, 4, 3, 8, 1, key=jax.random.key(0)), sharding)
    sizes = collections.defaultdict(list)
    for each in collectives(step.lower(state, batch_of(4)).compile()):
        sizes[each.kind] += [math.prod(shape) for shape in each.shapes if shape]
    return {kind: sorted(each) for kind, each in sizes.items() if each}


def test_steps_only_gather_split_parameters_and_sum_gradients():
    gradients = [3, 8, 24, 32]
    assert sizes_by_kind(DATA_PARALLEL) == {"all-reduce": gradients}
    # On CPU there is no reduce-scatter: each device slices its part of the whole sum.
    found = sizes_by_kind(train.fsdp(min_size=24))
    assert found == {"all-gather": [24, 32], "all-reduce": gradients}
    assert sizes_by_kind(train.fsdp(jax.devices()[:1], min_size=1)) == {}


# --- batches ---


def test_examples_are_split_and_other_arrays_are_replicated():
    keys = jax.random.split(jax.random.key(0), 4)
    batch = {"x": np.ones((4, 3)), "weight": jnp.ones(()), "name": "a", "none": None, "key": keys}
    placed = place_batch(batch, DATA_PARALLEL)
    assert placed["x"].sharding == placed["key"].sharding == DATA_PARALLEL.batch
    assert placed["x"].dtype == jnp.float32
    assert placed["weight"].sharding.spec == P()
    assert (placed["name"], placed["none"]) == ("a", None)
    with train.prefetch([batch], sharding=DATA_PARALLEL) as ahead:
        (made_ahead,) = ahead
    assert trainings.shardings_of(made_ahead) == trainings.shardings_of(placed)


def test_indivisible_batch_is_refused():
    batch = {"x": np.ones((8, 4), np.float32), "odd": np.ones((3, 4), np.float32)}
    odd = r"\['odd'\] has 3 examples, in shape \(3, 4\), and the mesh axes data split them into 2"
    multiple = "parts. Choose a batch size that is a multiple"
    with pytest.raises(ValueError, match=f"the batch cannot be split: {odd} {multiple}"):
        place_batch(batch, DATA_PARALLEL)
    state, step = make_step(linear(), DATA_PARALLEL)
    with pytest.raises(ValueError, match="the batch cannot be split: it has 3 examples"):
        step(state, batch["odd"])


# --- evaluation ---


def test_metrics_equal_metrics_on_one_device_also_for_indivisible_batches():
    def measure(model, model_state, batch):
        return {"square": jax.vmap(model)(batch) ** 2, "state": model_state}

    batches = [4 * batch_of(4), 3 * batch_of(3)]
    state = dataclasses.replace(make_state(linear()), model_state=jnp.array(3.0))
    sharded = train.make_evaluate(measure, batches, sharding=FSDP)
    expected = train.make_evaluate(measure, batches)(state)
    assert sharded(train.shard(state, FSDP)) == pytest.approx(expected)
    assert expected["state"] == 3


def test_only_divisible_arrays_are_split_with_must_divide_false():
    batch = {"x": jnp.ones((4, 2)), "odd": jnp.ones(3), "one": jnp.ones(()), "name": "a"}
    found = FSDP.of_batch(batch, must_divide=False)
    whole = {"odd": FSDP.whole, "one": FSDP.whole, "name": None}
    assert found == {"x": FSDP.batch, **whole}
