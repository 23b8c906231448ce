"""A loop that goes on as long as a condition holds."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from jaxtyping import Array, ArrayLike, Bool

from .._numbers import whole_number
from ._body import Body, Buffers, scan_of, trace_body, trace_condition
from ._carry import Form, check_kind
from ._flat._counted_while import Condition, While, WhileOperands, counted_while, run_while
from ._flat._plan import Arrays, Scan, levels_for

Carry = TypeVar("Carry")

_UNBOUNDED = 2**31 - 1
"""The number of steps at most, where nobody gives one: that of a counter of 32 bits."""


def while_loop(
    cond_fun: Callable[[Carry], bool | Bool[ArrayLike, ""]],
    body_fun: Callable[[Carry], Carry],
    init_val: Carry,
    *,
    max_steps: int | None = None,
    buffers: Buffers | None = None,
    kind: Literal["lax", "checkpointed", "bounded"] = "lax",
    checkpoints: int | None = None,
    base: int = 16,
) -> Carry:
    """`while cond_fun(val): val = body_fun(val)`, also backwards.

    **Arguments:**

    - `cond_fun`: from a carry to one boolean.
    - `body_fun`: from a carry to the next, of the same structure, shapes and dtypes. Like
      `cond_fun` it may close over anything; what it closes over has gradients too.
    - `init_val`: the carry to start with: any pytree. What is no array or number is static.
    - `max_steps`: the loop ends after so many steps at most, and `cond_fun` of what it returns then
      says whether it would have gone on. An integer of at least 0, or `None` for no limit.
    - `buffers`: from a carry to the arrays in it, one or several, of which the loop writes each
      place once and reads it only afterwards. `body_fun` gets them as buffers, to be written by
      `buffer.at[index].set(x)` or `buffer_at_set`. They are not saved for the reverse mode.
    - `kind`: `"lax"` is differentiable in forward mode alone, as `jax.lax.while_loop`.
      `"checkpointed"` and `"bounded"` are in every mode and to every order. For the reverse mode
      `"bounded"` saves the carry of each of `max_steps` steps, and runs each step twice;
      `"checkpointed"` saves twice the root of so many, and runs each step three times.
    - `checkpoints`: for `"checkpointed"`, how many carries may be saved at one time. It may stand
      in place of `max_steps`; the other kinds take no notice of it. The fewer they
      are, the more often a step is run: with twice the logarithm of `max_steps`, about that
      logarithm of times.
    - `base`: has no effect; `equinox.internal` has it for its loops in loops.

    **Returns:** the last carry.

    **Raises:** `ValueError` if the carry changes its structure, a shape, a dtype or a static leaf,
    for an unknown `kind`, and for one that is differentiable backwards without `max_steps`, or
    `checkpoints` in its place;
    `TypeError` if `cond_fun` returns anything but a boolean.

    Under `jax.vmap` the loop runs until the last member of the batch has ended.

    !!! example

        >>> import jax, jax.numpy as jnp
        >>> def doubled_until_large(x):
        ...     return while_loop(
        ...         lambda x: x < 10, lambda x: 2 * x, x, max_steps=8, kind="checkpointed"
        ...     )
        >>> print(doubled_until_large(3.0), jax.grad(doubled_until_large)(3.0))
        12.0 4.0
    """
    check_kind(kind, ("lax", "checkpointed", "bounded"))
    max_steps, checkpoints = checked_limit("while_loop", kind, max_steps, checkpoints)
    whole_number(base, "base", 2)

    def step(carry: Any, _: None) -> tuple[Any, None]:
        return body_fun(carry), None

    body = trace_body("body_fun", step, init_val, Form(None), [], buffers)
    consts, condition = trace_condition("cond_fun", cond_fun, body)
    return body.put(run_while_of(body, consts, condition, kind, max_steps, checkpoints))


def checked_limit(
    name: str, kind: str, max_steps: int | None, checkpoints: int | None
) -> tuple[int | None, int | None]:
    """`max_steps` and `checkpoints` of the loop `name`.

    **Raises:** `ValueError` if one is no such number, or there is none and the kind needs it.
    """
    if max_steps is not None:
        max_steps = whole_number(max_steps, "max_steps", 0)
    if checkpoints is not None:
        checkpoints = whole_number(checkpoints, "checkpoints")
    if max_steps is None and (kind == "bounded" or (kind == "checkpointed" and not checkpoints)):
        way_out = ", or `checkpoints`, the number of carries to save" * (kind == "checkpointed")
        raise ValueError(
            f"{name}(kind={kind!r}) needs `max_steps`, the number of steps at most{way_out}: "
            "the reverse mode saves carries in arrays of a size that is known when it is compiled."
        )
    return max_steps, checkpoints


def run_while_of(
    body: Body,
    of_condition: Arrays,
    condition: Condition,
    kind: str,
    max_steps: int | None,
    checkpoints: int | None,
) -> list[Array]:
    """The last carry of a body and a condition that have been traced.

    **Arguments:**

    - `of_condition`: the arrays that the condition closes over.
    """
    loop = While(condition, _scan_of(body, kind, max_steps, checkpoints))
    operands = WhileOperands(of_condition, body.consts, body.carry)
    if kind == "lax":
        return run_while(loop, operands)

    def run_from(shared: Arrays, carry: Arrays) -> list[Array]:
        return run_while(loop, operands.filled([*shared, *carry]))

    carry = body.started([*of_condition, *body.consts], run_from)
    return counted_while(loop, dataclasses.replace(operands, carry=carry))


def _scan_of(body: Body, kind: str, max_steps: int | None, checkpoints: int | None) -> Scan:
    """The steps of the loop."""
    length = _UNBOUNDED if max_steps is None else max_steps
    is_checkpointed = kind == "checkpointed"
    levels = levels_for(length, checkpoints) if is_checkpointed else (max(length, 1),)
    return scan_of(body, length, levels, checkpoints)
