"""Batches, as many at a time as go into one call."""

from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

from ._flat_steps import are_alike

Batch = TypeVar("Batch")


class Feed(Generic[Batch]):
    """Takes batches from an iterable, a few that are alike at a time."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._source: Any = batches
        self._iterator = iter(batches)
        self._odd: list[Batch] = []
        self._interrupt: KeyboardInterrupt | None = None

    @property
    def has_odd(self) -> bool:
        """Whether a batch was taken that did not go with those before it."""
        return bool(self._odd)

    def take(self, most: int) -> list[Batch]:
        """At most so many batches that can be stacked; none where there are no more.

        Where Ctrl-C comes in the middle, what was taken before it is returned, and the next call
        raises it.
        """
        if self._interrupt is not None:
            raise self._interrupt
        taken, self._odd = self._odd, []
        try:
            while len(taken) < most:
                batch = next(self._iterator)
                if taken and not are_alike(taken[0], batch):
                    self._odd = [batch]
                    break
                taken.append(batch)
        except StopIteration:
            pass
        except KeyboardInterrupt as interrupt:
            if not taken:
                raise
            self._interrupt = interrupt
        return taken

    @property
    def position(self) -> Any:
        """Where the stream is, if it can say; `None` if it cannot."""
        return getattr(self._source, "position", None)

    def seek(self, position: Mapping[str, Any] | None, num_taken: int) -> None:
        """Goes to a position; where a stream has none, past as many batches as were taken."""
        if position is not None and hasattr(self._source, "seek"):
            self._source.seek(position)
            return
        for _ in range(num_taken):
            next(self._iterator, None)
