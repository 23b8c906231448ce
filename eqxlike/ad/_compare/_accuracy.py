"""How far a gradient is from the reference."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np


def default_tolerance(*dtypes: Any) -> float:
    """The cube root of the machine epsilon of the least precise dtype: 5e-3 in float32.

    That is a third of the digits. A right gradient loses some where terms cancel, and differences
    in that precision lose about as many. A wrong one has seldom a digit right.
    """
    return math.cbrt(_epsilon(*dtypes))


@dataclasses.dataclass(frozen=True)
class LeafError:
    """How far the derivatives by one array are from the reference.

    - `place`: the place of the array among those differentiated by.
    - `error`: the largest difference, relative to the largest derivative of the reference.
    - `beyond_doubt`: the same of the part of the differences for which the reference is certain.
    - `tolerance`: how large that may be.
    """

    place: int
    error: float
    beyond_doubt: float
    tolerance: float

    @property
    def is_ok(self) -> bool:
        return self.beyond_doubt <= self.tolerance


def leaf_errors(
    gradients: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    doubts: Sequence[np.ndarray | float],
    dtypes: Sequence[tuple[Any, Any]],
    tolerance: float | None,
) -> list[LeafError]:
    """The errors of a gradient, an item for each array.

    An array whose derivatives are all tiny beside those by other arrays may have nothing but what
    rounding leaves of terms that cancel. So its error is relative to at least the largest of all,
    times the root of the machine epsilon.

    **Arguments:**

    - `gradients`, `expected`: of the mode and of the reference, in double precision.
    - `doubts`: how far each derivative of the reference is uncertain.
    - `dtypes`: of the array and of the value.
    - `tolerance`: the largest error that is right; `None` for that of the dtypes.
    """
    largest = max(map(largest_of, expected))
    found = []
    for place, (own, right, doubt) in enumerate(zip(gradients, expected, doubts, strict=True)):
        floor = math.sqrt(_epsilon(*dtypes[place])) * largest
        # Where all is zero, the error is the difference itself.
        scale = max(largest_of(right), floor) or 1.0
        difference = np.abs(own - right)
        difference = np.where(difference <= _lost(*dtypes[place]), 0.0, difference)
        found.append(
            LeafError(
                place=place,
                error=largest_of(difference) / scale,
                beyond_doubt=largest_of(np.maximum(difference - doubt, 0)) / scale,
                tolerance=tolerance or default_tolerance(*dtypes[place]),
            )
        )
    return found


def largest_of(array: np.ndarray) -> float:
    """The largest absolute value; zero if there is none."""
    return float(np.max(np.abs(array), initial=0.0))


def _lost(*dtypes: Any) -> float:
    """What underflows in the least precise dtype: it is rounded to zero, and nothing is wrong."""
    # XLA keeps no subnormal numbers of float32, and those of float16 it does.
    flushed = float(jnp.finfo(jnp.float32).tiny)
    finfos = map(jnp.finfo, dtypes)
    return max(min(float(x.tiny), max(float(x.smallest_subnormal), flushed)) for x in finfos)


def _epsilon(*dtypes: Any) -> float:
    return max(float(jnp.finfo(dtype).eps) for dtype in dtypes)
