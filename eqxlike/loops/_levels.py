"""Into how many segments a loop falls for its reverse mode, and these into how many."""

import math


def levels_for(length: int, checkpoints: int | None) -> tuple[int, ...]:
    """The number of segments at each level, whose product is at least `length`.

    **Arguments:**

    - `length`: of the loop, at least 0.
    - `checkpoints`: how many carries may be saved at one time; as many as twice the root of the
      length by default, for which each step runs three times.
    """
    if length <= 1:
        return (max(length, 1),)
    if checkpoints is None:
        root = _divisor_near_root(length)
        return (-(-length // root), root)
    if checkpoints >= length:
        return (length,)
    # With `checkpoints` shared among so many levels, the longest loop has this many steps.
    depth = 2
    while (checkpoints // depth) ** depth < length and checkpoints // (depth + 1) >= 2:
        depth += 1
    each = max(checkpoints // depth, 2)
    depth = max(depth, math.ceil(math.log(length, each) - 1e-9))
    return (each,) * (depth - 1) + (-(-length // each ** (depth - 1)),)


def _divisor_near_root(length: int) -> int:
    """A number near the root that divides `length`, or the root if there is none nearby."""
    root = math.isqrt(length)
    near = range(root, max(root // 2, 1) - 1, -1)
    return next((number for number in near if length % number == 0), root)
