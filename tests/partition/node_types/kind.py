"""A kind of node or leaf, and how a program reads one."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu

from eqxlike import is_array


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of node or leaf.

    - `make`: returns the values.
    - `read`: what a program may see in a value: a pytree of arrays, and of strings for the rest.
    - `mutate`: changes a value in place.
    - `is_returned`: whether a function may return one.
    """

    make: Callable[[], list[Any]]
    read: Callable[[Any], Any] = lambda value: read(value)
    mutate: Callable[[Any], None] | None = None
    is_returned: bool = True


def array(number):
    return jnp.full(2, number, jnp.float32)


def twice(make):
    """The values that `make` returns for 1 and 2."""
    return lambda: [make(1), make(2)]


def read(value):
    """The arrays of a pytree, and a text of each static leaf and of the structure."""
    leaves, treedef = jtu.tree_flatten(value)
    return [leaf if is_array(leaf) else text(leaf) for leaf in leaves], str(treedef)


class Shown:
    """`text` shows the attributes of what derives from it."""


def text(value):
    """Tells apart what Python can tell apart."""
    if isinstance(value, functools.partial):
        return f"partial({text((value.func, value.args, value.keywords))})"
    if isinstance(value, dict):
        return f"{type(value).__name__}{[(key, text(each)) for key, each in value.items()]}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}{[*map(text, value)]}"
    if isinstance(value, Shown):
        return f"{type(value).__name__}{text(vars(value))}"
    return f"{type(value).__name__} {value!r}"


def read_fields(*names):
    """Reads some attributes, as a program does that does not flatten."""

    def read(value):
        found = [getattr(value, name) for name in names]
        return [each if is_array(each) else text(each) for each in found]

    return read
