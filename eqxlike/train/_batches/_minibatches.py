"""Shuffled minibatches of data in memory."""

import copy
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..._numbers import whole_number

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
        # NumPy does not count bfloat16 and its like among the inexact ones.
        if jnp.issubdtype(array.dtype, jnp.inexact):
            is_bad = ~np.isfinite(array)
            if is_bad.any():
                first = tuple(int(index) for index in np.argwhere(is_bad)[0])
                raise ValueError(
                    f"The data holds {int(is_bad.sum())} NaN or infinite values in {name}, the "
                    f"first at index {first}. Clean it, or pass `check_finite=False` to train on "
                    "it as it is."
                )


class Minibatches(Generic[Arrays]):
    """Shuffled minibatches without end, an iterator that can be placed; `minibatches` makes it.

    Several threads need a lock of their own around `next`.
    """

    def __init__(self, leaves: list[np.ndarray], treedef: Any, batch_size: int, seed: int) -> None:
        self._leaves, self._treedef = leaves, treedef
        self._batch_size, self._seed = batch_size, seed
        self._generator = np.random.default_rng(seed)
        self._begin_epoch(0)

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch, self._index = epoch, 0
        # What the permutation is drawn with: an epoch begins anew from it.
        self._generator_then = copy.deepcopy(self._generator.bit_generator.state)
        self._order = self._generator.permutation(len(self._leaves[0]))

    @property
    def position(self) -> dict[str, Any]:
        """Where the next batch begins, as numbers and texts that JSON can hold.

        - `epoch`, `index`: how many epochs were finished, and how many batches of this one.
        - `seed`, `batch_size`, `num_examples`: of the stream, by which `seek` knows its own.
        - `generator`: the state of NumPy's generator where this epoch began.
        """
        return {
            "seed": self._seed,
            "batch_size": self._batch_size,
            "num_examples": len(self._leaves[0]),
            "epoch": self._epoch,
            "index": self._index,
            "generator": copy.deepcopy(self._generator_then),
        }

    def seek(self, position: Mapping[str, Any]) -> None:
        """Goes to a `position`: the batches from there on are those that came then.

        **Raises:** `ValueError` for a position of a stream with another seed, batch size or number
        of examples, or for what is no position.
        """
        own = self.position
        if not isinstance(position, Mapping) or position.keys() != own.keys():
            raise ValueError(
                f"seek expected a position of minibatches, with {', '.join(own)}; got {position!r}."
            )
        for name in ("seed", "batch_size", "num_examples"):
            if position[name] != own[name]:
                raise ValueError(
                    f"The position is one of minibatches with {name} {position[name]!r}, and these "
                    f"have {own[name]!r}: they would go on with other batches."
                )
        per_epoch = len(self._leaves[0]) // self._batch_size
        epoch = whole_number(position["epoch"], "epoch", least=0)
        index = whole_number(position["index"], "index", least=0)
        if index > per_epoch:
            raise ValueError(
                f"index must be at most {per_epoch}, the batches of an epoch: {index}."
            )
        before = self._generator.bit_generator.state
        try:
            self._generator.bit_generator.state = copy.deepcopy(position["generator"])
        except (TypeError, ValueError, KeyError) as error:
            self._generator.bit_generator.state = before
            raise ValueError("The position has no state of NumPy's generator.") from error
        self._begin_epoch(epoch)
        self._index = index

    def __iter__(self) -> "Minibatches[Arrays]":
        return self

    def __next__(self) -> Arrays:
        start = self._index * self._batch_size
        if start + self._batch_size > len(self._leaves[0]):
            self._begin_epoch(self._epoch + 1)
            start = 0
        chosen = self._order[start : start + self._batch_size]
        batch = self._treedef.unflatten([leaf[chosen] for leaf in self._leaves])
        self._index += 1
        return batch


def minibatches(
    arrays: Arrays,
    batch_size: int,
    *,
    seed: int,
    check_finite: bool = True,
) -> Minibatches[Arrays]:
    """Shuffled minibatches without end.

    Every epoch is a fresh permutation of the examples. All batches have the same shape, so that a
    step is traced once: the last N mod B examples of a permutation are left out of that epoch.

    **Arguments:**

    - `arrays`: a pytree of arrays with one leading length N.
    - `batch_size`: B.
    - `seed`: the same seed gives the same batches.
    - `check_finite`: refuse data with NaN or infinite values.

    **Returns:** an iterator of pytrees like `arrays` with leading length B. Its `position` says
    where it is, and `seek(position)` goes there.

    **Raises:** `ValueError`, at once and not at the first batch, if lengths differ, if `batch_size`
    is not an integer in 1 to N or `seed` none of at least 0, or if the data is not finite.

    >>> x, y = np.arange(10.0).reshape(5, 2), np.arange(5)
    >>> batches = minibatches((x, y), 3, seed=0)
    >>> batch_x, batch_y = next(batches)
    >>> batch_x.shape, batch_y.shape, bool((batch_x[:, 0] == 2 * batch_y).all())
    ((3, 2), (3,), True)

    >>> position = batches.position
    >>> _, second = next(batches)
    >>> batches.seek(position)
    >>> bool((next(batches)[1] == second).all())
    True
    """
    named = _named_arrays(arrays)
    length = _check_lengths(named)
    if not length:
        raise ValueError("minibatches expects arrays with examples, and these have a length of 0.")
    batch_size = whole_number(batch_size, "batch_size")
    seed = whole_number(seed, "seed", least=0)
    if batch_size > length:
        raise ValueError(
            f"batch_size must be at most {length}, the number of examples, got {batch_size}."
        )
    if check_finite:
        _check_finite(named)
    treedef = jax.tree_util.tree_structure(arrays)
    return Minibatches([array for _, array in named], treedef, batch_size, seed)
