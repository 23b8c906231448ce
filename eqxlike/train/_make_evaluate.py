"""Metrics of a model over batches, added up on the device."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
from jax.typing import ArrayLike

from .. import filter_jit, is_array
from ..extend import listed
from ._as_arrays import as_arrays, is_foreign
from ._batches import Minibatches
from ._checks import check_callable, check_takes
from ._sharding import Sharding, check_sharding, measure_sharded
from ._state import TrainState, check_state
from .metrics import Mean, mean

Batches = Iterable[Any] | Callable[[], Iterable[Any]]
Measure = Callable[..., Mapping[str, Mean | ArrayLike]]


def make_evaluate(
    measure: Measure, batches: Batches, *, sharding: Sharding | None = None
) -> Callable[[TrainState], dict[str, float]]:
    """What `fit` takes as `evaluate`: metrics of the model over batches.

    **Arguments:**

    - `measure`: `measure(model, batch)` which gives metrics by name, each a `metrics.Mean`, such as
      `metrics.accuracy(...)`, or an array of values to average. A single number is weighted by the
      number of examples in its batch: the common leading length of the arrays. If the arrays differ
      in length, the arrays that are shorter in the last batch hold the examples. In ambiguous
      cases return the values of all examples or `metrics.mean(value, num_examples)`. For a mean
      with weights, return `metrics.mean(values, weights)`. For a `TrainState`
      with a `model_state` it is `measure(model, model_state, batch)`. It is compiled. It gets the
      model as it is trained: where that is another one than at test time, as with dropout, let it
      begin with `model = nn.inference_mode(model)`.
    - `batches`: a list of batches, or another iterable that starts again each time; or a function
      that returns an iterator. Batches may differ in length: all examples have equal weight.
      Tensors of other libraries and lists of numbers become arrays, as in `fit`.
    - `sharding`: that of the states, placed by `train.shard`. Batches are split over its devices so
      far as they divide.

    **Returns:** `evaluate(state)`, which gives the metrics over all batches as floats. Sums stay
    on the device until the last batch. It raises `ValueError` if there are no batches, if the
    metrics of a batch differ from those of the first, or if a metric is a single number and the
    number of examples is ambiguous; `TypeError` if `measure` does not return a mapping, or `state`
    is not a `TrainState`.

    **Raises:** `TypeError` if `measure` is not a function, `sharding` not a `train.Sharding`, and
    for batches that never end, as those of `minibatches`, or arrays in their place.

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
    if sharding is not None:
        check_sharding(sharding, "make_evaluate")
    if isinstance(batches, Minibatches) or is_array(batches) or is_foreign(batches):
        problem = "never end" if isinstance(batches, Minibatches) else "are one array"
        raise TypeError(
            f"make_evaluate expected batches, each of which counts once, and got some that "
            f"{problem}: give a list, such as `[arrays]` for one batch of everything."
        )
    if sharding is not None:
        measure = measure_sharded(measure, sharding)
    measured = filter_jit(_as_means(measure))

    def evaluate(state: TrainState) -> dict[str, float]:
        check_state(state, "evaluate")
        fresh = batches() if callable(batches) else batches
        # The optimiser's state is not an argument: it would only be carried along.
        models = (state.model,) if state.model_state is None else (state.model, state.model_state)
        totals: dict[str, Mean] = {}
        first, is_over = None, False
        for batch in fresh:
            batch = as_arrays(batch, "make_evaluate")
            lengths = _lengths(batch)
            first = lengths if first is None else first
            weight = None if is_over else _weight(lengths, first)
            # If lengths differ within a batch, only the last batch may be shorter.
            is_over = is_over or not (lengths == first or _agree(lengths, first))
            try:
                means = measured(weight, *models, batch)
            except Exception as error:
                is_tuple = isinstance(fresh, tuple) and all(map(is_array, fresh))
                if is_tuple or isinstance(fresh, Mapping):
                    what = "tuple of arrays" if is_tuple else "mapping"
                    error.add_note(
                        f"make_evaluate got a {what} as `batches`, and takes each entry for a "
                        "batch. If it is one batch, pass `[batch]`."
                    )
                raise
            totals = _merge(totals, means) if totals else means
        if not totals:
            raise ValueError(
                "make_evaluate expected at least one batch, and one metric. An iterator has no "
                "batches once it was gone through: give a list, or a function that returns a fresh "
                "iterator."
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
                "make_evaluate expected `measure` to give a mapping from names to metrics; got "
                f"{type(found).__name__}."
            )
        batch = arguments[-1]
        return {name: _as_mean(name, each, weight, batch) for name, each in found.items()}

    # Reports of its traces name the measure, by which a reader knows it.
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
            f"make_evaluate got a single number as {name!r}, and the number of examples in the "
            f"batch is ambiguous: the leading lengths are {lengths}, and differ from batch to "
            "batch. Return the values of all examples, or "
            "`train.metrics.mean(value, num_examples)`."
        )
    # The mean over a short batch counts less.
    return mean(values, jnp.asarray(weight))


def _lengths(batch: Any) -> dict[Any, int]:
    """The leading length of each array that has an axis, by its path."""
    leaves = jtu.tree_leaves_with_path(batch)
    return {path: leaf.shape[0] for path, leaf in leaves if is_array(leaf) and leaf.ndim}


def _weight(lengths: dict[Any, int], first: dict[Any, int]) -> float | None:
    """The weight of a number for a batch, up to a factor that all batches share; `None` if it is
    ambiguous.

    **Arguments:**

    - `first`: the lengths of the first batch.
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
    """Whether the arrays of each batch have equal lengths."""
    return all(len({*lengths.values()}) == 1 for lengths in batches)


@filter_jit
def _merge(totals: dict[str, Mean], means: dict[str, Mean]) -> dict[str, Mean]:
    if totals.keys() != means.keys():
        raise ValueError(
            f"make_evaluate expected the same metrics of each batch: {', '.join(totals)}; got "
            f"{', '.join(means) or 'none'}."
        )
    return {name: total.merge(means[name]) for name, total in totals.items()}
