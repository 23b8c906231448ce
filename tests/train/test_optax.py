"""What Optax has beside updates: it goes through calls of many steps, and through checkpoints."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqxlike as eqx
from eqxlike import nn, train

NUM_STEPS, SAVED_AT = 11, 5
X = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)


def averaging(decay):
    """Keeps a mean of the parameters over time, as docs/training.md has it."""
    mean = optax.ema(decay)

    def update(updates, state, parameters):
        _, state = mean.update(optax.apply_updates(parameters, updates), state)
        return updates, state

    return optax.GradientTransformation(mean.init, update)


def keep(model):
    return model


OPTIMISERS = {
    "accumulation": (optax.MultiSteps(optax.adam(0.1), 4), keep),
    "clipping": (optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)), keep),
    "schedule": (
        optax.inject_hyperparams(optax.adam)(optax.cosine_decay_schedule(0.1, NUM_STEPS)),
        keep,
    ),
    "average": (optax.chain(optax.adam(0.1), averaging(0.9)), keep),
    "schedule-free": (optax.contrib.schedule_free_adamw(0.1, warmup_steps=3), keep),
    "frozen layer": (
        optax.adam(0.1),
        lambda model: nn.freeze(model, lambda model: model.layers[0]),
    ),
    "a rate for each layer": (
        optax.partition(
            {"first": optax.sgd(0.1), "rest": optax.adam(0.1)},
            lambda model: eqx.tree_at(
                lambda model: model.layers[0],
                jax.tree.map(lambda _: "rest", model),
                replace_fn=lambda layer: jax.tree.map(lambda _: "first", layer),
            ),
        ),
        keep,
    ),
}


def loss(model, x, key):
    return jnp.mean((jax.vmap(model)(x) - x.sum(axis=1)) ** 2)


@pytest.fixture(scope="module", params=OPTIMISERS)
def training(request):
    optimiser, changed = OPTIMISERS[request.param]
    model = changed(nn.MLP(3, "scalar", width_size=4, depth=1, key=jax.random.key(0)))

    def begin():
        return train.TrainState.create(model, optimiser, key=jax.random.key(1))

    return begin, train.make_step(loss, optimiser)


@pytest.fixture(scope="module")
def whole(training):
    """By a loop of one's own."""
    begin, step = training
    state = begin()
    for batch in itertools.islice(batches(), NUM_STEPS):
        state, _ = step(state, batch)
    return arrays_of(state)


def batches():
    return train.minibatches(X, 4, seed=0)


def arrays_of(state):
    arrays = eqx.filter((state.model, state.optimiser_state), eqx.is_array)
    return [np.asarray(array) for array in jax.tree.leaves(arrays)]


def fit(training, num_steps, **options):
    begin, step = training
    return train.fit(begin(), step, batches(), num_steps=num_steps, **options).state


@pytest.mark.parametrize("steps_per_call", [1, 16])
def test_a_run_is_that_of_a_loop_by_hand_also_in_two_parts(
    training, whole, tmp_path, steps_per_call
):
    options = {"steps_per_call": steps_per_call}
    at_once = arrays_of(fit(training, NUM_STEPS, **options))
    for found, expected in zip(at_once, whole, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    fit(training, SAVED_AT, callbacks=[train.Checkpoint(tmp_path, every=99)], **options)
    resumed = arrays_of(fit(training, NUM_STEPS, resume_from=tmp_path, **options))
    for found, expected in zip(resumed, at_once, strict=True):
        np.testing.assert_array_equal(found, expected)
