"""Evaluation of a model that is split over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eqxlike import nn, train

SHARDING = train.fsdp(min_size=1)


@pytest.fixture
def state(getkey):
    return train.TrainState.create(nn.Linear(4, 4, key=getkey()), optax.sgd(0.1), key=getkey())


def measure(model, batch):
    return {"square": jax.vmap(model)(batch) ** 2}


# The last one does not divide.
BATCHES = [np.arange(4.0 * count, dtype=np.float32).reshape(count, 4) for count in (4, 3)]


def test_metrics_are_those_of_one_device(state):
    sharded = train.make_evaluate(measure, BATCHES, sharding=SHARDING)
    alone = train.make_evaluate(measure, BATCHES)
    assert sharded(train.shard(state, SHARDING)) == pytest.approx(alone(state))


def test_model_with_state_is_evaluated():
    def measure(model, model_state, batch):
        outputs = jax.vmap(lambda x: model(x, model_state)[0])(batch)
        return {"output": outputs}

    def make(key):
        return nn.Sequential([nn.Linear(4, 4, key=key), nn.BatchNorm(4, "batch", mode="batch")])

    model, model_state = nn.make_with_state(make)(jax.random.key(0))
    model = nn.inference_mode(model)
    key = jax.random.key(1)
    state = train.TrainState.create(model, optax.sgd(0.1), key=key, model_state=model_state)
    evaluate = train.make_evaluate(measure, BATCHES[:1], sharding=SHARDING)
    expected = train.make_evaluate(measure, BATCHES[:1])(state)
    assert evaluate(train.shard(state, SHARDING)) == pytest.approx(expected, rel=1e-5)


def test_batch_is_split_so_far_as_it_divides():
    batch = {"x": jnp.ones((4, 2)), "odd": jnp.ones(3), "one": jnp.ones(())}
    found = SHARDING.of_batch(batch, must_divide=False)
    assert found == {"x": SHARDING.batch, "odd": SHARDING.whole, "one": SHARDING.whole}


def test_sharding_of_jax_is_refused():
    with pytest.raises(TypeError, match=r"make_evaluate expected a train\.Sharding, as"):
        train.make_evaluate(measure, BATCHES, sharding=SHARDING.batch)
