"""Takes the batches for one call of the step from an iterable, and stacks them."""

import contextlib
import functools
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, PyTree

from .. import is_array, tree_pformat
from .._traceback import stacklevel_of_user
from ..extend import Structure, flatten, is_same_static
from ._checks import as_arrays, is_foreign


class _DeviceArrays(NamedTuple):
    """The JAX arrays of several batches, to be stacked inside the compiled call."""

    arrays: tuple[Array, ...]


def stack_device_arrays(batches: PyTree) -> PyTree:
    """Stacks the JAX arrays of the batches that `Stack.whole` returned. Call this under `jit`."""

    def is_stack(node: Any) -> bool:
        return isinstance(node, _DeviceArrays)

    def stack(node: Any) -> Any:
        return jnp.stack(node.arrays) if is_stack(node) else node

    return jtu.tree_map(stack, batches, is_leaf=is_stack)


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
                return _DeviceArrays((*column, *[column[-1]] * num_missing))
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


# --- Taking batches from an iterable ---


MAX_STATICS = 4
"""`fit` warns when a static leaf has had this many values. The step is compiled for each value."""


class BatchIterator:
    """Takes batches from an iterable, several compatible batches at a time.

    - `is_raw`: True if batches are left unconverted, for a step that is not compiled.
    """

    def __init__(self, batches: Iterable[Any], *, is_raw: bool = False) -> None:
        self._source: Any = batches
        self._is_raw = is_raw
        self._statics: dict[str, set[Any]] = {}
        self._iterator = _iterator_of(batches)
        self._mismatched: Stack | None = None
        self._interrupt: KeyboardInterrupt | None = None
        self._has_ended = False

    @property
    def has_mismatched_batch(self) -> bool:
        """True if the last batch did not fit the stack. The next `take` begins with this batch."""
        return self._mismatched is not None

    def take(self, length: int, max_count: int) -> Stack | None:
        """Takes up to `max_count` compatible batches. Returns `None` if there are no more batches.

        After Ctrl-C it returns the batches taken so far, and the next call raises
        `KeyboardInterrupt`.

        **Arguments:**

        - `length`: number of batches for which the stack has room, at least `max_count`.
        """
        if self._interrupt is not None:
            raise self._interrupt
        taken, self._mismatched = self._mismatched, None
        try:
            while not self._has_ended and (taken is None or taken.count < max_count):
                batch = next(self._iterator)
                if not self._is_raw:
                    batch = as_arrays(batch, "fit", self._note_static)
                if taken is None:
                    taken = Stack(batch, length)
                elif not taken.add(batch):
                    self._mismatched = Stack(batch, length)
                    break
        except StopIteration:
            # Do not call `next` again, because some iterators would start from the beginning.
            self._has_ended = True
        except KeyboardInterrupt as interrupt:
            if taken is None:
                raise
            self._interrupt = interrupt
        return taken

    def _note_static(self, path: str, leaf: Any, is_in_list: bool) -> None:
        """Warns if a static leaf takes many values. Raises `TypeError` for a string in a list."""
        if is_in_list and isinstance(leaf, str | bytes):
            raise TypeError(
                f"fit expected batches of numbers, but {path} is the string {leaf!r}: remove "
                "strings, or convert them to numbers."
            )
        values = self._statics.setdefault(path, set())
        if len(values) < MAX_STATICS:
            values.add(leaf if isinstance(leaf, Hashable) else id(leaf))
            if len(values) == MAX_STATICS:
                warnings.warn(
                    f"{path} is {leaf!r} in this batch, not an array, and the step is compiled for "
                    "each of its values. Convert numbers with `np.asarray(number)`, and remove "
                    "other objects.",
                    stacklevel=stacklevel_of_user(),
                )

    @property
    def position(self) -> Any:
        """The `position` of the source; `None` if the source has no position."""
        return getattr(self._source, "position", None)

    def seek(self, position: Mapping[str, Any] | None, num_taken: int) -> None:
        """Goes to a position. If the source has no position, skips `num_taken` batches instead."""
        # Check the position too. A `Prefetch` always has `seek`, but its position is `None` if its
        # source has no position.
        if None not in (position, self.position) and hasattr(self._source, "seek"):
            self._source.seek(position)
            return
        with contextlib.suppress(StopIteration):
            for _ in range(num_taken):
                next(self._iterator)


def _iterator_of(batches: Any) -> Iterator[Any]:
    if _is_one_array(batches) or isinstance(batches, Mapping) or _is_data(batches):
        raise TypeError(
            f"fit expected an iterable of batches, but got arrays: {tree_pformat(batches)}. Make "
            "batches of them with `train.minibatches(arrays, batch_size, seed=0)`, or pass a list "
            "if these are the batches."
        )
    try:
        return iter(batches)
    except TypeError as error:
        hint = ": call it" if callable(batches) else ""
        raise TypeError(
            "fit expected an iterable of batches, such as `train.minibatches(...)` or a list; got "
            f"{batches!r}{hint}."
        ) from error


def _is_one_array(batches: Any) -> bool:
    return is_array(batches) or is_foreign(batches)


def _is_data(batches: Any) -> bool:
    """Returns True if a tuple or list has the arrays of one data set, such as inputs and targets.

    The arrays of one data set have the same length, and usually differ in their other axes. A
    sequence of batches is different: batches usually have equal shapes. The last batch of a list
    may be shorter, but it has as many axes as the other batches.
    """
    if not isinstance(batches, tuple | list) or len(batches) < 2:
        return False
    if not all(map(_is_one_array, batches)):
        return False
    shapes = {np.shape(array) for array in batches}
    has_one_length = () not in shapes and len({shape[0] for shape in shapes}) == 1
    if isinstance(batches, list):
        return has_one_length and len(set(map(len, shapes))) > 1
    is_pair = len(batches) == 2 and batches[0] is not batches[1]
    return has_one_length and (len(shapes) > 1 or is_pair)
