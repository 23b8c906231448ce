"""`functools.partial` as a Module."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .._traceback import hide_our_frames
from ._module import Module

_Return = TypeVar("_Return")


class Partial(Module, Generic[_Return]):
    """A `functools.partial` that is a pytree: function and arguments are its children.

    So it may be passed to a transformation, which sees the arrays among the arguments, and those
    of `func` if that is a Module. `jax.tree_util.Partial` has only the arguments as children, and
    hides what `func` holds.

    **Arguments:**

    - `func`: any callable.
    - `*args`, `**kwargs`: passed to `func` in front of the arguments of each call. A keyword of a
      call replaces one given here.

    Its fields are `func`, `args` (a tuple) and `keywords` (a dict).

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp
        >>> def affine(scale, x, *, shift):
        ...     return scale * x + shift
        >>> double = eqx.Partial(affine, jnp.array(2.0), shift=1.0)
        >>> double
        Partial(func=<function affine>, args=(weak_f32[],), keywords={'shift': 1.0})
        >>> print(double(3.0), double(3.0, shift=0.0))
        7.0 6.0
        >>> jax.tree.leaves(double)[1:]
        [Array(2., dtype=float32, weak_type=True), 1.0]
    """

    func: Callable[..., _Return]
    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def __init__(self, func: Callable[..., _Return], /, *args: Any, **kwargs: Any):
        self.func = func
        self.args = args
        self.keywords = kwargs

    def __call__(self, /, *args: Any, **kwargs: Any) -> _Return:
        try:
            return self.func(*self.args, *args, **{**self.keywords, **kwargs})
        except Exception as error:
            hide_our_frames(error)
            raise

    @property
    def __signature__(self) -> inspect.Signature:
        try:
            return inspect.signature(functools.partial(self.func, *self.args, **self.keywords))
        except (TypeError, ValueError):
            # Some functions written in C have no signature.
            return inspect.signature(self.__call__)
