"""Into how many segments a loop falls for its reverse mode, and of how many steps each."""

import math


def levels_for(length: int, checkpoints: int | None) -> tuple[int, ...] | None:
    """The number of segments and of steps in each, whose product is at least `length`.

    **Arguments:**

    - `length`: of the loop, at least 0.
    - `checkpoints`: how many carries may be saved at one time; as many as twice the root of the
      length by default, for which each step runs three times.

    **Returns:** `None` if segments need more carries than that.
    """
    if length <= 1 or (checkpoints is not None and checkpoints >= length):
        return (max(length, 1),)
    root = _divisor_near_root(length)
    levels = (-(-length // root), root)
    return levels if checkpoints is None or sum(levels) <= checkpoints else None


def _divisor_near_root(length: int) -> int:
    """A number near the root that divides `length`, or the root if there is none nearby."""
    root = math.isqrt(length)
    near = range(root, max(root // 2, 1) - 1, -1)
    return next((number for number in near if length % number == 0), root)
