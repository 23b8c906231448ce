"""Breakpoints in compiled programs, and announcements of the transformations they go through."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Bool, PyTree

from .._compat import register_exclusion
from .._partition import split

# The debugger opens in the frame of whoever called `breakpoint_if`.
register_exclusion(__file__)


@jax.custom_batching.custom_vmap
def _any_of_all(pred: Array) -> Array:
    """Whether `pred` is true anywhere, in any member of the batches that it is mapped over.

    Not batched itself, so that a `cond` on it stays one under `vmap`: `select` runs both branches.
    """
    return jnp.any(pred)


@_any_of_all.def_vmap
def _any_of_batch(axis_size: int, in_batched: list[bool], pred: Array) -> tuple[Array, bool]:
    del axis_size, in_batched
    return _any_of_all(pred), False


def breakpoint_if(pred: Bool[Array, "..."], **kwargs: Any) -> None:
    r"""`jax.debug.breakpoint`, entered only if `pred` is true.

    **Arguments:**

    - `pred`: a boolean or an array of them, of which one must be true. Under `jax.vmap` the
      breakpoint is entered for all members of the batch if it is for one.
    - `**kwargs`: passed to `jax.debug.breakpoint`.

    **Raises:** `TypeError` if `pred` is neither a boolean nor a number nor an array of them, or for
    `token`, which needs a returned value to be of use.

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
            "`breakpoint_if` takes no `token`: it returns nothing that a later computation could "
            "depend on. Pass `ordered=True` to keep breakpoints in order."
        )
    try:
        pred = jnp.asarray(pred)
    except (TypeError, ValueError):
        raise TypeError(
            "`breakpoint_if` expects a boolean or an array of booleans as `pred`; it was given an "
            f"object of type {type(pred).__name__}."
        ) from None
    enter = functools.partial(jax.debug.breakpoint, **kwargs)
    jax.lax.cond(_any_of_all(pred), enter, lambda: None)


# --- Announcements of the transformations that a value goes through, as they happen ---


class _Announcer:
    """The options of one call of `announce_transform`.

    Compared by identity: JAX evaluates and lowers an equation once for equal parameters, and so
    would keep silent about a second call with the same name.
    """

    def __init__(self, name: Any, intermediates: bool, announce: Callable[[str], Any]):
        self._prefix = "" if name is None else f"({name}) "
        self._intermediates = intermediates
        self._announce = announce

    def reached(self, transforms: tuple[str, ...], end: str) -> None:
        """Announces that `transforms` have been applied and the output met its `end`."""
        self._announce(self._prefix + ":".join((*transforms, end)))

    def applied(self, transforms: tuple[str, ...]) -> None:
        """Announces the last of `transforms`, after which others may come."""
        if self._intermediates:
            self._announce(self._prefix + ":".join(transforms))


# The identity of any number of arrays, with two parameters: `announcer`, and `transforms`, the
# names of those already applied, the first one first.
_announce_p = Primitive("announce_transform")
_announce_p.multiple_results = True


@_announce_p.def_impl
def _evaluate(*arrays: Any, announcer: _Announcer, transforms: tuple[str, ...]) -> list[Any]:
    announcer.reached(transforms, "impl")
    return list(arrays)


@_announce_p.def_abstract_eval
def _evaluate_abstractly(
    *shapes: Any, announcer: _Announcer, transforms: tuple[str, ...]
) -> list[Any]:
    announcer.reached(transforms, "abstract")
    return list(shapes)


def _lower(_: Any, *values: Any, announcer: _Announcer, transforms: tuple[str, ...]) -> list[Any]:
    announcer.reached(transforms, "mlir")
    return list(values)


def _push_forward(
    primals: Any, tangents: Any, *, announcer: _Announcer, transforms: tuple[str, ...]
) -> tuple[list[Any], list[Any]]:
    announcer.applied((*transforms, "jvp"))
    primals_out = _announce_p.bind(*primals, announcer=announcer, transforms=(*transforms, "jvp_p"))
    return primals_out, _bind_nonzero(tangents, announcer, (*transforms, "jvp_t"))


def _pull_back(
    cotangents: Any, *_: Any, announcer: _Announcer, transforms: tuple[str, ...]
) -> list[Any]:
    transforms = (*transforms, "transpose")
    announcer.applied(transforms)
    return _bind_nonzero(cotangents, announcer, transforms)


def _bind_nonzero(tangents: Any, announcer: _Announcer, transforms: tuple[str, ...]) -> list[Any]:
    """The same (co)tangents; those that JAX knows to be zero need not pass the primitive."""
    nonzero, rest = split(list(tangents), lambda tangent: type(tangent) is not ad.Zero)
    return rest.merge(_announce_p.bind(*nonzero, announcer=announcer, transforms=transforms))


def _batch(
    arrays: Any, axes: Any, *, announcer: _Announcer, transforms: tuple[str, ...]
) -> tuple[list[Any], Any]:
    transforms = (*transforms, "vmap")
    announcer.applied(transforms)
    return _announce_p.bind(*arrays, announcer=announcer, transforms=transforms), axes


ad.primitive_jvps[_announce_p] = _push_forward
ad.primitive_transposes[_announce_p] = _pull_back
batching.primitive_batchers[_announce_p] = _batch
mlir.register_lowering(_announce_p, _lower)


def announce_transform(
    x: PyTree,
    name: Any = None,
    intermediates: bool = False,
    announce: Callable[[str], Any] = print,
) -> PyTree:
    """The identity; says which JAX transformations are applied to `x`, as that happens.

    A line is a chain such as `jvp_t:transpose:vmap:mlir`, read from left to right: the tangents
    (`jvp_t`; the primals are `jvp_p`) were transposed, vectorised and lowered. Chains end where
    JAX does something with the output: `impl` evaluates it, `abstract` works out shapes while
    tracing, `mlir` lowers it for the compiler. What is compiled already announces nothing.

    **Arguments:**

    - `x`: any pytree. Leaves that are no arrays are passed through.
    - `name`: if not `None`, stands in brackets before each chain.
    - `intermediates`: whether to announce each transformation also at the moment it is applied,
      when the chain has not met its end yet.
    - `announce`: called with each line.

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
    return rest.merge(_announce_p.bind(*arrays, announcer=announcer, transforms=()))
