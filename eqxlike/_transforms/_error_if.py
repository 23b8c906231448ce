"""`error_if`: raises errors that depend on the values of arrays, also in compiled programs."""

import functools
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PyTree

from .._compat import Tracer
from .._partition import split
from .._pytree import is_array, is_array_like
from .._traceback import hide_our_frames
from ._checks import Check, EqxlikeTracetimeError, FailureReport, mesh_of, needing

OnError = Literal["default", "raise", "breakpoint", "nan", "off"]

_WORDS = tuple(word for word in get_args(OnError) if word != "default")

Tree = TypeVar("Tree")
Predicate = Bool[Array, "..."] | Bool[np.ndarray, "..."] | np.bool_ | np.number | bool
Index = Int[Array, "..."] | Int[np.ndarray, "..."] | np.number | int


def error_if(x: Tree, pred: Predicate, msg: str, *, on_error: OnError = "default") -> Tree:
    """Returns `x`, and raises an error if `pred` is true, even in a compiled program.

    The check runs where the program uses the returned `x`. A check that passes costs next to
    nothing: `x` is neither copied nor sent to the host. Gradients are unchanged.

    If a program runs on several devices, it fails on all of them. Inside `jax.shard_map`, each
    device runs its own check, and prints the message before it raises. If the check fails on one
    device only, the other devices may wait for this device forever in a later collective operation.
    So give all devices the same `pred`, for example with `jax.lax.pmax`.

    **Arguments:**

    - `x`: any pytree with at least one array.
    - `pred`: a boolean, or a boolean array; the check fails if any element is true. Under
      `jax.vmap`, the check fails if it fails for any member of the batch. The message has the
      indices of the members that fail.
    - `msg`: the message of the error. The file and line of the check are added to it.
    - `on_error`: what happens on failure:
        - `"raise"`: an exception. A function compiled by `filter_jit` waits for its result, and
          raises before it returns. A function compiled by `jax.jit` raises JAX's own exception. The
          text of JAX's exception contains the message.
        - `"nan"`: the arrays of `x` become NaN; integers become the largest number of their dtype,
          and booleans `True`. Under `jax.vmap`, this affects only the members of the batch that
          fail.
        - `"breakpoint"`: the message is printed, `jax.debug.breakpoint` opens, and the program
          continues with NaN.
        - `"off"`: nothing; there is no check.
        - `"default"`: the value of the environment variable `EQXLIKE_ON_ERROR`, or else of
          `EQX_ON_ERROR`, or else `"raise"`. `EQXLIKE_ON_ERROR_BREAKPOINT_FRAMES`, or else
          `EQX_ON_ERROR_BREAKPOINT_FRAMES`, sets how many frames the debugger shows.

    **Returns:** `x`. Use this returned value instead of the argument. If a compiled program does
    not use the returned value, the compiler removes the check. The check stays if the program uses
    the returned value of a later check in the same function. If several checks fail, the first
    check raises.

    **Raises:**

    - `EqxlikeRuntimeError` if the check fails.
    - `EqxlikeTracetimeError` if the check fails and `pred` is a Python number.
    - `ValueError` if `x` has no array.
    - `TypeError` if `pred` is not boolean.
    - `RuntimeError` if `on_error` is unknown.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp
        >>> @eqx.filter_jit
        ... def log(x):
        ...     x = eqx.error_if(x, x <= 0, "the logarithm needs a positive number")
        ...     return jnp.log(x)
        >>> print(log(jnp.array(1.0)))
        0.0
        >>> log(jnp.array(-1.0))
        Traceback (most recent call last):
        eqxlike.EqxlikeRuntimeError: the logarithm needs a positive number
        ...
    """
    try:
        return _checked(x, pred, 0, [msg], on_error, sys._getframe(1))
    except Exception as error:
        hide_our_frames(error)
        raise


def branched_error_if(
    x: Tree,
    pred: Predicate,
    index: Index,
    msgs: Sequence[str],
    *,
    on_error: OnError = "default",
) -> Tree:
    """Returns `x`, and raises an error with one of several messages if `pred` is true.

    **Arguments:**

    - `x`, `pred`, `on_error`: as for `error_if`.
    - `index`: the index of the message. This is an integer, or an array of integers. The maximum of
      an array is used. Under `jax.vmap`, this is the maximum over the members of the batch that
      fail.
    - `msgs`: the messages.

    **Returns:** `x`. Use this returned value, as with `error_if`.

    **Raises:** the errors of `error_if`; `ValueError` if `msgs` is empty, and `TypeError` if
    `index` is not an integer.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> @eqx.filter_jit
        ... def solve(x, status):
        ...     return eqx.branched_error_if(x, status > 0, status - 1, ["too slow", "diverged"])
        >>> solve(jnp.array(1.0), jnp.array(2))
        Traceback (most recent call last):
        eqxlike.EqxlikeRuntimeError: diverged
        ...
    """
    try:
        return _checked(x, pred, index, msgs, on_error, sys._getframe(1))
    except Exception as error:
        hide_our_frames(error)
        raise


def _checked(
    x: PyTree,
    pred: Any,
    index: Any,
    messages: Sequence[str],
    on_error: str,
    caller: types.FrameType,
) -> PyTree:
    if on_error == "default":
        expected = f"one of {', '.join(_WORDS)}"
        on_error = _setting("ON_ERROR", "raise", expected, _WORDS.__contains__)
    elif on_error not in _WORDS:
        raise RuntimeError(
            f"`on_error` is {on_error!r}; expected is one of {', '.join(get_args(OnError))}."
        )
    if not messages:
        raise ValueError("`msgs` is empty; expected is at least one message.")
    place = f"{caller.f_code.co_filename}:{caller.f_lineno} in {caller.f_code.co_qualname}"
    report = FailureReport(tuple(messages), place)
    arrays, rest = split(x, lambda leaf: is_array(leaf) and leaf.dtype != jax.dtypes.float0)
    arrays = [_as_jax_array(array) for array in arrays]
    if type(index) is int:
        report, index = report.only(index), None
        if isinstance(pred, bool | int | float):
            if not pred:
                return rest.merge(arrays)
            if on_error == "raise":
                raise EqxlikeTracetimeError(report.messages[0])
    if not arrays:
        raise ValueError(
            "`x` contains no array. Expected is at least one: the check runs where the arrays of "
            "`x` are used. Pass the arrays that the next step of the computation needs."
        )
    pred = _array_of(pred, "pred", "a boolean or an array of booleans")
    if index is not None:
        expected = "an integer or an array of integers"
        index = _array_of(index, "index", expected)
        if not jnp.issubdtype(index.dtype, jnp.integer):
            raise TypeError(f"`index` is of dtype {index.dtype}; expected is {expected}.")
        index = jnp.max(index)
    if on_error != "off":
        # Under `jax.jit`, `jnp.any` makes a tracer even of a concrete predicate.
        is_scalar = isinstance(pred, Tracer) and pred.shape == () and pred.dtype == jnp.bool_
        failed = pred if is_scalar else jnp.any(pred)
        arrays = _handled(on_error, arrays, failed, index, report)
    return rest.merge(arrays)


def _as_jax_array(array: Any) -> Array:
    return array if isinstance(array, jax.Array) else jnp.asarray(array)


def _array_of(value: Any, name: str, expected: str) -> Array:
    if not is_array_like(value):
        raise TypeError(
            f"`{name}` is an object of type {type(value).__name__}; expected is {expected}."
        )
    return _as_jax_array(value)


def _handled(
    on_error: str, arrays: list[Array], failed: Array, index: Array | None, report: FailureReport
) -> list[Array]:
    """The arrays after a check. `failed` is whether the check fails."""
    if on_error == "raise":
        mesh = mesh_of([failed, *arrays]) if isinstance(failed, Tracer) else None
        passes = Check(report, does_raise=True, mesh=mesh).passes(failed, index)
        return needing(passes, arrays) if isinstance(passes, Tracer) else arrays
    if on_error == "breakpoint":
        passes = Check(report, does_raise=False).passes(failed, index)
        num_frames = _setting(
            "ON_ERROR_BREAKPOINT_FRAMES",
            "1",
            "the number of frames that the debugger shows, at least 1",
            lambda text: text.isdecimal() and int(text) >= 1,
        )
        debug = functools.partial(jax.debug.breakpoint, num_frames=int(num_frames))
        jax.lax.cond(passes, lambda: None, debug)
    if not isinstance(failed, Tracer) and not failed:
        return arrays
    return [jax.lax.select(failed, _invalid(array), array) for array in arrays]


def _invalid(array: Array) -> Array:
    if jnp.issubdtype(array.dtype, jnp.inexact):
        # Add NaN, instead of returning NaN. Then the gradient is the same as if the check passes.
        return array + jnp.nan
    if array.dtype == jnp.bool_:
        return jnp.ones_like(array)
    if jnp.issubdtype(array.dtype, jnp.integer):
        return jnp.full_like(array, jnp.iinfo(array.dtype).max)
    return array


def _setting(name: str, default: str, expected: str, is_valid: Callable[[str], bool]) -> str:
    """The value of the environment variable `EQXLIKE_<name>`, or else `EQX_<name>`.

    **Raises:** `ValueError` if the value is not valid; `expected` describes the valid values.
    """
    names = (f"EQXLIKE_{name}", f"EQX_{name}")
    name = next((each for each in names if each in os.environ), names[0])
    value = os.environ.get(name, default)
    if not is_valid(value):
        raise ValueError(f"The environment variable {name} is {value!r}; expected is {expected}.")
    return value
