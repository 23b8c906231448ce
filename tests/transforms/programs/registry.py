"""Short programs that are run on Equinox and on eqxlike, and what each comes to as plain values."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

Program = Callable[[Any], Any]

PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    """Adds to the registry a function that takes the library and returns no Module of it."""
    assert function.__name__ not in PROGRAMS, f"two programs are named {function.__name__}"
    PROGRAMS[function.__name__] = function
    return function


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The name of the class of what the call raises."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__
    raise AssertionError("the call raised nothing")


def plain(output: Any) -> Any:
    """A pytree with every leaf as a pair of what it is and what it holds."""
    return jtu.tree_map(_describe, output)


def _describe(leaf: Any) -> tuple[str, Any]:
    if not isinstance(leaf, jax.Array):
        return type(leaf).__name__, leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return f"{leaf.dtype}{leaf.shape}", np.asarray(jax.random.key_data(leaf)).tolist()
    weak = "weak " if leaf.weak_type else ""
    return f"{weak}{leaf.dtype}{leaf.shape}", np.asarray(leaf).tolist()
