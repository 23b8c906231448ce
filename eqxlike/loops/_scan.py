"""A loop over the rows of arrays."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, PyTree

from .._numbers import whole_number
from .._pytree import is_array_like
from ._body import Body, Buffers, scan_of, trace_body
from ._carry import Form, check_kind, take_arrays
from ._flat._counted_scan import counted_scan
from ._flat._plan import Arrays, Operands, levels_for, split
from ._flat._step import run

Carry = TypeVar("Carry")


def scan(
    f: Callable[[Carry, Any], tuple[Carry, Any]],
    init: Carry,
    xs: PyTree,
    length: int | None = None,
    *,
    buffers: Buffers | None = None,
    kind: Literal["lax", "checkpointed", "bounded"] = "lax",
    checkpoints: int | Literal["all"] | None = None,
) -> tuple[Carry, PyTree]:
    """`jax.lax.scan`, with a choice of what its reverse mode saves.

    **Arguments:**

    - `f`: `f(carry, x)`, which returns the next carry and an output. Carry and output may have
      static leaves.
    - `init`: the carry to start with: any pytree. What is no array or number is static.
    - `xs`: any pytree; the rows of its arrays, along their leading axis, are what `f` gets. `None`
      for a loop over `length` steps.
    - `length`: how many steps, where `xs` has no arrays.
    - `buffers`: as for `while_loop`.
    - `kind`: for the reverse mode `"lax"` saves all that the derivative of each step needs.
      `"bounded"` saves the carry of each step, and runs the step once more for the rest.
      `"checkpointed"` saves twice the root of so many carries, and runs each step three times. All
      are differentiable in every mode and to every order.
    - `checkpoints`: for `"checkpointed"`, how many carries may be saved at one time, or `"all"`.

    **Returns:** the last carry, and the outputs stacked along a new leading axis.

    **Raises:** `ValueError` if the carry changes its structure, a shape, a dtype or a static leaf;
    if lengths differ or there is none; for an unknown `kind`; `TypeError` if `f` returns no pair.

    !!! example

        >>> import jax.numpy as jnp
        >>> total, totals = scan(
        ...     lambda total, x: (total + x, total), 0.0, jnp.arange(4.0), kind="checkpointed"
        ... )
        >>> print(total, totals)
        6.0 [0. 0. 1. 3.]
    """
    check_kind(kind, ("lax", "checkpointed", "bounded"))
    length = _length_of(xs, length)
    arrays = take_arrays(xs)
    rows = [jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for array in arrays]
    body = trace_body("f", lambda carry, x: _pair(f(carry, x)), init, Form(xs), rows, buffers)
    carry, ys = run_scan(body, arrays, length, kind, checkpoints)
    return body.put(carry), body.y_form.put(ys)


def run_scan(
    body: Body, xs: Arrays, length: int, kind: str, checkpoints: int | Literal["all"] | None
) -> tuple[list[Array], list[Array]]:
    """The last carry and the rows of outputs, of a body that is traced for the rows of `xs`."""
    if checkpoints == "all" or kind != "checkpointed":
        checkpoints, levels = None, (max(length, 1),)
    else:
        checkpoints = None if checkpoints is None else whole_number(checkpoints, "checkpoints")
        levels = levels_for(length, checkpoints)
    loop = scan_of(body, length, levels, checkpoints)
    operands = Operands(body.consts, body.carry, xs)
    if kind == "lax":
        return run(loop, operands)

    def run_from(shared: Arrays, carry: Arrays) -> list[Array]:
        consts, xs = split(shared, len(body.consts))
        return run(loop, Operands(consts, carry, xs))[0]

    start = body.started([*body.consts, *xs], run_from)
    return counted_scan(loop, dataclasses.replace(operands, carry=start))


def _length_of(xs: PyTree, length: int | None) -> int:
    """The number of steps. Raises `ValueError` if nobody says, or two say differently."""
    lengths = {}
    for path, leaf in jtu.tree_leaves_with_path(xs):
        if not is_array_like(leaf):
            continue
        name = f"xs{jtu.keystr(path)}"
        if jnp.ndim(leaf) == 0:
            raise ValueError(f"scan goes over the rows of arrays, and {name} has shape ().")
        lengths[name] = leaf.shape[0]
    if length is not None:
        lengths["length"] = whole_number(length, "length", 0)
    if not lengths:
        raise ValueError("scan needs `length` where there is no array in `xs`.")
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {number}" for name, number in lengths.items())
        raise ValueError(f"scan needs one number of steps: {listed}.")
    return next(iter(lengths.values()))


def _pair(returned: Any) -> tuple[Any, Any]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(
            "f must return a pair, the next carry and an output: it returned "
            f"{type(returned).__name__}."
        )
    return returned
