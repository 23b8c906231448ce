"""Random keys for layers one by one, and for those that a loop walks along."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.random as jr
from jaxtyping import PRNGKeyArray

from ..._dtypes import is_key


@functools.partial(jax.jit, static_argnums=1)
def split_key(key: PRNGKeyArray, num: int) -> tuple[PRNGKeyArray, ...]:
    """`jax.random.split` as a tuple: one dispatch, where to take a key off an array is one each."""
    return tuple(jr.split(key, num))


def key_for(layer: Callable[..., Any], key: PRNGKeyArray | None) -> dict[str, Any]:
    """The option `key` for a layer that somebody wrote.

    Where no key was given, a layer that takes one gets `None`, and any other is called without.
    """
    return {"key": key} if key is not None or _takes_key(layer) else {}


def _takes_key(layer: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(layer).parameters
    except (TypeError, ValueError):
        return True
    return "key" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def as_data(keys: PRNGKeyArray | None) -> tuple[Any, Callable[[Any], Any]]:
    """Keys as the numbers that they are made of, and the function that makes keys of them again.

    For what a `scan` walks along: of keys that a `vmap` around it has moved into place, JAX's check
    for keys that are used twice says that they are used up.
    """
    if keys is None or not is_key(keys):
        return keys, lambda data: data
    implementation = jr.key_impl(keys)
    return jr.key_data(keys), lambda data: jr.wrap_key_data(data, impl=implementation)
