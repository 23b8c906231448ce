"""Metrics over batches equal metrics of all examples at once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special

from eqxlike import nn, train
from eqxlike.train import metrics

RANDOM = np.random.default_rng(0)
LOGITS = RANDOM.normal(size=(11, 4)).astype(np.float32)
LABELS = RANDOM.integers(0, 4, 11)
PARTS = [slice(0, 5), slice(5, 6), slice(6, 11)]


def test_merged_metrics_equal_metrics_of_all_examples():
    x, y = LOGITS[:, 0], LOGITS[:, 1]

    def merged(metric, *arrays):
        first, *others = (metric(*(array[part] for array in arrays)) for part in PARTS)
        for each in others:
            first = first.merge(each)
        return first.value

    @jax.jit
    def found():
        # The perplexity of random guesses is the number of classes.
        guesses = metrics.perplexity(np.zeros((2, 3, 5), np.float32), np.zeros((2, 3), int))
        return (
            merged(metrics.accuracy, LOGITS, LABELS),
            merged(metrics.perplexity, LOGITS, LABELS),
            merged(metrics.rmse, x, y),
            guesses.value,
        )

    of_labels = scipy.special.log_softmax(LOGITS, axis=1)[np.arange(11), LABELS]
    expected = [np.mean(LOGITS.argmax(1) == LABELS), np.exp(-of_labels.mean())]
    expected += [np.sqrt(np.mean((x - y) ** 2)), 5.0]
    np.testing.assert_allclose(found(), expected, rtol=1e-5)


def test_examples_of_weight_zero_do_not_count_and_an_empty_mean_is_nan():
    weights = np.asarray([1.0, 0.0, 2.0], np.float32)
    values = np.asarray([3.0, np.nan, 6.0], np.float32)

    @jax.jit
    def found(none):
        return (
            metrics.mean(values, weights).value,
            metrics.accuracy(LOGITS[:3], LABELS[:3], none).weight,
            metrics.perplexity(LOGITS[:3], LABELS[:3], none).weight,
            metrics.rmse(values, values, none).weight,
            metrics.mean(none[:0]).value,
        )

    np.testing.assert_array_equal(found(np.zeros(3, np.float32)), [5, 0, 0, 0, np.nan])


def test_sums_of_half_precision_are_computed_in_float32():
    # In bfloat16, 256 + 1 is 256.
    @jax.jit
    def totals(ones):
        each = [metrics.mean(ones[:, 0]), metrics.rmse(2 * ones[:, 0], ones[:, 0])]
        each.append(metrics.accuracy(ones, np.zeros(3000, np.int32)))
        return [metric.total for metric in each]

    assert totals(np.ones((3000, 2), jnp.bfloat16)) == [3000] * 3


def test_mismatched_shapes_are_refused():
    mean = metrics.mean(LOGITS)
    for metric, arguments, message in [
        (metrics.accuracy, (LOGITS, LABELS[:3]), r"logits of shape \(11, 4\) and labels of"),
        (metrics.perplexity, (LOGITS, LOGITS), "labels to be integers of at least 0, got"),
        (metrics.rmse, (LOGITS, LABELS), r"the same shape as the targets, \(11,\); got \(11, 4\)"),
        (metrics.mean, (LOGITS, LABELS), r"the values, \(11, 4\); got weights of shape \(11,\)"),
        (metrics.rmse(LOGITS, LOGITS).merge, (mean,), "are sqrt and _itself"),
    ]:
        with pytest.raises(ValueError, match=message):
            metric(*arguments)


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


def test_evaluation_over_batches_equals_evaluation_over_all_examples(state):
    logits = LOGITS @ np.asarray(state.model.weight).T + np.asarray(state.model.bias)
    expected = {"accuracy": np.mean(logits.argmax(1) == LABELS), "first": logits[:, 0].mean()}
    for given in (batches(), lambda: iter(batches())):
        evaluate = train.make_evaluate(measure, given)
        for _ in range(2):
            found = evaluate(state)
            assert all(type(value) is float for value in found.values())
            assert found == pytest.approx(expected, rel=1e-5)


def test_scalar_metric_is_weighted_by_the_number_of_examples(state):
    x = np.arange(18, dtype=np.float32) ** 2
    parts = [x[:8], x[8:16], x[16:]]

    def evaluated(batches, measure=lambda model, batch: {"number": jnp.mean(batch["x"])}):
        return train.make_evaluate(measure, batches)(state)["number"]

    lengths = [{"x": part, "scale": np.ones(())} for part in (x[:1], x[1:7], x[7:])]
    np.testing.assert_allclose(evaluated(lengths), x.mean(), rtol=1e-6)
    # The weights have another length, the length of a full batch, or of the last batch.
    for length in (3, 8, 2):
        extra = {"weights": np.ones(length, np.float32), "temperature": np.ones(())}
        more = [{"x": part, "ids": part.astype(int).tolist(), **extra} for part in parts]
        np.testing.assert_allclose(evaluated(more), x.mean(), rtol=1e-6)
    # All batches have the same number of examples, whichever array defines it.
    same = [{"x": part, "weights": np.ones(3)} for part in parts[:2]]
    np.testing.assert_allclose(evaluated(same), x[:16].mean(), rtol=1e-6)

    graphs = [{"x": part, "graphs": np.ones(3)} for part in (x[:3], x[3:10], x[10:])]
    unclear = [[*more[:1], more[2], more[1]], [*more, more[0]], graphs]
    unclear.append([{"x": part, "pairs": np.ones(1 + len(part))} for part in parts])
    unclear.append([more[0], {"x": parts[2], "weights": np.ones(8)}])
    for batches in unclear:
        with pytest.raises(ValueError, match=r"'number', .*batch\['x'\] \d.*metrics\.mean\(value"):
            evaluated(batches)
    counted = lambda model, batch: {"number": metrics.mean(jnp.mean(batch["x"]), len(batch["x"]))}
    np.testing.assert_allclose(evaluated(graphs, counted), x.mean(), rtol=1e-6)


def test_bad_metrics_and_batches_are_refused(state):
    def batchless(model):
        return {}

    call = r"make_evaluate calls `measure\(model, batch\)`, but batchless does not accept"
    differing = lambda model, batch: {str(len(batch[1])): jnp.zeros(())}
    swapped = r"expected `measure` to be a function, `measure\(model, batch\)`; got \[\s*\(f32"
    endless = train.minibatches((np.ones((4, 2)),), 2, seed=0)
    unsuitable = r"make_evaluate expected batches.*pass a list"
    for measured, given, error, message in [
        (measure, [], ValueError, "expected at least one batch"),
        (lambda *_: 3.0, batches(), TypeError, "a mapping from names .* got float"),
        (differing, batches(), ValueError, "the same metrics for each batch, 5; got 1"),
        (batchless, batches(), TypeError, call),
        (batches(), measure, TypeError, swapped),
        (measure, endless, TypeError, unsuitable),
        (measure, np.ones(4), TypeError, unsuitable),
    ]:
        with pytest.raises(error, match=message):
            train.make_evaluate(measured, given)(state)
    with pytest.raises(TypeError, match="evaluate expected a TrainState, got Linear"):
        train.make_evaluate(measure, batches())(state.model)
    for one_batch in ((LOGITS, LABELS), {"x": LOGITS, "y": LABELS}):
        with pytest.raises(Exception) as caught:  # noqa: PT011  the error of `measure`
            train.make_evaluate(measure, one_batch)(state)
        assert caught.value.__notes__[-1].endswith("If it is one batch, pass `[batch]`.")
