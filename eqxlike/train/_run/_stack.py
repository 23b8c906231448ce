"""`Stack`: stacks several compatible batches to one batch with a new leading axis."""

import functools
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, PyTree

from ...extend import Structure, flatten, is_same_static


class DeviceArrays(NamedTuple):
    """The JAX arrays of several batches, to be stacked inside the compiled call."""

    arrays: tuple[Array, ...]


class Stack:
    """Collects compatible batches. `whole` returns the collected batches as one batch with a new
    leading axis.

    NumPy arrays are copied when they are added, because a loader may write the next batch into the
    same arrays.

    - `first`: the first batch, unchanged.
    - `count`: number of batches.
    """

    def __init__(self, batch: Any, length: int) -> None:
        self.first, self.count, self._length = batch, 1, length
        if length > 1:
            self._leaves, self._treedef = jtu.tree_flatten(batch)
            self._columns = [_column(leaf, length) for leaf in self._leaves]
            # The structure of the first batch, or `None` if it is enough to compare treedefs.
            self._structure = None if _is_plain(self._treedef) else _structure_of(batch)

    def add(self, batch: Any) -> bool:
        """Adds a batch if it is compatible. Returns True if the batch was added.

        A batch is compatible if the program that is compiled for the first batch accepts it.
        """
        leaves, treedef = jtu.tree_flatten(batch)
        is_alike = (
            treedef == self._treedef
            and all(map(_are_alike, self._leaves, leaves))
            and (self._structure is None or _structure_of(batch) is self._structure)
        )
        if not is_alike:
            return False
        for column, leaf in zip(self._columns, leaves, strict=True):
            if isinstance(column, list):
                column.append(leaf)
            elif column is not None:
                column[self.count] = leaf
        self.count += 1
        return True

    def whole(self) -> PyTree:
        """The stacked batches. Ignore entries beyond `count`."""

        def of_column(column: Any, leaf: Any) -> Any:
            if isinstance(column, list):
                num_missing = self._length - len(column)
                return DeviceArrays((*column, *[column[-1]] * num_missing))
            return leaf if column is None else column

        return self._treedef.unflatten(map(of_column, self._columns, self._leaves))


def _column(leaf: Any, length: int) -> np.ndarray | list[Any] | None:
    """The array or list that collects one leaf of each batch; `None` for a static leaf."""
    # Do not copy masked arrays, because that would lose the mask. JAX raises an error for masked
    # arrays.
    if isinstance(leaf, jax.Array | np.ma.MaskedArray):
        return [leaf]
    if not isinstance(leaf, np.ndarray | np.generic):
        return None
    column = np.empty((length, *leaf.shape), leaf.dtype)
    column[0] = leaf
    return column


def _are_alike(leaf: Any, other: Any) -> bool:
    if type(leaf) is not type(other):
        return False
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.shape == other.shape and leaf.dtype == other.dtype
    if isinstance(leaf, jax.Array):
        return jax.typeof(leaf) == jax.typeof(other)
    return is_same_static(leaf, other)


def _structure_of(batch: Any) -> Structure:
    return flatten(batch, by_identity=True)[1]


@functools.lru_cache(maxsize=64)
def _is_plain(treedef: Any) -> bool:
    """Returns True if a treedef contains only tuples, lists and dicts with string keys.

    Then batches with equal treedefs have the same structure. This check avoids a full comparison of
    structures, which takes twenty times as long as flattening a batch.
    """
    data = treedef.node_data()
    is_plain = (
        data is None
        or data[0] in (tuple, list, type(None))
        or (data[0] is dict and all(type(key) is str for key in data[1]))
    )
    return is_plain and all(map(_is_plain, treedef.children()))
