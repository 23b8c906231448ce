"""`Mean`, an average over batches; metrics that return a `Mean`; and `make_evaluate`."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from .. import Module, field, filter_jit, is_array
from .._dtypes import at_least_float32
from ..extend import listed
from ._batches import Minibatches
from ._checks import as_arrays, check_callable, check_takes, is_foreign
from ._sharding import Sharding, check_sharding, measure_sharded
from ._state import TrainState, check_state


def _itself(mean: Array) -> Array:
    return mean


class Mean(Module):
    """A weighted mean over examples, and a function that maps the mean to a metric. The means of
    several batches can be merged.

    - `total`: shape `()`, the weighted sum of the values.
    - `weight`: shape `()`, the sum of the weights. If all weights are 1, this is the number of
      examples.
    - `finish`: function that maps the mean to the metric, such as the square root for the RMSE.

    >>> import jax.numpy as jnp
    >>> from eqxlike.train import metrics
    >>> first, second = metrics.mean(jnp.array([1.0, 2.0])), metrics.mean(jnp.array([6.0]))
    >>> float(first.merge(second).value)
    3.0
    """

    total: Float[Array, ""]
    weight: Float[Array, ""]
    finish: Callable[[Array], Array] = field(static=True, default=_itself)

    def merge(self, other: "Mean") -> "Mean":
        """The mean over the examples of both means.

        **Raises:** `ValueError` if the two means have a different `finish`.
        """
        if self.finish is not other.finish:
            raise ValueError(
                "Only means of one metric can be merged; the functions `finish` of these are "
                f"{self.finish.__name__} and {other.finish.__name__}."
            )
        return Mean(self.total + other.total, self.weight + other.weight, self.finish)

    @property
    def value(self) -> Float[Array, ""]:
        """The metric; NaN if the weight is 0."""
        return self.finish(self.total / self.weight)


def mean(
    values: Float[Array, "*shape"],
    weights: Float[Array, "*shape"] | None = None,
    finish: Callable[[Array], Array] = _itself,
) -> Mean:
    """The weighted mean of values. There is one value for each example, token or pixel.

    **Arguments:**

    - `values`: array of any shape. The sum is computed in float32 or a wider dtype.
    - `weights`: weight of each value, broadcast to the shape of `values`. The default is 1. Use 0
      for padding; a value of weight 0 may be NaN.
    - `finish`: function that maps the mean to the metric. It needs a `__name__`. Pass the same
      function object for all batches.

    **Raises:** `ValueError` if the weights do not broadcast to the shape of the values.

    >>> float(mean(jnp.array([1.0, 5.0, jnp.nan]), jnp.array([3.0, 1.0, 0.0])).value)
    2.0
    """
    values = _in_full(values)
    if weights is None:
        return Mean(jnp.sum(values), jnp.full((), values.size, values.dtype), finish)
    weights = jnp.asarray(weights).astype(values.dtype)
    try:
        weights = jnp.broadcast_to(weights, values.shape)
    except ValueError as error:
        raise ValueError(
            f"mean expected weights that broadcast to the shape of the values, {values.shape}; got "
            f"weights of shape {weights.shape}."
        ) from error
    counted = jnp.where(weights == 0, jnp.zeros_like(values), values * weights)
    return Mean(jnp.sum(counted), jnp.sum(weights), finish)


def accuracy(
    logits: Float[Array, "*shape C"],
    labels: Int[Array, "*shape"],
    weights: Float[Array, "*shape"] | None = None,
) -> Mean:
    """The fraction of examples whose most probable class is the label.

    **Arguments:**

    - `logits`: logits or probabilities of C classes.
    - `labels`: integers from 0 to C - 1, or booleans.
    - `weights`: as for `mean`.

    **Raises:** `ValueError` if the shapes do not fit, or the labels are not integers.

    >>> float(accuracy(jnp.array([[2.0, 1.0], [0.0, 3.0]]), jnp.array([0, 0])).value)
    0.5
    """
    labels = _as_classes("accuracy", logits, labels)
    is_right = jnp.argmax(logits, axis=-1) == labels
    return mean(is_right.astype(jnp.float32), weights)


def perplexity(
    logits: Float[Array, "*shape C"],
    labels: Int[Array, "*shape"],
    weights: Float[Array, "*shape"] | None = None,
) -> Mean:
    """The exponential of the mean cross-entropy in nats. It is C for a uniform prediction.

    **Arguments:**

    - `logits`: logits of C classes.
    - `labels`: integers from 0 to C - 1, or booleans.
    - `weights`: as for `mean`.

    **Raises:** `ValueError` if the shapes do not fit, or the labels are not integers.

    >>> round(float(perplexity(jnp.zeros((2, 7)), jnp.array([0, 6])).value), 4)
    7.0
    """
    labels = _as_classes("perplexity", logits, labels)
    log_probabilities = jax.nn.log_softmax(_in_full(logits), axis=-1)
    of_labels = jnp.take_along_axis(log_probabilities, labels[..., None], axis=-1)
    return mean(-of_labels[..., 0], weights, jnp.exp)


def rmse(
    predictions: Float[Array, "*shape"],
    targets: Float[Array, "*shape"],
    weights: Float[Array, "*shape"] | None = None,
) -> Mean:
    """The root of the mean squared error, in the unit of the targets.

    **Raises:** `ValueError` if the shapes are not the same.

    >>> round(float(rmse(jnp.array([1.0, 2.0]), jnp.array([1.0, 4.0])).value), 4)
    1.4142
    """
    if jnp.shape(predictions) != jnp.shape(targets):
        raise ValueError(
            f"rmse expected predictions of the same shape as the targets, {jnp.shape(targets)}; "
            f"got {jnp.shape(predictions)}."
        )
    return mean(jnp.abs(_in_full(predictions) - _in_full(targets)) ** 2, weights, jnp.sqrt)


def _in_full(array: Any) -> Array:
    """Converts integers and 16-bit floats to float32, because long sums in 16 bits stop growing."""
    array = jnp.asarray(array)
    is_inexact = jnp.issubdtype(array.dtype, jnp.inexact)
    return array.astype(at_least_float32(array.dtype) if is_inexact else jnp.float32)


def _as_classes(name: str, logits: Any, labels: Any) -> Int[Array, "*shape"]:
    """Checks the labels of a metric. Converts booleans to 0 and 1."""
    labels = jnp.asarray(labels)
    labels = labels.astype(jnp.int32) if labels.dtype == jnp.bool_ else labels
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"{name} expected the labels to be integers of at least 0, got {labels.dtype}. Take "
            "the argmax of one-hot labels."
        )
    if jnp.shape(logits)[:-1] != jnp.shape(labels) or jnp.ndim(logits) == 0:
        raise ValueError(
            f"{name} expected logits of the shape of the labels plus a last axis for classes; got "
            f"logits of shape {jnp.shape(logits)} and labels of shape {jnp.shape(labels)}."
        )
    return labels


# --- Metrics of a model over batches ---


Batches = Iterable[Any] | Callable[[], Iterable[Any]]
Measure = Callable[..., Mapping[str, Mean | ArrayLike]]


def make_evaluate(
    measure: Measure, batches: Batches, *, sharding: Sharding | None = None
) -> Callable[[TrainState], dict[str, float]]:
    """Makes a function that computes metrics of a model over batches. Pass it to `fit` as
    `evaluate`.

    **Arguments:**

    - `measure`: function that computes the metrics of one batch. It is called as `measure(model,
      batch)`, or as `measure(model, model_state, batch)` if the `TrainState` has a `model_state`.
      `measure` is compiled. The model is in training mode, so start with `model =
      nn.inference_mode(model)` if it has dropout, for example. `measure` returns metrics by name.
      Each metric is one of these:
        - A `metrics.Mean`, such as `metrics.accuracy(...)` or `metrics.mean(values, weights)`.
        - An array of values to average.
        - A single number. It is weighted by the number of examples in its batch, which is the
          common leading length of the arrays. If the arrays differ in length, the arrays that are
          shorter in the last batch contain the examples. If the number of examples is ambiguous,
          return an array of values or `metrics.mean(value, num_examples)` instead.
    - `batches`: a list of batches or another iterable that can be iterated over many times, or a
      function that returns an iterator. Batches may differ in length; all examples have equal
      weight. Tensors of other libraries and lists of numbers become arrays, as in `fit`.
    - `sharding`: the sharding that `train.shard` used for the states. A batch is split over the
      devices if its length is divisible by the number of devices.

    **Returns:** a function `evaluate(state)`, which returns the metrics over all batches as floats.
    It reads the sums from the device after the last batch. It raises `TypeError` if `measure` does
    not return a mapping, or `state` is not a `TrainState`. It raises `ValueError` if there are no
    batches, if two batches have metrics of different names, or if a metric is a single number and
    the number of examples is ambiguous.

    **Raises:** `TypeError` if `measure` is not a function, if `sharding` is not a `train.Sharding`,
    if `batches` are endless, as `minibatches` are, or if `batches` is a single array.

    >>> import jax, jax.numpy as jnp, optax
    >>> from eqxlike import nn, train
    >>> state = train.TrainState.create(
    ...     nn.Linear(2, 3, key=jax.random.key(0)), optax.sgd(0.1), key=jax.random.key(1)
    ... )
    >>> def measure(model, batch):
    ...     x, labels = batch
    ...     return {"accuracy": train.metrics.accuracy(jax.vmap(model)(x), labels)}
    >>> evaluate = train.make_evaluate(measure, [(jnp.ones((4, 2)), jnp.array([0, 1, 2, 2]))])
    >>> sorted(evaluate(state))
    ['accuracy']
    """
    check_callable(measure, "measure(model, batch)", "make_evaluate")
    if isinstance(batches, Minibatches) or is_array(batches) or is_foreign(batches):
        problem = "never end" if isinstance(batches, Minibatches) else "are one array"
        raise TypeError(
            f"make_evaluate expected batches to iterate over once, but these {problem}: pass a "
            "list, such as `[arrays]` for a single batch."
        )
    if sharding is not None:
        check_sharding(sharding, "make_evaluate")
        measure = measure_sharded(measure, sharding)
    measured = filter_jit(_as_means(measure))

    def evaluate(state: TrainState) -> dict[str, float]:
        check_state(state, "evaluate")
        fresh = batches() if callable(batches) else batches
        # Pass only the model, because the optimiser state is not used.
        models = (state.model,) if state.model_state is None else (state.model, state.model_state)
        totals: dict[str, Mean] = {}
        first, is_over = None, False
        for batch in fresh:
            batch = as_arrays(batch, "make_evaluate")
            lengths = _lengths(batch)
            first = lengths if first is None else first
            weight = None if is_over else _weight(lengths, first)
            # If the arrays of a batch differ in length, only the last batch may be shorter.
            # `is_over` is true after a shorter batch. The weights of the batches after it are
            # ambiguous.
            is_over = is_over or not (lengths == first or _agree(lengths, first))
            try:
                means = measured(weight, *models, batch)
            except Exception as error:
                is_arrays = isinstance(fresh, tuple) and all(map(is_array, fresh))
                if is_arrays or isinstance(fresh, Mapping):
                    error.add_note(
                        f"make_evaluate uses each entry of `batches`, a {type(fresh).__name__}, as "
                        "a batch. If it is one batch, pass `[batch]`."
                    )
                raise
            totals = _merge(totals, means) if totals else means
        if not totals:
            raise ValueError(
                "make_evaluate expected at least one batch and one metric. An iterator can be used "
                "only once: pass a list, or a function that returns a new iterator."
            )
        return {name: float(total.value) for name, total in totals.items()}

    return evaluate


def _as_means(measure: Measure) -> Callable[..., dict[str, Mean]]:
    def measured(weight: float | None, *arguments: Any) -> dict[str, Mean]:
        names = "model, model_state, batch" if len(arguments) == 3 else "model, batch"
        check_takes(measure, f"measure({names})", "make_evaluate")
        found = measure(*arguments)
        if not isinstance(found, Mapping):
            raise TypeError(
                "make_evaluate expected `measure` to return a mapping from names to metrics; got "
                f"{type(found).__name__}."
            )
        batch = arguments[-1]
        return {name: _as_mean(name, each, weight, batch) for name, each in found.items()}

    # Retrace reports show the name of the user's function.
    vars(measured).update(__signature__=inspect.signature(measured), __wrapped__=measure)
    return measured


def _as_mean(name: str, found: Any, weight: float | None, batch: Any) -> Mean:
    if isinstance(found, Mean):
        return found
    values = jnp.asarray(found)
    if values.ndim:
        return mean(values)
    if weight is None:
        lengths = listed([f"batch{jtu.keystr(at)} {n}" for at, n in _lengths(batch).items()])
        raise ValueError(
            f"make_evaluate got a single number for {name!r}, and the number of examples in the "
            f"batch is ambiguous: the leading lengths are {lengths}, and differ between batches. "
            "Return the values of all examples, or `train.metrics.mean(value, num_examples)`."
        )
    # A batch with fewer examples has a smaller weight.
    return mean(values, jnp.asarray(weight))


def _lengths(batch: Any) -> dict[Any, int]:
    """The leading length of each array in a batch, by path. Scalars are left out."""
    leaves = jtu.tree_leaves_with_path(batch)
    return {path: leaf.shape[0] for path, leaf in leaves if is_array(leaf) and leaf.ndim}


def _weight(lengths: dict[Any, int], first: dict[Any, int]) -> float | None:
    """The weight of a scalar metric of a batch, or `None` if the weight is ambiguous.

    The weight is the number of examples times a factor that is the same for all batches. `first`
    has the lengths of the first batch.
    """
    if _agree(lengths, first):
        return float(*{*lengths.values()})
    scale = float(*{*first.values()}) if _agree(first) else 1.0
    if lengths == first:
        return scale
    if lengths.keys() != first.keys():
        return None
    shorter = [(lengths[path], length) for path, length in first.items() if lengths[path] != length]
    ratios = {length / max(before, 1) for length, before in shorter}
    return scale * ratios.pop() if len(ratios) == 1 and max(ratios) < 1 else None


def _agree(*batches: dict[Any, int]) -> bool:
    """Returns True if each batch has arrays of only one length. Batches may differ in length."""
    return all(len({*lengths.values()}) == 1 for lengths in batches)


@filter_jit
def _merge(totals: dict[str, Mean], means: dict[str, Mean]) -> dict[str, Mean]:
    if totals.keys() != means.keys():
        raise ValueError(
            f"make_evaluate expected `measure` to return the same metrics for each batch, "
            f"{', '.join(totals)}; got {', '.join(means) or 'none'}."
        )
    return {name: total.merge(means[name]) for name, total in totals.items()}
