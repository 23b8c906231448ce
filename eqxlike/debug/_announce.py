"""Announcements of the transformations that a value goes through, as they happen."""

from collections.abc import Callable
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import PyTree

from .._partition import split


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
