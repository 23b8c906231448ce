"""The loops `while_loop`, `fori_loop` and `scan`."""

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
from ._body import Body, Buffers, TreeSpec, take_arrays, trace_body, trace_condition
from ._counted import Condition, While, counted_scan, counted_while, run_while
from ._primitives import without_transpose
from ._scan import Arrays, Operands, Scan, Step, levels_for, row_types
from ._step import run

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
    """Runs `while cond_fun(val): val = body_fun(val)`, differentiable in a chosen way.

    Under `jax.vmap` the loop runs until the last member of the batch has ended.

    **Arguments:**

    - `cond_fun`: function from a carry to one boolean.
    - `body_fun`: function from a carry to the next carry. The next carry must have the same
      structure, shapes and dtypes. `cond_fun` and `body_fun` may close over arrays and tracers. The
      loop can be differentiated with respect to closed-over arrays too.
    - `init_val`: the initial carry, any pytree. Leaves that are not arrays or numbers are static.
    - `max_steps`: the largest number of steps, an integer of at least 0; `None` for no limit. If
      the limit has ended the loop, `cond_fun` of the result is still true.
    - `buffers`: function that takes a carry and returns those arrays of the carry that are buffers.
      An entry of a buffer may be written at most once, and may be read only afterwards. `body_fun`
      gets a `Buffer` in place of each buffer array. `body_fun` writes to a `Buffer` with
      `buffer.at[index].set(x)` or `buffer_at_set`. Reverse mode does not save buffers.
    - `kind`: `"lax"` supports forward mode only, like `jax.lax.while_loop`. `"bounded"` and
      `"checkpointed"` are differentiable in every mode and to every order. In reverse mode,
      `"bounded"` allocates memory for the carries of `max_steps` steps, and runs each step twice.
      `"checkpointed"` allocates memory for about `2 * sqrt(max_steps)` carries, and runs each step
      three times.
    - `checkpoints`: for `"checkpointed"`, the largest number of carries that are saved at one time.
      With `checkpoints`, `max_steps` is not required. The fewer checkpoints, the more often each
      step runs. With 10 checkpoints, each of 1,000 steps runs at most four times before it is
      differentiated. `"lax"` and `"bounded"` ignore this argument.
    - `base`: has no effect. It is accepted because the loops of `equinox.internal` accept it.

    **Returns:** the last carry.

    **Raises:**

    - `ValueError` if `body_fun` changes the structure, a shape, a dtype or a static leaf of the
      carry.
    - `ValueError` if `kind` is unknown.
    - `ValueError` if `kind` is `"bounded"` and `max_steps` is missing.
    - `ValueError` if `kind` is `"checkpointed"`, and both `max_steps` and `checkpoints` are
      missing.
    - `TypeError` if `cond_fun` does not return one boolean.

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
    limits = _checked_limits("while_loop", kind, max_steps, checkpoints)
    whole_number(base, "base", 2)

    def step(carry: Any, _: None) -> tuple[Any, None]:
        return body_fun(carry), None

    def traced(axes: frozenset[Any]) -> tuple[Any, ...]:
        body = trace_body("body_fun", step, init_val, TreeSpec(None), [], buffers, axes)
        return trace_condition("cond_fun", cond_fun, body)

    body, condition, axes = traced(frozenset())
    if axes:
        # Under `jax.shard_map`, the condition may differ between devices. Then the number of steps
        # differs too. So the carry must vary over the same mesh axes as the condition.
        body, condition, _ = traced(axes)
    return body.unflatten(_run_while("while_loop", body, condition, kind, limits))


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
    """Runs `for i in range(lower, upper): val = body_fun(i, val)`, differentiable in a chosen way.

    Under `jax.vmap` the loop runs until the last member of the batch has ended.

    **Arguments:**

    - `lower`, `upper`: integers of shape `()`. If both are known at trace time, the loop is a
      `scan`, and otherwise a `while_loop`.
    - `body_fun`: function from an integer and a carry to the next carry. The next carry must have
      the same structure, shapes and dtypes. `body_fun` may close over arrays and tracers. The loop
      can be differentiated with respect to closed-over arrays too.
    - `init_val`: the initial carry, any pytree. Leaves that are not arrays or numbers are static.
    - `max_steps`: the largest number of steps, an integer of at least 0; `None` for no limit. The
      loop ends before `i == lower + max_steps`.
    - `buffers`, `checkpoints`: as for `while_loop`.
    - `kind`: as for `scan` if both bounds are known at trace time, else as for `while_loop`.

    **Returns:** the last carry. If `upper <= lower`, this is `init_val`.

    **Raises:**

    - `ValueError` if `body_fun` changes the structure, a shape, a dtype or a static leaf of the
      carry.
    - `ValueError` if `kind` is unknown.
    - `ValueError` if a bound is not known at trace time, and `max_steps` or `checkpoints` is
      missing although `while_loop` requires it for this `kind`.
    - `TypeError` if a bound is not an integer.
    - `TypeError` if the dtypes of the bounds differ.

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
        return trace_body("body_fun", step, init_val, TreeSpec(index), x, buffers, axes)

    if start is not None and stop is not None:
        length = max(stop - start, 0)
        if max_steps is not None:
            length = min(length, whole_number(max_steps, "max_steps", 0))
        # If both bounds are known, the index has the default integer dtype, as in JAX.
        body = traced(jnp.asarray(0))
        indices = jnp.arange(start, start + length)
        carry, _ = _run_scan(body, [indices], length, kind, checkpoints)
        return body.unflatten(carry)

    limits = _checked_limits("fori_loop", kind, max_steps, checkpoints)
    first, end = jnp.asarray(lower, dtype), jnp.asarray(upper, dtype)
    first = vary(first, varying_axes(end))
    body = traced(first)

    numbered = _numbered(body, first, end)
    name = "fori_loop whose bounds are unknown at trace time"
    is_before_end: Condition = lambda consts, carry: carry[0] < consts[-1]  # noqa: E731
    _, *carry = _run_while(name, numbered, is_before_end, kind, limits)
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
    """`jax.lax.scan`, with a choice of what reverse mode saves.

    **Arguments:**

    - `f`: function `f(carry, x)` that returns the pair `(next_carry, output)`. The carry and the
      output may have static leaves.
    - `init`: the initial carry, any pytree. Leaves that are not arrays or numbers are static.
    - `xs`: any pytree. In each step, `f` gets one row, along the leading axis, of each array in
      `xs`. With `None`, the loop runs `length` steps.
    - `length`: number of steps. Required if `xs` has no arrays.
    - `reverse`: whether to go from the last row to the first. Outputs keep the order of `xs`.
    - `unroll`: number of steps in one iteration of the compiled loop; `True` for all steps.
      `unroll` applies to reverse mode too. In a `"checkpointed"` loop, `unroll` applies to the
      steps of each segment.
    - `buffers`: as for `while_loop`.
    - `kind`: in reverse mode, `"lax"` saves all intermediate values that the derivative of a step
      needs. `"bounded"` saves the carry of each step, and runs each step twice. `"checkpointed"`
      saves about `2 * sqrt(length)` carries and runs each step three times. All kinds are
      differentiable in every mode and to every order.
    - `checkpoints`: for `"checkpointed"`, the largest number of carries that are saved at one time.
      `"all"` means `length`.

    **Returns:** the last carry, and the outputs stacked along a new leading axis.

    **Raises:**

    - `ValueError` if `f` changes the structure, a shape, a dtype or a static leaf of the carry.
    - `ValueError` if two lengths differ, or no length is known.
    - `ValueError` if `kind` is unknown.
    - `ValueError` if `unroll` is neither a bool nor a positive integer.
    - `TypeError` if `f` does not return a pair.

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
    body = trace_body("f", step, init, TreeSpec(xs), row_types(arrays), buffers)
    carry, ys = _run_scan(body, arrays, length, kind, checkpoints, reverse, unroll)
    return body.unflatten(carry), body.y_spec.unflatten(ys)


# --- Checks of the arguments ---


def _check_callable(loop: str, name: str, function: Any) -> None:
    if not callable(function):
        raise TypeError(f"{loop} expected {name} to be a function, got {describe_node(function)}.")


def _check_kind(kind: str) -> None:
    """Raises `ValueError` if `kind` is unknown."""
    if kind not in (kinds := ("lax", "checkpointed", "bounded")):
        raise ValueError(f"kind must be one of {', '.join(map(repr, kinds))}; got {kind!r}.")


def _checked_limits(
    name: str, kind: str, max_steps: int | None, checkpoints: int | None
) -> tuple[int | None, int | None]:
    """Checks `max_steps` and `checkpoints` of the loop `name` and returns them as integers.

    **Raises:** `ValueError` if `max_steps` or `checkpoints` is invalid, or is missing although
    `kind` requires it.
    """
    if max_steps is not None:
        max_steps = whole_number(max_steps, "max_steps", 0)
    if checkpoints is not None:
        checkpoints = whole_number(checkpoints, "checkpoints")
    if max_steps is None and (kind == "bounded" or (kind == "checkpointed" and not checkpoints)):
        way_out = ", or `checkpoints`, the number of carries to save" * (kind == "checkpointed")
        raise ValueError(
            f"{name}(kind={kind!r}) needs `max_steps`, the largest number of steps{way_out}: "
            "reverse mode saves carries in arrays whose size must be known at compile time."
        )
    return max_steps, checkpoints


def _dtype_of(lower: Any, upper: Any) -> Any:
    """The dtype of the index if the bounds are not known at trace time.

    **Raises:** `TypeError` unless both bounds are integers of the same dtype, or one is a Python
    integer.
    """
    bounds = {"lower": lower, "upper": upper}
    for name, bound in bounds.items():
        dtype = jnp.result_type(bound) if is_array_like(bound) else jnp.bool_
        if not jnp.issubdtype(dtype, jnp.integer) or jnp.shape(bound) != ():
            raise TypeError(
                f"fori_loop expected an integer of shape () for `{name}`, got "
                f"{describe_node(bound)}."
            )
    strong = [jnp.result_type(each) for each in bounds.values() if not jax.typeof(each).weak_type]
    if len(set(strong)) > 1:
        raise TypeError(
            f"fori_loop expected `lower` and `upper` of the same dtype, got {strong[0]} and "
            f"{strong[1]}."
        )
    return strong[0] if strong else None


def _length_of(xs: PyTree, length: int | None) -> int:
    """The number of steps. Raises `ValueError` if it is unknown, or if two lengths differ."""
    lengths = {}
    for path, leaf in jtu.tree_leaves_with_path(xs):
        if not is_array_like(leaf):
            continue
        name = f"xs{jtu.keystr(path)}"
        if jnp.ndim(leaf) == 0:
            raise ValueError(f"scan iterates over the rows of arrays, but {name} has shape ().")
        lengths[name] = leaf.shape[0]
    if length is not None:
        lengths["length"] = whole_number(length, "length", 0)
    if not lengths:
        raise ValueError("scan needs `length` if `xs` has no arrays.")
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {number}" for name, number in lengths.items())
        raise ValueError(f"scan expected one number of steps, got several: {listed}.")
    return next(iter(lengths.values()))


def _pair(returned: Any) -> tuple[Any, Any]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(
            f"f must return a pair `(next_carry, output)`: it returned {describe_node(returned)}."
        )
    return returned


# --- Loops on lists of arrays, with the traced body ---


def _run_while(
    name: str, body: Body, condition: Condition, kind: str, limits: tuple[int | None, int | None]
) -> list[Array]:
    """Runs a loop with this traced body and condition, and returns the last carry.

    `levels_for` in `_scan.py` decides how many carries reverse mode saves, and `_run_and_save` in
    `_counted.py` allocates these carries. The derivative itself is in `_counted.py`. If there are
    fewer `checkpoints` than `levels_for` needs, `revolve` in `_step.py` saves the carries instead,
    during the backward pass.

    **Arguments:**

    - `name`: the name of the loop in the error about reverse mode.
    - `limits`: the output of `_checked_limits`.
    """
    max_steps, checkpoints = limits
    length = _UNBOUNDED if max_steps is None else max_steps
    loop = While(condition, _scan_of(body, length, kind, checkpoints), body.num_own_consts)
    operands = Operands(body.consts, body.carry, [])
    if kind == "lax":
        return without_transpose(
            run_while(loop, operands),
            f"Reverse-mode differentiation of a {name} needs another `kind`: pass "
            "kind='checkpointed' or kind='bounded', and `max_steps`, the largest number of steps. "
            "The default, kind='lax', supports only forward mode.",
        )
    operands = body.clear_written(operands, lambda operands: run_while(loop, operands))
    return counted_while(loop, operands)


_UNBOUNDED = 2**31 - 1
"""The largest number of steps if `max_steps` is not given: the maximum of a 32-bit counter."""


def _scan_of(body: Body, length: int, kind: str, checkpoints: int | None) -> Scan:
    """Makes a `Scan` of a body, with at most `length` steps.

    For `"checkpointed"`, reverse mode saves at most `checkpoints` carries. If `checkpoints` is
    `None`, `levels_for` chooses their number. For `"bounded"`, reverse mode saves the carry of each
    step. For `"lax"`, JAX differentiates the loop, and `levels` has no effect.
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


def _run_scan(
    body: Body,
    xs: Arrays,
    length: int,
    kind: str,
    checkpoints: int | Literal["all"] | None,
    is_reversed: bool = False,
    unroll: int = 1,
) -> tuple[list[Array], list[Array]]:
    """Runs a traced body on each row of `xs`. Returns the last carry and the stacked outputs."""
    if checkpoints == "all":
        checkpoints = length
    elif kind == "checkpointed" and checkpoints is not None:
        checkpoints = whole_number(checkpoints, "checkpoints")
    loop = _scan_of(body, length, kind, checkpoints)
    loop = dataclasses.replace(loop, is_reversed=bool(is_reversed), unroll=unroll)
    operands = Operands(body.consts, body.carry, xs)
    if kind == "lax":
        return run(loop, operands)
    return counted_scan(loop, body.clear_written(operands, lambda each: run(loop, each)[0]))


def _numbered(body: Body, first: Array, end: Array) -> Body:
    """The body with an additional index in front of its carry. The index starts at `first`.

    `end` is an additional const, for the condition.
    """

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
        consts=[*body.consts, end],
        carry=[first, *body.carry],
        is_buffer=(False, *body.is_buffer),
        is_outer_buffer=(False, *body.is_outer_buffer),
    )
