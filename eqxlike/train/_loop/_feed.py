"""Batches, as many at a time as go into one call."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from .._run import Stack

Batch = TypeVar("Batch")


class Feed(Generic[Batch]):
    """Takes batches from an iterable, a few that are alike at a time."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._source: Any = batches
        self._iterator = _iterator_of(batches)
        self._odd: Stack | None = None
        self._interrupt: KeyboardInterrupt | None = None
        self._has_ended = False

    @property
    def has_odd(self) -> bool:
        """Whether a batch was taken that did not go with those before it."""
        return self._odd is not None

    def take(self, length: int, most: int) -> Stack | None:
        """At most so many batches that are alike; `None` where there are no more.

        Where Ctrl-C comes in the middle, what was taken before it is returned, and the next call
        raises it.

        **Arguments:**

        - `length`: for how many the stack is to have room.
        """
        if self._interrupt is not None:
            raise self._interrupt
        taken, self._odd = self._odd, None
        try:
            while not self._has_ended and (taken is None or taken.count < most):
                batch = next(self._iterator)
                if taken is None:
                    taken = Stack(batch, length)
                elif not taken.add(batch):
                    self._odd = Stack(batch, length)
                    break
        except StopIteration:
            # Some iterators begin anew when they are asked once more.
            self._has_ended = True
        except KeyboardInterrupt as interrupt:
            if taken is None:
                raise
            self._interrupt = interrupt
        return taken

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
        for _ in range(num_taken):
            next(self._iterator, None)


def _iterator_of(batches: Any) -> Iterator[Any]:
    try:
        return iter(batches)
    except TypeError as error:
        hint = ": call it" if callable(batches) else ""
        raise TypeError(
            "fit expected batches that one can go through, such as `train.minibatches(...)` or a "
            f"list; got {batches!r}{hint}."
        ) from error
