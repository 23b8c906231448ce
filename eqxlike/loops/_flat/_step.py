"""One step of a scan backwards, for one member and for a batch."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool

from ._batched import select_if_vmap
from ._moving import Moving, moved, moving_parts, of_moving
from ._plan import Arrays, Scan

Cotangents = tuple[list[Array], list[Array], list[Array]]
"""Of the consts, of the carry and of the x."""


def pull_back_step(
    scan: Scan,
    moving: Moving,
    is_shared: tuple[bool, ...],
    consts: Arrays,
    carry: Arrays,
    x: Arrays,
    is_active: Any,
    of_carry: Arrays,
    of_y: Arrays,
) -> Cotangents:
    """The cotangents of what moves; where the step is not active, zeros of the consts and the x.

    **Arguments:**

    - `is_shared`: for each of the consts that move, whether to sum over a batch.
    - `of_carry`, `of_y`: the cotangents of what the step returns.
    """
    is_active = jnp.asarray(is_active)

    def of_one(*args: Any) -> Cotangents:
        consts, carry, x, is_active, of_carry, of_y = args
        function = of_moving(scan, moving, consts, carry, x, is_active)
        _, vjp, _ = jax.vjp(function, *moving_parts(moving, consts, carry, x), has_aux=True)
        of_consts, of_carry, of_x = vjp((of_carry, of_y))
        return _where_active(is_active, of_consts), of_carry, _where_active(is_active, of_x)

    args = list(consts), list(carry), list(x), is_active, list(of_carry), list(of_y)
    if not any(is_shared):
        return of_one(*args)
    mappable = custom_vmap(of_one)

    @mappable.def_vmap
    def _of_batch(size: int, is_batched: Any, *args: Any) -> Any:
        found = _pull_back_batch(scan, moving, is_shared, size, is_batched, *args)
        is_mapped = (
            [not shared for shared in is_shared],
            *([True] * len(each) for each in found[1:]),
        )
        return found, is_mapped

    return mappable(*args)


def _where_active(is_active: Bool[Array, ""], cotangents: Arrays) -> list[Array]:
    return [select_if_vmap(is_active, each, jnp.zeros_like(each)) for each in cotangents]


def _pull_back_batch(
    scan: Scan, moving: Moving, is_shared: tuple[bool, ...], size: int, is_batched: Any, *args: Any
) -> Cotangents:
    """As `pull_back_step`, for a batch: all members are reversed as one function of the shared.

    So a product of a shared matrix and a vector of each member is reversed as one of two matrices.
    """
    consts, carry, x, is_active, of_carry, of_y = args
    are_batched, (is_mixed, *of_outputs) = is_batched[:3], is_batched[3:]
    are_active = jnp.broadcast_to(is_active, (size,))
    is_masked = moved(scan.is_masked, moving.carry)

    def where_active(new: Array, old: Any) -> Array:
        if not is_mixed:
            # It may differ among the members of a batch around this one.
            return select_if_vmap(
                is_active, new, jnp.broadcast_to(old, new.shape).astype(new.dtype)
            )
        return jnp.where(are_active.reshape((-1,) + (1,) * (new.ndim - 1)), new, old)

    # A member that has ended may have infinite derivatives where it stands: it takes the place of
    # one that has not, and its cotangents are zero. What is masked sees to that by itself.
    example = jnp.argmax(are_active)
    stay = [False] * len(consts), scan.is_masked, [False] * len(x)
    consts, carry, x = (
        [
            where_active(each, each[example]) if is_one and not stays else each
            for each, is_one, stays in zip(*of_part, strict=True)
        ]
        for of_part in zip((consts, carry, x), are_batched, stay, strict=True)
    )
    parts = moving_parts(moving, consts, carry, x)
    are_mapped = [not shared for shared in is_shared], *([True] * len(part) for part in parts[1:])
    were_mapped = moving_parts(moving, *are_batched)
    parts = [
        [
            _spread(each, bool(was_mapped), size) if is_mapped else each
            for each, was_mapped, is_mapped in zip(*of_part, strict=True)
        ]
        for of_part in zip(parts, were_mapped, are_mapped, strict=True)
    ]

    def of_batch(*parts: Any) -> Any:
        def of_member(*args: Any) -> Any:
            *parts, consts, carry, x, is_active = args
            return of_moving(scan, moving, consts, carry, x, is_active)(*parts)[0]

        in_axes = jax.tree.map(
            lambda is_mapped: 0 if is_mapped else None, (*are_mapped, *are_batched)
        )
        return jax.vmap(of_member, (*in_axes, 0))(*parts, consts, carry, x, are_active)

    of_carry, of_y = (
        [_spread(each, is_one, size) for each, is_one in zip(*of_part, strict=True)]
        for of_part in zip((of_carry, of_y), of_outputs, strict=True)
    )
    of_active = [
        each if masked else where_active(each, 0)
        for each, masked in zip(of_carry, is_masked, strict=True)
    ]
    _, vjp = jax.vjp(of_batch, *parts)
    of_consts, of_start, of_x = vjp((of_active, [where_active(each, 0) for each in of_y]))
    # In a batch of batches it may be that none is active.
    is_any = jnp.any(are_active)
    of_consts = [
        jnp.where(is_any, each, 0) if shared else where_active(each, 0)
        for each, shared in zip(of_consts, is_shared, strict=True)
    ]
    of_start = [
        new if masked else where_active(new, old)
        for new, old, masked in zip(of_start, of_carry, is_masked, strict=True)
    ]
    return of_consts, of_start, [where_active(each, 0) for each in of_x]


def _spread(array: Array, is_batched: bool, size: int) -> Array:
    return array if is_batched else jnp.broadcast_to(array, (size, *jnp.shape(array)))
