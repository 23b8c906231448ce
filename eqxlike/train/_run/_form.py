"""A state as a list of plain arrays, and the form from which it is built again."""

from typing import Any, NamedTuple

import jax.random as jr
from jaxtyping import Array

from ..._dtypes import is_key
from ..._partition import Structure, are_concrete_arrays, flatten

Leaves = list[Array]


class Form(NamedTuple):
    """What a state is beside its numbers.

    Two are equal if a program for one serves for the other.

    - `structure`: the state without its arrays.
    - `impls`: for each array `None`, or for keys the implementation of their bits. JAX builds an
      object in Python for each array of keys that a call returns, and none for their bits.
    """

    structure: Structure
    impls: tuple[Any, ...]

    def merge(self, leaves: Leaves) -> Any:
        """The state with these arrays."""
        arrays = tuple(
            leaf if impl is None else jr.wrap_key_data(leaf, impl=impl)
            for leaf, impl in zip(leaves, self.impls, strict=True)
        )
        return self.structure.rebuilder(cache=are_concrete_arrays(arrays))(arrays)


def take_apart(state: Any) -> tuple[Leaves, Form]:
    """The arrays of a state, keys as their bits, and its form."""
    leaves, structure = flatten(state, is_bound=True)
    impls = tuple(jr.key_impl(leaf) if is_key(leaf) else None for leaf in leaves)
    plain = [
        leaf if impl is None else jr.key_data(leaf)
        for leaf, impl in zip(leaves, impls, strict=True)
    ]
    return plain, Form(structure, impls)
