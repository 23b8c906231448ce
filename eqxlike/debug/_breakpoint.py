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

    - `pred`: a boolean, a number, or an array of them. Under `jax.vmap` the breakpoint is entered
      for all members of the batch if `pred` is true for one.
    - `**kwargs`: passed to `jax.debug.breakpoint`.

    **Raises:** `TypeError` if `pred` is not a boolean, a number or an array of them; if `token` is
    passed: `breakpoint_if` returns no value that could depend on it.

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
    # JAX turns a `cond` with a batched predicate into a `select`, which runs both branches.
    jax.lax.cond(unvmap_any(pred), enter, lambda: None)


# --- Reports of the transformations of a value ---


def announce_transform(
    x: PyTree, name: Any = None, intermediates: bool = False, announce: Callable[[str], Any] = print
) -> PyTree:
    """The identity, which prints the JAX transformations of `x` as they are applied.

    Each line is a chain of transformations in order, such as `jvp_t:transpose:vmap:mlir`: the
    tangents (`jvp_t`; primals are `jvp_p`) were transposed, vectorised and lowered. The last item
    says how JAX uses the output: `impl` evaluates it, `abstract` infers shapes while tracing,
    `mlir` lowers it for the compiler. Calls of a compiled program print nothing.

    **Arguments:**

    - `x`: any pytree. Leaves that are not arrays are passed through.
    - `name`: if not `None`, it is printed in brackets before each chain.
    - `intermediates`: whether to also print each transformation when it is applied, before the
      chain is complete.
    - `announce`: called with each line; `print` by default.

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

    It is compared by identity. JAX evaluates and lowers an equation once for equal parameters, so
    that equal options of a second call would print nothing.
    """

    name: Any
    intermediates: bool
    announce: Callable[[str], Any]

    def reached(self, *transforms: str) -> None:
        """Announces a chain of transforms."""
        prefix = "" if self.name is None else f"({self.name}) "
        self.announce(prefix + ":".join(transforms))

    def applied(self, *transforms: str) -> tuple[str, ...]:
        """Returns the transforms, and announces them if `intermediates`."""
        if self.intermediates:
            self.reached(*transforms)
        return transforms


# The identity of any number of arrays. Its parameters are `announcer` and `transforms`, the names
# of the transforms that have been applied, in order.
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
