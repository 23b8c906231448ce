"""What the jaxpr of a function tells without running it."""

import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr


def num_equations(jaxpr: Jaxpr) -> int:
    """The number of equations of a jaxpr, with those of the jaxprs inside them."""
    return sum(1 for _ in _equations(jaxpr))


def work(jaxpr: Jaxpr) -> int:
    """How many numbers a program computes, about: the turns of each `scan` are counted.

    Two programs that are made of the same operations can be compared by it. The steps of a
    `while_loop`, which nobody knows, count as one.
    """
    total = 0
    for equation in jaxpr.eqns:
        inner = sum(work(each) for each in _inner_jaxprs(list(equation.params.values())))
        own = sum(math.prod(getattr(each.aval, "shape", ())) for each in equation.outvars)
        total += inner * equation.params["length"] if equation.primitive.name == "scan" else inner
        total += own
    return total


def has_loop(jaxpr: Jaxpr) -> bool:
    """Whether there is a `scan` or a `while_loop` in a program."""
    return any(each.primitive.name in ("scan", "while") for each in _equations(jaxpr))


def largest_epsilon(jaxpr: Jaxpr) -> float:
    """The machine epsilon of the least precise floating-point dtype that a program computes in."""
    dtypes = {
        getattr(each.aval, "dtype", None) for found in _equations(jaxpr) for each in found.outvars
    }
    inexact = [each for each in dtypes if each is not None and jnp.issubdtype(each, jnp.inexact)]
    return max((float(jnp.finfo(each).eps) for each in inexact), default=0.0)


def _equations(jaxpr: Jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in _inner_jaxprs(list(equation.params.values())):
            yield from _equations(inner)


def _inner_jaxprs(value: Any) -> Iterator[Jaxpr]:
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _inner_jaxprs(each)
