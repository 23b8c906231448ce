"""The loops: as long as a condition holds, over integers, and over the rows of arrays."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, ArrayLike, Bool, Int, PyTree

from .._check_numbers import integer, whole_number
from .._compat import vary, varying_axes
from .._pytree import describe_node, is_array_like
from ._body import Body, Buffers, Form, take_arrays, trace_body, trace_condition
from ._flat._counted_scan import counted_scan
from ._flat._counted_while import Condition, While, WhileOperands, counted_while, run_while
from ._flat._scan import Arrays, Operands, Scan, Step, levels_for, row_types, split
from ._flat._step import run
from ._flat._transposes import without_transpose

Carry = TypeVar("Carry")


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
    - `init_val`: the carry to start with: any pytree. What is not an array or number is static.
    - `max_steps`: the loop ends after at most this many steps; `cond_fun` of its result then says
      whether it would have gone on. An integer of at least 0, or `None` for no limit.
    - `buffers`: from a carry to the arrays that serve as buffers: each entry is written once, and
      read only after that. `body_fun` gets a `Buffer` for each, and writes to it by
      `buffer.at[index].set(x)` or `buffer_at_set`. Buffers are not saved for reverse mode.
    - `kind`: `"lax"` is differentiable in forward mode alone, like `jax.lax.while_loop`. The others
      are differentiable in every mode and to every order. For reverse mode `"bounded"` saves the
      carry of each of `max_steps` steps, and runs each step twice; `"checkpointed"` saves about
      `2 * sqrt(max_steps)` carries, and runs each step three times.
    - `checkpoints`: for `"checkpointed"`, how many carries may be saved at one time. It may stand
      in place of `max_steps`; the other kinds ignore it. The fewer they are, the more often a step
      is run: with 10 of them each of 1,000 steps at most four times, and then for its gradient.
    - `base`: has no effect; it is an argument of the loops of `equinox.internal`.

    **Returns:** the last carry.

    **Raises:** `ValueError` if the carry changes its structure, a shape, a dtype or a static leaf;
    for an unknown `kind`; for `"bounded"` without `max_steps`; for `"checkpointed"` without
    `max_steps` or `checkpoints`. `TypeError` if `cond_fun` returns anything but a boolean.

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
    _check_callable("while_loop", "cond_fun", cond_fun)
    _check_callable("while_loop", "body_fun", body_fun)
    _check_kind(kind)
    max_steps, checkpoints = _checked_limit("while_loop", kind, max_steps, checkpoints)
    whole_number(base, "base", 2)

    def step(carry: Any, _: None) -> tuple[Any, None]:
        return body_fun(carry), None

    def traced(axes: frozenset[Any]) -> tuple[Any, ...]:
        body = trace_body("body_fun", step, init_val, Form(None), [], buffers, axes)
        return body, *trace_condition("cond_fun", cond_fun, body)

    body, cond_consts, condition, axes = traced(frozenset())
    if axes:
        body, cond_consts, condition, _ = traced(axes)
    return body.unflatten(
        _run_while("while_loop", body, cond_consts, condition, kind, max_steps, checkpoints)
    )


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
    - `init_val`: the carry to start with: any pytree. What is not an array or number is static.
    - `max_steps`: the loop ends after at most this many steps, before `lower + max_steps`. An
      integer of at least 0, or `None` for no limit.
    - `buffers`, `checkpoints`: as for `while_loop`.
    - `kind`: as for `scan` if both bounds are known, else as for `while_loop`.

    **Returns:** the last carry; `init_val` if `upper` is not above `lower`.

    **Raises:** `ValueError` if the carry changes its structure, a shape, a dtype or a static leaf;
    for an unknown `kind`; where a bound is not known, for a `kind` without the limit that it needs
    in `while_loop`. `TypeError` for bounds that are not integers or of two dtypes.

    Under `jax.vmap` the loop runs until the last member of the batch has ended.

    !!! example

        >>> import jax
        >>> def power(x, n):
        ...     return fori_loop(0, n, lambda i, y: x * y, 1.0, max_steps=8, kind="checkpointed")
        >>> print(power(2.0, 3), jax.jit(jax.grad(power))(2.0, 3))
        8.0 12.0
    """
    _check_callable("fori_loop", "body_fun", body_fun)
    _check_kind(kind)
    dtype = _dtype_of(lower, upper)
    start, stop = integer(lower), integer(upper)

    def step(carry: Any, index: Array) -> tuple[Any, None]:
        return body_fun(index, carry), None

    def traced(index: Array) -> Body:
        x, axes = [jax.typeof(index)], varying_axes(index)
        return trace_body("body_fun", step, init_val, Form(index), x, buffers, axes)

    if start is not None and stop is not None:
        length = max(stop - start, 0)
        if max_steps is not None:
            length = min(length, whole_number(max_steps, "max_steps", 0))
        # As in JAX, the index has the default dtype of integers, whatever known bounds have.
        body = traced(jnp.asarray(0))
        indices = jnp.arange(start, start + length)
        carry, _ = _run_scan(body, [indices], length, kind, checkpoints)
        return body.unflatten(carry)

    max_steps, checkpoints = _checked_limit("fori_loop", kind, max_steps, checkpoints)
    first, end = jnp.asarray(lower, dtype), jnp.asarray(upper, dtype)
    first = vary(first, varying_axes(end))
    body = traced(first)

    numbered = _numbered(body, first)
    name = "fori_loop whose bounds are unknown when it is traced"
    is_before_end: Condition = lambda consts, carry: carry[0] < consts[0]  # noqa: E731
    _, *carry = _run_while(name, numbered, [end], is_before_end, kind, max_steps, checkpoints)
    return body.unflatten(carry)


def scan(
    f: Callable[[Carry, Any], tuple[Carry, Any]],
    init: Carry,
    xs: PyTree,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    buffers: Buffers | None = None,
    kind: Literal["lax", "checkpointed", "bounded"] = "lax",
    checkpoints: int | Literal["all"] | None = None,
) -> tuple[Carry, PyTree]:
    """`jax.lax.scan`, with a choice of what its reverse mode saves.

    **Arguments:**

    - `f`: `f(carry, x)`, which returns the next carry and an output. Carry and output may have
      static leaves.
    - `init`: the carry to start with: any pytree. What is not an array or number is static.
    - `xs`: any pytree; `f` gets a row of each of its arrays, along their leading axis. `None` for a
      loop over `length` steps.
    - `length`: how many steps, if `xs` has no arrays.
    - `reverse`: go from the last row to the first. The output of each row stands at its place.
    - `unroll`: how many steps the compiled loop makes in one turn, in reverse mode too; `True` for
      all. It changes the speed and the time of compilation. Of a `"checkpointed"` loop the steps of
      a segment are unrolled.
    - `buffers`: as for `while_loop`.
    - `kind`: `"lax"` saves, for reverse mode, everything the derivative of each step needs.
      `"bounded"` saves the carry of each step, and runs each step twice. `"checkpointed"` saves
      about `2 * sqrt(length)` carries, and runs each step three times. All are differentiable in
      every mode and to every order.
    - `checkpoints`: for `"checkpointed"`, how many carries may be saved at one time, or `"all"`.

    **Returns:** the last carry, and the outputs stacked along a new leading axis.

    **Raises:** `ValueError` if the carry changes its structure, a shape, a dtype or a static leaf;
    if lengths differ or there is none; for an unknown `kind`; if `unroll` is neither a bool nor a
    positive integer. `TypeError` if `f` returns no pair.

    !!! example

        >>> import jax.numpy as jnp
        >>> total, totals = scan(
        ...     lambda total, x: (total + x, total), 0.0, jnp.arange(4.0), kind="checkpointed"
        ... )
        >>> print(total, totals)
        6.0 [0. 0. 1. 3.]
    """
    _check_callable("scan", "f", f)
    _check_kind(kind)
    length = _length_of(xs, length)
    all_steps = max(length, 1)
    if isinstance(unroll, bool):
        unroll = all_steps if unroll else 1
    unroll = min(whole_number(unroll, "unroll"), all_steps)
    arrays = take_arrays(xs)
    step = lambda carry, x: _pair(f(carry, x))  # noqa: E731
    body = trace_body("f", step, init, Form(xs), row_types(arrays), buffers)
    carry, ys = _run_scan(body, arrays, length, kind, checkpoints, reverse, unroll)
    return body.unflatten(carry), body.y_form.unflatten(ys)


# --- The arguments checked, and the loops run ---


def _check_callable(loop: str, name: str, function: Any) -> None:
    if not callable(function):
        raise TypeError(f"{loop} expected {name} to be a function, got {describe_node(function)}.")


def _check_kind(kind: str) -> None:
    """Raises `ValueError` for an unknown `kind`."""
    if kind not in (kinds := ("lax", "checkpointed", "bounded")):
        raise ValueError(f"kind must be one of {', '.join(map(repr, kinds))}; got {kind!r}.")


def _checked_limit(
    name: str, kind: str, max_steps: int | None, checkpoints: int | None
) -> tuple[int | None, int | None]:
    """`max_steps` and `checkpoints` of the loop `name`.

    **Raises:** `ValueError` if one is not a valid number, or if the kind lacks one that it needs.
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


def _run_while(
    name: str,
    body: Body,
    cond_consts: Arrays,
    condition: Condition,
    kind: str,
    max_steps: int | None,
    checkpoints: int | None,
) -> list[Array]:
    """The last carry of a body and a condition that have been traced.

    `"lax"` has forward mode alone, the other kinds have every mode. For their reverse mode
    `levels_for` in `_flat/_scan.py` decides how many carries are saved, and `_save_while` in
    `_flat/_counted_while.py` takes the memory for them.

    **Arguments:**

    - `name`: name of the loop in the error about reverse mode.
    - `cond_consts`: the arrays that the condition closes over.
    """
    length = _UNBOUNDED if max_steps is None else max_steps
    loop = While(condition, _scan_of(body, length, kind, checkpoints))
    operands = WhileOperands(cond_consts, body.consts, body.carry)
    if kind == "lax":
        return without_transpose(
            run_while(loop, operands),
            f"Reverse-mode differentiation of a {name} needs another `kind`: pass "
            "kind='checkpointed' or kind='bounded', and `max_steps`, the largest number of steps. "
            "The default, kind='lax', has only forward mode.",
        )

    def run_from(shared: Arrays, carry: Arrays) -> list[Array]:
        return run_while(loop, operands.unflatten([*shared, *carry]))

    carry = body.clear_written([*cond_consts, *body.consts], run_from)
    return counted_while(loop, dataclasses.replace(operands, carry=carry))


_UNBOUNDED = 2**31 - 1
"""The most steps without `max_steps`: as far as a counter of 32 bits goes."""


def _scan_of(body: Body, length: int, kind: str, checkpoints: int | None) -> Scan:
    """The scan of at most `length` steps of a body.

    Reverse mode saves the carry of each step. If `kind` is `"checkpointed"`, it saves `checkpoints`
    carries, or by default as many as `levels_for` chooses.
    """
    levels = levels_for(length, checkpoints if kind == "checkpointed" else length)
    return Scan(
        body.step,
        length,
        levels,
        is_masked=body.is_buffer,
        is_written_once=body.is_buffer,
        reading_step=body.reading_step,
        checkpoints=checkpoints,
    )


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


def _run_scan(
    body: Body,
    xs: Arrays,
    length: int,
    kind: str,
    checkpoints: int | Literal["all"] | None,
    is_reversed: bool = False,
    unroll: int = 1,
) -> tuple[list[Array], list[Array]]:
    """The last carry and the rows of outputs; the body has been traced for the rows of `xs`."""
    if checkpoints == "all":
        checkpoints = length
    elif kind == "checkpointed" and checkpoints is not None:
        checkpoints = whole_number(checkpoints, "checkpoints")
    loop = _scan_of(body, length, kind, checkpoints)
    loop = dataclasses.replace(loop, is_reversed=bool(is_reversed), unroll=unroll)
    operands = Operands(body.consts, body.carry, xs)
    if kind == "lax":
        return run(loop, operands)

    def run_from(shared: Arrays, carry: Arrays) -> list[Array]:
        consts, xs = split(shared, len(body.consts))
        return run(loop, Operands(consts, carry, xs))[0]

    start = body.clear_written([*body.consts, *xs], run_from)
    return counted_scan(loop, dataclasses.replace(operands, carry=start))


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
        is_outer_buffer=(False, *body.is_outer_buffer),
    )


def _length_of(xs: PyTree, length: int | None) -> int:
    """The number of steps. Raises `ValueError` if nothing says it, or two lengths differ."""
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
            f"{describe_node(returned)}."
        )
    return returned
