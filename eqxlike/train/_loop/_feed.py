"""Batches, as many at a time as go into one call."""

import contextlib
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from ... import is_array, tree_pformat
from ..._traceback import stacklevel_of_user
from .._as_arrays import as_arrays, is_foreign
from .._run import Stack

Batch = TypeVar("Batch")


MAX_STATICS = 4
"""`fit` warns after so many values of a static leaf: the step is compiled for each."""


class Feed(Generic[Batch]):
    """Takes batches from an iterable, a few similar ones at a time.

    - `is_raw`: whether batches stay unconverted, for a step that is not compiled.
    """

    def __init__(self, batches: Iterable[Batch], *, is_raw: bool = False) -> None:
        self._source: Any = batches
        self._is_raw = is_raw
        self._statics: dict[str, set[Any]] = {}
        self._iterator = _iterator_of(batches)
        self._mismatched: Stack | None = None
        self._interrupt: KeyboardInterrupt | None = None
        self._has_ended = False

    @property
    def has_mismatched_batch(self) -> bool:
        """Whether a batch was taken that did not go with those before it."""
        return self._mismatched is not None

    def take(self, length: int, max_count: int) -> Stack | None:
        """Up to `max_count` batches that are alike; `None` if there are no more.

        Where Ctrl-C comes in the middle, what was taken before it is returned, and the next call
        raises it.

        **Arguments:**

        - `length`: for how many the stack is to have room.
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
            # Some iterators begin again when they are asked once more.
            self._has_ended = True
        except KeyboardInterrupt as interrupt:
            if taken is None:
                raise
            self._interrupt = interrupt
        return taken

    def _note_static(self, path: str, leaf: Any, is_in_list: bool) -> None:
        """Warns of a leaf for which the step is compiled again and again.

        **Raises:** `TypeError` for a string in a list.
        """
        if is_in_list and isinstance(leaf, str | bytes):
            raise TypeError(
                f"fit expected batches of numbers, but {path} is the string {leaf!r}: remove "
                "strings, or replace each by a number."
            )
        values = self._statics.setdefault(path, set())
        if len(values) < MAX_STATICS:
            values.add(leaf if isinstance(leaf, Hashable) else id(leaf))
            if len(values) == MAX_STATICS:
                warnings.warn(
                    f"{path} is not an array, but {leaf!r} in this batch, and the step is compiled "
                    "for each of its values. Convert a number with `np.asarray(number)`, and "
                    "remove other objects.",
                    stacklevel=stacklevel_of_user(),
                )

    @property
    def position(self) -> Any:
        """Where the stream is, if it can say; `None` if it cannot."""
        return getattr(self._source, "position", None)

    def seek(self, position: Mapping[str, Any] | None, num_taken: int) -> None:
        """Goes to a position; where a stream has none, past as many batches as were taken."""
        # One that is made ahead has `seek` whatever it is made of, and a position if that has one.
        if None not in (position, self.position) and hasattr(self._source, "seek"):
            self._source.seek(position)
            return
        with contextlib.suppress(StopIteration):
            for _ in range(num_taken):
                next(self._iterator)


def _iterator_of(batches: Any) -> Iterator[Any]:
    if _is_one_array(batches) or isinstance(batches, Mapping) or _is_data(batches):
        raise TypeError(
            "fit expected batches, one after another, and got arrays: "
            f"{tree_pformat(batches)}. Make batches of them with `train.minibatches(arrays, "
            "batch_size, seed=0)`; if these are the batches, give a list of them."
        )
    try:
        return iter(batches)
    except TypeError as error:
        hint = ": call it" if callable(batches) else ""
        raise TypeError(
            "fit expected batches that one can go through, such as `train.minibatches(...)` or a "
            f"list; got {batches!r}{hint}."
        ) from error


def _is_one_array(batches: Any) -> bool:
    return is_array(batches) or is_foreign(batches)


def _is_data(batches: Any) -> bool:
    """Whether a tuple or a list holds the arrays of one data set, as inputs and targets.

    They have one leading length. So have most batches, but those are alike in the rest too. In a
    list batches may be of several lengths, and have as many axes.
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
