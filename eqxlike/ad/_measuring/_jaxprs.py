"""What the jaxpr of a function tells without running it."""

import math

import jax.numpy as jnp
from jax.extend.core import Jaxpr, jaxprs_in_params

from .._equations import equations_in


def num_equations(jaxpr: Jaxpr) -> int:
    """The number of equations of a jaxpr, with those of the jaxprs inside them."""
    return sum(1 for _ in equations_in(jaxpr))


def work(jaxpr: Jaxpr) -> int:
    """How many numbers a program computes, about: the turns of each `scan` are counted.

    Two programs that are made of the same operations can be compared by it. The steps of a
    `while_loop`, which nobody knows, count as one.
    """
    total = 0
    for equation in jaxpr.eqns:
        inner = sum(work(each) for each in jaxprs_in_params(equation.params))
        own = sum(math.prod(getattr(each.aval, "shape", ())) for each in equation.outvars)
        total += inner * equation.params["length"] if equation.primitive.name == "scan" else inner
        total += own
    return total


def has_loop(jaxpr: Jaxpr) -> bool:
    """Whether there is a `scan` or a `while_loop` in a program."""
    return any(each.primitive.name in ("scan", "while") for each in equations_in(jaxpr))


def largest_epsilon(jaxpr: Jaxpr) -> float:
    """The machine epsilon of the least precise floating-point dtype that a program computes in."""
    dtypes = {
        getattr(each.aval, "dtype", None) for found in equations_in(jaxpr) for each in found.outvars
    }
    inexact = [each for each in dtypes if each is not None and jnp.issubdtype(each, jnp.inexact)]
    return max((float(jnp.finfo(each).eps) for each in inexact), default=0.0)
