"""Metrics over batches, beside those of all examples at once."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special
import scipy.stats

from eqxlike import nn, train
from eqxlike.train import metrics

RANDOM = np.random.default_rng(0)
LOGITS = RANDOM.normal(size=(11, 4)).astype(np.float32)
LABELS = RANDOM.integers(0, 4, 11)
PARTS = [slice(0, 5), slice(5, 6), slice(6, 11)]


def merged(parts):
    first, *others = parts
    for each in others:
        first = first.merge(each)
    return float(first.value)


def test_accuracy_is_that_of_all_examples():
    found = merged(metrics.accuracy(LOGITS[part], LABELS[part]) for part in PARTS)
    np.testing.assert_allclose(found, np.mean(LOGITS.argmax(1) == LABELS), rtol=1e-6)


def test_perplexity_is_that_of_all_examples():
    found = merged(metrics.perplexity(LOGITS[part], LABELS[part]) for part in PARTS)
    of_labels = scipy.special.log_softmax(LOGITS, axis=1)[np.arange(11), LABELS]
    np.testing.assert_allclose(found, np.exp(-of_labels.mean()), rtol=1e-5)


def test_rmse_is_that_of_all_examples():
    x, y = LOGITS[:, 0], LOGITS[:, 1]
    found = merged(metrics.rmse(x[part], y[part]) for part in PARTS)
    np.testing.assert_allclose(found, np.sqrt(np.mean((x - y) ** 2)), rtol=1e-5)


def test_what_has_no_weight_does_not_count():
    weights = np.asarray([1.0, 0.0, 2.0], np.float32)
    values = np.asarray([3.0, np.nan, 6.0], np.float32)
    assert float(metrics.mean(values, weights).value) == 5.0
    assert float(metrics.accuracy(LOGITS[:3], LABELS[:3], np.zeros(3, np.float32)).weight) == 0


def test_nothing_has_no_mean():
    assert math.isnan(metrics.mean(np.zeros(0, np.float32)).value)


def test_sums_of_half_precision_are_in_full():
    values = jnp.full(3000, 1.0, jnp.bfloat16)
    assert float(metrics.mean(values).total) == 3000
    # In bfloat16 already 256 + 1 is 256.
    labels = jnp.zeros(3000, jnp.int32)
    assert float(metrics.accuracy(jnp.ones((3000, 2), jnp.bfloat16), labels).total) == 3000


def test_perplexity_of_guesses_is_the_number_of_classes():
    np.testing.assert_allclose(
        metrics.perplexity(np.zeros((2, 3, 5), np.float32), np.zeros((2, 3), int)).value,
        5.0,
        rtol=1e-6,
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.accuracy(LOGITS, LABELS[:3]), r"logits of shape \(11, 4\) and labels of"),
        (lambda: metrics.perplexity(LOGITS, LOGITS), "expected integers from 0 on as labels; got"),
        (lambda: metrics.rmse(LOGITS, LABELS), r"the shape of the targets, \(11,\); got \(11, 4\)"),
        (lambda: metrics.mean(LOGITS, LABELS), r"of shape \(11, 4\); got shape \(11,\)"),
        (
            lambda: metrics.rmse(LOGITS, LOGITS).merge(metrics.mean(LOGITS)),
            "Only means of one metric can be merged",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- evaluation ---


@pytest.fixture(scope="module")
def state():
    model = nn.Linear(4, 4, key=jax.random.key(0))
    return train.TrainState.create(model, optax.adam(0.1), key=jax.random.key(1))


def measure(model, batch):
    x, labels = batch
    logits = jax.vmap(model)(x)
    return {"accuracy": metrics.accuracy(logits, labels), "first": logits[:, 0]}


def batches():
    return [(LOGITS[part], LABELS[part]) for part in PARTS]


@pytest.mark.parametrize("given", [batches(), batches, lambda: iter(batches())])
def test_evaluation_is_that_of_all_examples(state, given):
    evaluate = train.make_evaluate(measure, given)
    logits = jax.vmap(state.model)(LOGITS)
    expected = {"accuracy": np.mean(logits.argmax(1) == LABELS), "first": logits[:, 0].mean()}
    for _ in range(2):
        found = evaluate(state)
        assert found.keys() == expected.keys()
        assert all(type(value) is float for value in found.values())
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5)


def test_a_number_for_a_short_batch_counts_less(state):
    def means(model, batch):
        return {"number": jnp.mean(batch["x"]), "array": batch["x"]}

    batches = [{"x": np.arange(length, dtype=np.float32), "of": "all"} for length in (1, 5, 9)]
    found = train.make_evaluate(means, batches)(state)
    expected = np.concatenate([batch["x"] for batch in batches]).mean()
    np.testing.assert_allclose([found["number"], found["array"]], expected, rtol=1e-6)


def test_a_number_for_arrays_of_several_lengths_counts_once(state):
    def first(model, batch):
        return {"first": batch[0][0]}

    batches = [(np.full(length, length, np.float32), np.ones(7)) for length in (1, 5)]
    assert train.make_evaluate(first, batches)(state) == {"first": 3.0}


def test_what_is_no_state_is_refused(state):
    with pytest.raises(TypeError, match="evaluate expected a TrainState, and got Linear"):
        train.make_evaluate(measure, batches())(state.model)


def test_a_model_with_state_is_measured_with_it():
    def make(key):
        return nn.Sequential([nn.BatchNorm(4, "batch", mode="batch"), nn.Linear(4, 4, key=key)])

    model, model_state = nn.make_with_state(make)(jax.random.key(0))
    state = train.TrainState.create(
        model, optax.sgd(0.1), key=jax.random.key(1), model_state=model_state
    )

    def measure(model, model_state, batch):
        in_batch = jax.vmap(
            nn.inference_mode(model), in_axes=(0, None), out_axes=(0, None), axis_name="batch"
        )
        return {"accuracy": metrics.accuracy(in_batch(batch[0], model_state)[0], batch[1])}

    assert 0 <= train.make_evaluate(measure, batches())(state)["accuracy"] <= 1


@pytest.mark.parametrize(
    ("measure", "batches", "error", "message"),
    [
        (measure, [], ValueError, "expected at least one batch"),
        (
            lambda model, batch: 3.0,
            batches(),
            TypeError,
            "a mapping from names .* got float",
        ),
        (
            lambda model, batch: {str(len(batch[1])): jnp.zeros(())},
            batches(),
            ValueError,
            "the same metrics of each batch: 5; got 1",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_told(state, measure, batches, error, message):
    with pytest.raises(error, match=message):
        train.make_evaluate(measure, batches)(state)


def test_measure_that_takes_no_batch_is_told_what_it_is_called_with(state):
    def batchless(model):
        return {}

    message = r"make_evaluate calls `measure\(model, batch\)`, and batchless does not take that"
    with pytest.raises(TypeError, match=message):
        train.make_evaluate(batchless, batches())(state)


def test_one_batch_in_the_place_of_a_list_is_told_to_be_one(state):
    with pytest.raises(Exception) as caught:  # noqa: PT011  whatever `measure` raises of it
        train.make_evaluate(measure, (LOGITS, LABELS))(state)
    assert caught.value.__notes__[-1].endswith("If the tuple is one batch, give `[batch]`.")
