"""`functools.partial` as a Module."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .._traceback import hide_our_frames
from ._module import Module

_Return = TypeVar("_Return")


class Partial(Module, Generic[_Return]):
    """As `functools.partial`, and a pytree: function and arguments are its children.

    So it may be passed to a transformation, which sees the arrays among the arguments, and those
    of `func` if that is a Module. `jax.tree_util.Partial` has the arguments as children only:
    what `func` holds is out of sight there.

    **Arguments:**

    - `func`: any callable.
    - `*args`, `**kwargs`: passed to it before, and beside, those of a call. A keyword of a call
        replaces one given here.

    It has them as `func`, `args` (a tuple) and `keywords` (a dict).

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
            # Not all that is written in C says how it is called.
            return inspect.signature(self.__call__)
