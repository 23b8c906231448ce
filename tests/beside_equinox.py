"""Helpers for tests that run on Equinox and on eqxlike: a parametrisation of the argument `eqx`,
and short programs whose outputs are compared.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqxlike

LIBRARIES = {"equinox": equinox, "eqxlike": eqxlike}

both = pytest.mark.parametrize("eqx", LIBRARIES.values(), ids=LIBRARIES)

Program = Callable[[Any], Any]


class Programs(dict[str, Program]):
    """Programs by name. A program is a function of the library that returns plain values.

    `differences` maps the name of a program to the reason why the two libraries differ.
    """

    def __init__(self) -> None:
        self.differences: dict[str, str] = {}

    def add(self, function: Any = None, *, differs: str = "") -> Any:
        """Adds a program under its own name. Used as a decorator, with or without `differs=`."""
        if function is None:
            return lambda function: self.add(function, differs=differs)
        name = function.__name__
        assert name not in self, f"two programs are named {name}"
        self[name] = function
        if differs:
            self.differences[name] = differs
        return function


class Output(NamedTuple):
    """The value that a program returned or the type of its error, and the types of warnings."""

    returned: Any
    raised: type[BaseException] | None
    warned: frozenset[type[Warning]]


def output(program: Program, library: Any) -> Output:
    """Runs a program on a library."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            returned, raised = program(library), None
        except NameError:
            # A mistake in the program, which would raise the same error on both libraries.
            raise
        except Exception as error:
            returned, raised = None, type(error)
    return Output(returned, raised, frozenset(each.category for each in caught))


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The name of the class of the error that the call raises."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__
    raise AssertionError("the call raised nothing")


def plain(tree: Any) -> Any:
    """Replaces each leaf of a pytree by a pair of its type and its value."""
    return jtu.tree_map(_describe, tree)


def _describe(leaf: Any) -> tuple[str, Any]:
    if isinstance(leaf, np.ndarray | np.generic):
        return f"numpy {leaf.dtype}{leaf.shape}", leaf.tolist()
    if not isinstance(leaf, jax.Array):
        return type(leaf).__name__, leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return f"{leaf.dtype}{leaf.shape}", np.asarray(jax.random.key_data(leaf)).tolist()
    weak = "weak " if leaf.weak_type else ""
    return f"{weak}{leaf.dtype}{leaf.shape}", np.asarray(leaf).tolist()
