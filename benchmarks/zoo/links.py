"""The problems of the zoo in unconstrained space, with NumPyro's bijections.

Samplers work in this space. A constrained unknown (positive, ordered, ...) is the image of an
unconstrained unknown, and the density is multiplied by the determinant of the Jacobian.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.zoo.problem import Problem


def linked(problem: Problem) -> Problem:
    """The same density as a function of unconstrained unknowns.

    **Raises:** `ImportError` if NumPyro is not installed. `ValueError` for a problem without
    constraints.
    """
    if not problem.constraints:
        raise ValueError(f"{problem.name} has no constraints: its unknowns are free as they are")
    links = _links(problem.constraints)

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


def _links(constraints: Mapping[str, str]) -> dict[str, Any]:
    """The bijection for each constrained unknown."""
    from numpyro import distributions as dist

    return {
        name: dist.biject_to(getattr(dist.constraints, constraint))
        for name, constraint in constraints.items()
    }
