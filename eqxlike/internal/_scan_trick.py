"""Several calls of one function, compiled once."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from ._forbidden import nonbatchable

Carry = TypeVar("Carry")


def scan_trick(
    fn: Callable[[Carry], Carry], intermediates: Sequence[Callable[[Carry], Carry]], init: Carry
) -> Carry:
    """`fn`, then each of `intermediates` with `fn` after it, in turn.

    With two of them that is `fn(second(fn(first(fn(init)))))`, with `fn` traced and compiled once,
    as the body of a scan. It is worth while where `fn` takes long to compile, and the others do
    not.

    **Arguments:**

    - `fn`, `intermediates`: from a carry to one of the same structure, shapes and dtypes.
    - `init`: a pytree of arrays.

    !!! example

        >>> print(scan_trick(lambda x: 2 * x, [lambda x: x + 1], jnp.array(1)))
        6
    """
    branches = [*intermediates, lambda carry: carry]

    def step(carry: Carry, place: Any) -> tuple[Carry, None]:
        # A batched place would turn the choice into running all branches.
        return jax.lax.switch(nonbatchable(place), branches, fn(carry)), None

    init = jtu.tree_map(jnp.asarray, init)
    return jax.lax.scan(step, init, jnp.arange(len(branches)))[0]
