"""`EMA`, the exponential moving average of the parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqxlike as eqx
from eqxlike import nn, train
from tests.train.linear import BATCH, make_state, make_step

DECAY = 0.9


def weights_of(result_or_state):
    return np.asarray(getattr(result_or_state, "state", result_or_state).model.weight)


class Recorded(train.Callback):
    """Records the weights after each step."""

    every = 1

    def __init__(self):
        self.weights = []

    def on_step(self, run):
        self.weights.append(weights_of(run).copy())


def mean_of(weights, first, *, debias):
    """The definition of the average."""
    ages = np.arange(len(weights))[::-1]
    of_each = (1 - DECAY) * DECAY**ages
    total = sum(share * each for share, each in zip(of_each, weights, strict=True))
    return total / of_each.sum() if debias else total + DECAY ** len(weights) * first


def trained(optimiser, batches, *, check_finite: Any = True):
    state, recorded = make_state(optimiser), Recorded()
    step = make_step(optimiser, check_finite=check_finite)
    result = train.fit(state, step, batches, num_steps=len(batches), callbacks=[recorded])
    return weights_of(state), recorded.weights, result.state


@pytest.mark.parametrize("debias", [True, False])
def test_average_is_the_weighted_mean_of_the_parameters_after_each_update(debias):
    ema = train.EMA(DECAY, debias=debias)
    optimiser = optax.chain(optax.adam(0.1), ema)
    bad = np.full_like(BATCH, np.nan)
    batches = [BATCH, BATCH, bad, BATCH, BATCH]
    first, weights, state = trained(optimiser, batches, check_finite="skip")
    # The bad batch does not change the parameters.
    np.testing.assert_array_equal(weights[1], weights[2])
    expected = mean_of([*weights[:2], *weights[3:]], first, debias=debias)
    np.testing.assert_allclose(weights_of(ema.averaged(state)), expected, rtol=1e-5)
    assert not np.allclose(expected, weights[-1], rtol=1e-2)
    # Several steps in a call, and `averaged` in a compiled function.
    step = make_step(optimiser, check_finite="skip")
    many = train.fit(make_state(optimiser), step, batches, num_steps=5, steps_per_call=4).state
    averaged = eqx.filter_jit(ema.averaged)(many)
    np.testing.assert_allclose(weights_of(averaged), expected, rtol=1e-5)


def test_average_counts_updates_of_accumulated_gradients():
    ema = train.EMA(DECAY)
    optimiser = optax.MultiSteps(optax.chain(optax.sgd(0.1), ema), 2)
    first, weights, state = trained(optimiser, [BATCH] * 5)
    expected = mean_of(weights[1::2], first, debias=True)
    np.testing.assert_allclose(weights_of(ema.averaged(state)), expected, rtol=1e-5)


def test_average_equals_the_model_until_the_second_update():
    ema = train.EMA(0.99999)
    optimiser = optax.chain(optax.sgd(0.1), ema)
    state = make_state(optimiser)
    assert eqx.tree_equal(ema.averaged(state), state)
    state, _ = make_step(optimiser)(state, BATCH)
    np.testing.assert_allclose(weights_of(ema.averaged(state)), weights_of(state), rtol=1e-6)


def test_average_has_at_least_float32_and_omits_frozen_arrays(getkey):
    ema = train.EMA(0.5)
    optimiser = optax.chain(optax.sgd(0.1), ema)
    model = nn.MLP(2, 1, 4, 1, dtype=jnp.bfloat16, key=getkey())
    model = nn.freeze(model, lambda model: model.layers[0])
    state = train.TrainState.create(model, optimiser, key=getkey())
    state, _ = make_step(optimiser)(state, BATCH.astype(jnp.bfloat16))
    average = state.optimiser_state[1].average
    assert {leaf.dtype for leaf in jax.tree.leaves(average)} == {jnp.dtype(jnp.float32)}
    assert len(jax.tree.leaves(average)) == 2
    assert eqx.tree_equal(ema.averaged(state).model, state.model)


def test_average_is_sharded_like_the_parameters(getkey):
    ema, sharding = train.EMA(DECAY), train.fsdp(min_size=0)
    optimiser = optax.chain(optax.adam(0.1), ema)
    model = nn.Linear(2, 4 * jax.device_count(), key=getkey())
    start = train.TrainState.create(model, optimiser, key=getkey())
    state, alone = train.shard(start, sharding), make_step(optimiser)(start, BATCH)
    state, _ = make_step(optimiser, sharding=sharding)(state, BATCH)
    assert jax.device_count() > 1
    average = state.optimiser_state[1].average
    assert average.weight.sharding == state.model.weight.sharding
    assert average.weight.addressable_shards[0].data.shape == (4, 2)
    expected = weights_of(ema.averaged(alone[0]))
    np.testing.assert_allclose(weights_of(ema.averaged(state)), expected, rtol=1e-5)


def test_groups_of_parameters_may_have_separate_averages_but_no_array_two_averages():
    labels = lambda model: jax.tree.map(lambda leaf: "abc"[leaf.ndim], model)
    ema = train.EMA(DECAY)
    transforms = {"b": optax.chain(optax.sgd(0.1), ema), "c": optax.chain(optax.adam(0.1), ema)}
    one_for_weights = optax.partition({"b": optax.sgd(0.1), "c": transforms["c"]}, labels)
    batches = [BATCH] * 3
    first, weights, state = trained(optax.partition(transforms, labels), batches)
    expected = mean_of(weights, first, debias=True)
    averaged = ema.averaged(state)
    np.testing.assert_allclose(weights_of(averaged), expected, rtol=1e-5)
    assert not np.allclose(averaged.model.bias, state.model.bias)
    state = trained(one_for_weights, batches)[2]
    averaged = ema.averaged(state)
    np.testing.assert_allclose(weights_of(averaged), expected, rtol=1e-5)
    np.testing.assert_array_equal(averaged.model.bias, state.model.bias)
    twice = make_state(optax.chain(optax.sgd(0.1), ema, train.EMA(0.5)))
    with pytest.raises(ValueError, match=r"2 averages of model\.weight"):
        ema.averaged(twice)


def test_bad_decays_optimisers_and_states_are_refused():
    ema, state = train.EMA(DECAY), make_state(optax.sgd(0.1))
    for decay, error in ((0, ValueError), (1, ValueError), ("0.9", TypeError), (True, TypeError)):
        with pytest.raises(error, match="decay must be"):
            train.EMA(decay)  # pyright: ignore[reportArgumentType]
    for call, error, message in [
        (lambda: ema.averaged(state), ValueError, r"create the optimiser with `optax\.chain"),
        (lambda: ema.averaged(state.model), TypeError, r"averaged expected a TrainState, got Lin"),
        (lambda: ema.update({}, ema.init({})), ValueError, "EMA needs the parameters"),
    ]:
        with pytest.raises(error, match=message):
            call()
