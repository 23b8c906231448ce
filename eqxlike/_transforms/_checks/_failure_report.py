"""The text of a failed check."""

import dataclasses
from collections.abc import Sequence

import numpy as np

_MOST_INDICES = 8
"""At most this many indices of a batch are listed."""


@dataclasses.dataclass(frozen=True, eq=False)
class FailureReport:
    """The text of an error, from what is known once the check fails.

    **Arguments:**

    - `messages`: the user's messages, one of which is for this failure.
    - `place`: the place of the check in the user's code.
    """

    messages: Sequence[str]
    place: str

    def only(self, index: int) -> "FailureReport":
        """The report for an index that is known already."""
        return FailureReport([self._message(index)], self.place)

    def text(self, failed: np.ndarray, index: np.ndarray | None) -> str:
        """The message, the place of the check, and the members of a batch for which it failed.

        **Arguments:**

        - `failed`: where the predicate is true; one axis for each `jax.vmap`.
        - `index`: the index of the message for each of these; `None` for the first message.
        """
        chosen = 0
        if index is not None:
            chosen = int(index[failed].max())
            failed = failed & (index == chosen)
        return f"{self._message(chosen)}\n(check at {self.place}{_describe_batch(failed)})"

    def _message(self, chosen: int) -> str:
        if -len(self.messages) <= chosen < len(self.messages):
            return self.messages[chosen]
        return (
            f"A check failed with the message of index {chosen}, where there are only "
            f"{len(self.messages)} messages."
        )


def _describe_batch(failed: np.ndarray) -> str:
    """The indices at which a check failed, or only the first of them if there are many."""
    if failed.ndim == 0:
        return ""
    places = np.flatnonzero(failed)
    first = places[:_MOST_INDICES]
    indices = zip(*(axis.tolist() for axis in np.unravel_index(first, failed.shape)), strict=True)
    names = [str(index[0] if len(index) == 1 else index) for index in indices]
    if len(places) > len(first):
        names.append(f"{len(places) - len(first)} more")
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f", failed for batch {'index' if len(names) == 1 else 'indices'} {listed}"
