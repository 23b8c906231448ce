"""A function to differentiate, with a point and data."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eqxlike


@dataclasses.dataclass(frozen=True)
class Problem:
    """A log density or a loss.

    It computes in the precision of its arguments: in float64 if all their arrays are.

    - `name`: the name of its rows.
    - `function`: `function(unknowns, data)` returns a real scalar.
    - `start`: makes the unknowns to start from, a Module, and the data, a tuple of arrays. NumPy
      draws all numbers from fixed seeds, the same at each call.
    - `constraints`: for each field of the unknowns that is not free, the name of its constraint in
      `numpyro.distributions.constraints`.
    - `is_linked`: whether `function` takes unconstrained unknowns instead.
    """

    name: str
    function: Callable[[Any, Any], jax.Array]
    start: Callable[[], tuple[Any, Any]]
    constraints: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_linked: bool = False

    @property
    def space(self) -> str:
        """The space of the unknowns: "standard", as in the model, or "linked"."""
        return "linked" if self.is_linked else "standard"


def single(array: Any) -> jax.Array:
    """An array in single precision, the precision that the problems start in."""
    return jnp.asarray(np.asarray(array, np.float32))


def in_double(tree: Any) -> Any:
    """A pytree with its real numbers in double precision, which `jax.enable_x64` must allow."""
    return jax.tree_util.tree_map(
        lambda leaf: leaf.astype(jnp.float64) if eqxlike.is_inexact_array(leaf) else leaf, tree
    )


def by_path(unknowns: Any) -> dict[str, jax.Array]:
    """The arguments of a problem's derivative: the arrays of real numbers in a pytree, in its
    order, by their paths ("hidden.weight").
    """
    arrays = eqxlike.filter(unknowns, eqxlike.is_inexact_array)
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def floats(unknowns: Any) -> list[jax.Array]:
    """The same arrays as a list."""
    return list(by_path(unknowns).values())


def count(unknowns: Any) -> int:
    """The number of unknowns."""
    return sum(leaf.size for leaf in floats(unknowns))
