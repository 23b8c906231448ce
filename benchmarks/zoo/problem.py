"""A function to differentiate, with a point and data; in its own and in unconstrained space."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eqxlike


@dataclasses.dataclass(frozen=True)
class Problem:
    """A log density or a loss.

    It computes in the precision of its arguments: in float64 if all arrays are float64.

    - `name`: the name of the rows of this problem.
    - `function`: `function(unknowns, data)` returns a real scalar.
    - `start`: makes the initial unknowns, a Module, and the data, a tuple of arrays. NumPy draws
      all numbers from fixed seeds, so that each call gives the same numbers.
    - `constraints`: maps each constrained field of the unknowns to the name of its constraint in
      `numpyro.distributions.constraints`.
    - `is_linked`: whether `function` is called with unconstrained unknowns.
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
    """An array in single precision, the precision of the initial unknowns."""
    return jnp.asarray(np.asarray(array, np.float32))


def in_double(tree: Any) -> Any:
    """Casts the real numbers of a pytree to double precision. Needs `jax.enable_x64`."""
    return jax.tree_util.tree_map(
        lambda leaf: leaf.astype(jnp.float64) if eqxlike.is_inexact_array(leaf) else leaf, tree
    )


def by_path(unknowns: Any) -> dict[str, jax.Array]:
    """The arrays of real numbers in a pytree, in tree order, by path ("hidden.weight"). A problem
    is differentiated with respect to these arrays.
    """
    arrays = eqxlike.filter(unknowns, eqxlike.is_inexact_array)
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def floats(unknowns: Any) -> list[jax.Array]:
    """The arrays of real numbers in a pytree, as a list."""
    return list(by_path(unknowns).values())


def count(unknowns: Any) -> int:
    """The number of unknowns."""
    return sum(leaf.size for leaf in floats(unknowns))


# --- unconstrained space ---


def in_all_spaces(problem: Problem) -> Iterator[Problem]:
    """A problem, and its linked form if its unknowns have constraints."""
    yield problem
    if problem.constraints:
        yield linked(problem)


def linked(problem: Problem) -> Problem:
    """The same density as a function of free unknowns, by NumPyro's bijections.

    Samplers work in this space. A constrained unknown (positive, ordered, ...) is the image of an
    unconstrained unknown, and the density is multiplied by the determinant of the Jacobian.

    **Raises:** `ImportError` if NumPyro is not installed. `ValueError` for a problem without
    constraints.
    """
    if not problem.constraints:
        raise ValueError(f"{problem.name} has no constraints: its unknowns are free as they are")
    from numpyro import distributions as dist

    links = {
        name: dist.biject_to(getattr(dist.constraints, constraint))
        for name, constraint in problem.constraints.items()
    }

    def function(free: Any, data: Any) -> jax.Array:
        unknowns, log_det = constrain(links, free)
        return problem.function(unknowns, data) + log_det

    def start() -> tuple[Any, Any]:
        unknowns, data = problem.start()
        return free_of(unknowns), data

    @jax.jit  # one program instead of one for each operation of a bijection
    def free_of(unknowns: Any) -> Any:
        free = {name: link.inv(getattr(unknowns, name)) for name, link in links.items()}
        return dataclasses.replace(unknowns, **free)

    return dataclasses.replace(problem, function=function, start=start, is_linked=True)


def constrain(links: Mapping[str, Any], free: Any) -> tuple[Any, Any]:
    """The constrained unknowns, and the log determinant of the Jacobian."""
    images, log_det = {}, 0.0  # a Python number, so that the sum has the dtype of the unknowns
    for name, link in links.items():
        x = getattr(free, name)
        images[name] = link(x)
        log_det += jnp.sum(link.log_abs_det_jacobian(x, images[name]))
    return dataclasses.replace(free, **images), log_det
