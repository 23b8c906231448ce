"""Where each array of unknowns stands in their vector."""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._inference import Problem


class Part(NamedTuple):
    """One array of unknowns: its numbers stand together in the vector, from `start`.

    - `layer`: the path of what holds it.
    """

    kind: Literal["model", "likelihood", "prior"]
    path: str
    layer: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.size


def parts_of(problem: Problem) -> tuple[Part, ...]:
    """The arrays of a problem in the order of the vector: first those of the model."""
    vector = jax.ShapeDtypeStruct((problem.size,), jnp.dtype(problem.dtype))
    linked = jax.eval_shape(problem.unflatten, vector)
    parts, start = [], 0
    for kind in ("model", "likelihood", "prior"):
        for path, leaf in jtu.tree_leaves_with_path(getattr(linked, kind)):
            name, layer = (jtu.keystr(each).removeprefix(".") for each in (path, path[:-1]))
            parts.append(Part(kind, name, layer, leaf.shape, start))
            start = parts[-1].stop
    return tuple(parts)
