"""Shuffled minibatches of data in memory."""

from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import PyTree

from .._numbers import whole_number

Arrays = TypeVar("Arrays")


def _named_arrays(arrays: PyTree) -> list[tuple[str, np.ndarray]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(arrays)
    return [(jax.tree_util.keystr(path) or "arrays", np.asarray(leaf)) for path, leaf in leaves]


def _check_lengths(named: list[tuple[str, np.ndarray]]) -> int:
    if not named:
        raise ValueError("minibatches expects at least one array, got none.")
    for name, array in named:
        if array.ndim == 0:
            raise ValueError(
                f"minibatches expects arrays with a leading axis of examples; {name} has shape ()."
            )
    if len({len(array) for _, array in named}) != 1:
        listed = ", ".join(f"{name} {len(array)}" for name, array in named)
        raise ValueError(f"minibatches expects arrays of one length, got {listed}.")
    return len(named[0][1])


def _check_finite(named: list[tuple[str, np.ndarray]]) -> None:
    for name, array in named:
        if np.issubdtype(array.dtype, np.inexact):
            is_bad = ~np.isfinite(array)
            if is_bad.any():
                first = tuple(int(index) for index in np.argwhere(is_bad)[0])
                raise ValueError(
                    f"The data holds {int(is_bad.sum())} NaN or infinite values in {name}, the "
                    f"first at index {first}. Clean it, or pass `check_finite=False` to train on "
                    "it as it is."
                )


def minibatches(
    arrays: Arrays,
    batch_size: int,
    *,
    seed: int,
    check_finite: bool = True,
) -> Iterator[Arrays]:
    """Shuffled minibatches without end.

    Every epoch is a fresh permutation of the examples. All batches have the same shape, so that a
    step is traced once: the last N mod B examples of a permutation are left out of that epoch.

    **Arguments:**

    - `arrays`: a pytree of arrays with one leading length N.
    - `batch_size`: B.
    - `seed`: the same seed gives the same batches.
    - `check_finite`: refuse data with NaN or infinite values.

    **Returns:** an iterator of pytrees like `arrays` with leading length B.

    **Raises:** `ValueError`, at once and not at the first batch, if lengths differ, if `batch_size`
    is not an integer in 1 to N, or if the data is not finite.

    >>> x, y = np.arange(10.0).reshape(5, 2), np.arange(5)
    >>> batch_x, batch_y = next(minibatches((x, y), 3, seed=0))
    >>> batch_x.shape, batch_y.shape, bool((batch_x[:, 0] == 2 * batch_y).all())
    ((3, 2), (3,), True)
    """
    named = _named_arrays(arrays)
    length = _check_lengths(named)
    if not length:
        raise ValueError("minibatches expects arrays with examples, and these have a length of 0.")
    batch_size = whole_number(batch_size, "batch_size")
    if batch_size > length:
        raise ValueError(
            f"batch_size must be at most {length}, the number of examples, got {batch_size}."
        )
    if check_finite:
        _check_finite(named)
    treedef = jax.tree_util.tree_structure(arrays)
    return _endless([array for _, array in named], treedef, batch_size, np.random.default_rng(seed))


def _endless(
    leaves: list[np.ndarray], treedef: Any, batch_size: int, generator: np.random.Generator
) -> Iterator[Any]:
    length = len(leaves[0])
    while True:
        order = generator.permutation(length)
        for start in range(0, length - batch_size + 1, batch_size):
            chosen = order[start : start + batch_size]
            yield jax.tree_util.tree_unflatten(treedef, [leaf[chosen] for leaf in leaves])
