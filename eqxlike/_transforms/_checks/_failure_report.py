"""What a failed check says."""

import dataclasses
from collections.abc import Sequence

import numpy as np

_MOST_INDICES = 8
"""Of a batch, named one by one."""


@dataclasses.dataclass(frozen=True, eq=False)
class FailureReport:
    """The text of an error, from what is known once the check fails.

    **Arguments:**

    - `messages`: of which one is the user's for this failure.
    - `place`: where the check stands.
    """

    messages: Sequence[str]
    place: str

    def only(self, index: int) -> "FailureReport":
        """The report that needs no index, since it is known."""
        return FailureReport([self._message(index)], self.place)

    def text(self, failed: np.ndarray, index: np.ndarray | None) -> str:
        """The message, where the check stands, and for which members of a batch it failed.

        **Arguments:**

        - `failed`: where the predicate is true; one axis for each `jax.vmap`.
        - `index`: which message, for each of these; `None` for the first.
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
    """The indices at which a check failed, the first of them if there are many."""
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
