"""Conditional breakpoints in compiled programs, and reports of JAX transformations."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Bool, PyTree

from .._compat import register_exclusion
from ..extend import split
from ..loops import unvmap_any

# The debugger skips the frames of this file, and opens in the caller of `breakpoint_if`.
register_exclusion(__file__)


def breakpoint_if(pred: Bool[Array, "..."], **kwargs: Any) -> None:
    r"""Enters `jax.debug.breakpoint` if any element of `pred` is true.

    **Arguments:**

    - `pred`: a boolean, a number, or an array of booleans or numbers. Under `jax.vmap`, all members
      of the batch enter the breakpoint if `pred` is true for one of them.
    - `**kwargs`: passed to `jax.debug.breakpoint`.

    **Raises:** `TypeError` if `pred` is of another type, or if `token` is passed. `breakpoint_if`
    returns no value, so no value could depend on the token.

    !!! example

        >>> import eqxlike as eqx, io, jax.numpy as jnp
        >>> @eqx.filter_jit
        ... def reciprocal(x):
        ...     eqx.debug.breakpoint_if(x == 0, stdin=io.StringIO("p x\nc\n"), backend="cli")
        ...     return 1 / x
        >>> print(reciprocal(jnp.array(2.0)))
        0.5
        >>> print(reciprocal(jnp.array(0.0)))
        Entering jdb:
        (jdb) Array(0., dtype=float32)
        (jdb) inf
    """
    if "token" in kwargs:
        raise TypeError(
            "`breakpoint_if` takes no `token`: it returns no value that later operations could "
            "depend on. Pass `ordered=True` to keep breakpoints in order."
        )
    enter = functools.partial(jax.debug.breakpoint, **kwargs)
    # JAX would turn a `cond` with a batched predicate into a `select`, which runs both branches. So
    # make the predicate the same for the whole batch.
    jax.lax.cond(unvmap_any(pred), enter, lambda: None)


# --- Reports of the transformations of a value ---


def announce_transform(
    x: PyTree, name: Any = None, intermediates: bool = False, announce: Callable[[str], Any] = print
) -> PyTree:
    """Returns `x`, and prints the JAX transformations that are applied to it.

    Each line is a chain of transformations, in the order in which they are applied. For example,
    `jvp_t:transpose:vmap:mlir` means that the tangents were transposed, vectorised and lowered.
    (`jvp_t` stands for the tangents of `jax.jvp`, and `jvp_p` for its primals.) The last item says
    how JAX uses the output: `impl` evaluates it, `abstract` infers its shape during tracing, and
    `mlir` lowers it for the compiler. Calls of a compiled program print nothing.

    **Arguments:**

    - `x`: any pytree. Leaves that are not arrays are passed through.
    - `name`: if not `None`, it is printed in brackets before each chain.
    - `intermediates`: whether to also print a line when a transformation is applied. The line has
      the chain up to this transformation.
    - `announce`: function that is called with each line. By default, `print`.

    **Returns:** `x`.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp
        >>> def double(x):
        ...     return 2 * eqx.debug.announce_transform(x, name="x")
        >>> print(jax.jit(jax.vmap(double))(jnp.arange(3)))
        (x) vmap:abstract
        (x) vmap:mlir
        [0 2 4]
    """
    arrays, rest = split(x)
    announcer = _Announcer(name, intermediates, announce)
    return rest.merge(_bind(arrays, announcer))


@dataclasses.dataclass(frozen=True, eq=False)
class _Announcer:
    """The options of one call of `announce_transform`.

    Two objects with the same options are not equal. If they were equal, JAX would reuse the result
    of the first call for the second call, and the second call would print nothing.
    """

    name: Any
    intermediates: bool
    announce: Callable[[str], Any]

    def reached(self, *transforms: str) -> None:
        """Calls `announce` with a chain of transforms."""
        prefix = "" if self.name is None else f"({self.name}) "
        self.announce(prefix + ":".join(transforms))

    def applied(self, *transforms: str) -> tuple[str, ...]:
        """Returns the transforms. Announces them if `intermediates` is true."""
        if self.intermediates:
            self.reached(*transforms)
        return transforms


# A primitive that returns any number of arrays unchanged. Its parameters are `announcer`, and
# `transforms`: the names of the transforms that have been applied, in order.
_announce_p = Primitive("announce_transform")
_announce_p.multiple_results = True


def _identity(end: str) -> Callable[..., list[Any]]:
    def evaluate(*arrays: Any, announcer: _Announcer, transforms: tuple[str, ...]) -> list[Any]:
        announcer.reached(*transforms, end)
        return list(arrays)

    return evaluate


def _bind(arrays: Any, announcer: _Announcer, *transforms: str) -> list[Any]:
    """Applies the primitive to all arrays except symbolic zeros."""
    nonzero, rest = split(list(arrays), lambda array: type(array) is not ad.Zero)
    return rest.merge(_announce_p.bind(*nonzero, announcer=announcer, transforms=transforms))


def _push_forward(
    primals: Any, tangents: Any, *, announcer: _Announcer, transforms: tuple[str, ...]
) -> tuple[list[Any], list[Any]]:
    announcer.applied(*transforms, "jvp")
    primals_out = _bind(primals, announcer, *transforms, "jvp_p")
    return primals_out, _bind(tangents, announcer, *transforms, "jvp_t")


def _pull_back(
    cotangents: Any, *_: Any, announcer: _Announcer, transforms: tuple[str, ...]
) -> list[Any]:
    return _bind(cotangents, announcer, *announcer.applied(*transforms, "transpose"))


def _batch(
    arrays: Any, axes: Any, *, announcer: _Announcer, transforms: tuple[str, ...]
) -> tuple[list[Any], Any]:
    return _bind(arrays, announcer, *announcer.applied(*transforms, "vmap")), axes


_announce_p.def_impl(_identity("impl"))
_announce_p.def_abstract_eval(_identity("abstract"))
ad.primitive_jvps[_announce_p] = _push_forward
ad.primitive_transposes[_announce_p] = _pull_back
batching.primitive_batchers[_announce_p] = _batch
_announced = _identity("mlir")
mlir.register_lowering(_announce_p, lambda _, *values, **params: _announced(*values, **params))
