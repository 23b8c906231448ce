"""The operations of a traced program."""

from collections.abc import Iterator

from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params


def equations_in(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The equations of a jaxpr, each before those of the jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations_in(inner)
