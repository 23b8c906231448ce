"""A loop over the integers from one to another."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from .._numbers import integer, whole_number
from .._pytree import describe_node, is_array_like
from ._body import Body, Buffers, trace_body
from ._carry import Form, check_kind
from ._flat._plan import Arrays, Step
from ._scan import run_scan
from ._while_loop import checked_limit, run_while_of

Carry = TypeVar("Carry")


def fori_loop(
    lower: int | Int[Array, ""],
    upper: int | Int[Array, ""],
    body_fun: Callable[[Int[Array, ""], Carry], Carry],
    init_val: Carry,
    *,
    max_steps: int | None = None,
    buffers: Buffers | None = None,
    kind: Literal["lax", "checkpointed", "bounded"] = "lax",
    checkpoints: int | None = None,
) -> Carry:
    """`for i in range(lower, upper): val = body_fun(i, val)`, also backwards.

    **Arguments:**

    - `lower`, `upper`: integers of shape `()`. If both are known when the loop is traced, it is a
      `scan`; if not, a `while_loop`.
    - `body_fun`: from an integer and a carry to the next carry, of the same structure, shapes and
      dtypes. It may close over anything; what it closes over has gradients too.
    - `init_val`: the carry to start with: any pytree. What is no array or number is static.
    - `max_steps`: the loop ends after so many steps at most, with those before `lower + max_steps`.
      An integer of at least 0, or `None` for no limit.
    - `buffers`, `checkpoints`: as for `while_loop`.
    - `kind`: as for `while_loop`, or where both bounds are known as for `scan`.

    **Returns:** the last carry; `init_val` if `upper` is not above `lower`.

    **Raises:** `ValueError` if the carry changes its structure, a shape, a dtype or a static leaf,
    for an unknown `kind`, and for one that is differentiable backwards without `max_steps` or
    `checkpoints` where the bounds are not known; `TypeError` for bounds that are no integers or of
    two dtypes.

    Under `jax.vmap` the loop runs until the last member of the batch has ended.

    !!! example

        >>> import jax
        >>> def power(x, n):
        ...     return fori_loop(0, n, lambda i, y: x * y, 1.0, max_steps=8, kind="checkpointed")
        >>> print(power(2.0, 3), jax.jit(jax.grad(power))(2.0, 3))
        8.0 12.0
    """
    check_kind(kind, ("lax", "checkpointed", "bounded"))
    dtype = _dtype_of(lower, upper)
    start, stop = integer(lower), integer(upper)

    def step(carry: Any, index: Array) -> tuple[Any, None]:
        return body_fun(index, carry), None

    def traced(index: Array) -> Body:
        struct = jax.ShapeDtypeStruct((), index.dtype, weak_type=jax.typeof(index).weak_type)
        return trace_body("body_fun", step, init_val, Form(index), [struct], buffers)

    if start is not None and stop is not None:
        length = max(stop - start, 0)
        if max_steps is not None:
            length = min(length, whole_number(max_steps, "max_steps", 0))
        # As in JAX, the index has the default dtype of integers, whatever known bounds have.
        body = traced(jnp.asarray(0))
        indices = jnp.arange(start, start + length)
        carry, _ = run_scan(body, [indices], length, kind, checkpoints)
        return body.put(carry)

    max_steps, checkpoints = checked_limit("fori_loop", kind, max_steps, checkpoints)
    first, end = jnp.asarray(lower, dtype), jnp.asarray(upper, dtype)
    body = traced(first)
    _, *carry = run_while_of(
        _numbered(body, first),
        [end],
        lambda consts, carry: carry[0] < consts[0],
        kind,
        max_steps,
        checkpoints,
    )
    return body.put(carry)


def _dtype_of(lower: Any, upper: Any) -> Any:
    """The dtype of the index where the bounds are not known.

    **Raises:** `TypeError` unless both bounds are integers of one dtype, or one is a Python number.
    """
    bounds = {"lower": lower, "upper": upper}
    for name, bound in bounds.items():
        dtype = jnp.result_type(bound) if is_array_like(bound) else jnp.bool_
        if not jnp.issubdtype(dtype, jnp.integer) or jnp.shape(bound) != ():
            raise TypeError(
                f"fori_loop expected an integer of shape () for `{name}`, got "
                f"{describe_node(bound)}."
            )
    strong = {
        name: jnp.result_type(bound)
        for name, bound in bounds.items()
        if not jax.typeof(bound).weak_type
    }
    if len(set(strong.values())) > 1:
        raise TypeError(
            f"fori_loop expected bounds of one dtype, got `lower` of {strong['lower']} and `upper` "
            f"of {strong['upper']}."
        )
    return next(iter(strong.values()), None)


def _numbered(body: Body, first: Array) -> Body:
    """The body with the index, from `first` on, in front of its carry."""

    def numbered(step: Step) -> Step:
        def run(consts: Arrays, carry: Arrays, x: Arrays, is_active: Any) -> Any:
            index, *carry = carry
            new, _ = step(consts, carry, [index], is_active)
            return [index + 1, *new], []

        return run

    return dataclasses.replace(
        body,
        step=numbered(body.step),
        reading_step=body.reading_step and numbered(body.reading_step),
        carry=[first, *body.carry],
        is_buffer=(False, *body.is_buffer),
        is_inside=(False, *body.is_inside),
    )
