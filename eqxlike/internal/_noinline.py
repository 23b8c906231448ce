"""Functions that stay functions in a compiled program."""

from collections.abc import Callable
from typing import Any

from .._module import Module, module_update_wrapper
from .._transforms import filter_jit


class _Noinline(Module):
    """The function that `noinline` returns."""

    fn: Callable[..., Any]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return _call(self.fn, args, kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fn


@filter_jit
def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)


def noinline(
    fn: Callable[..., Any], abstract_fn: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """A function that is traced and lowered once for all calls with arguments of the same shapes.

    Where a program that is traced calls `fn` many times, that saves the time of the others.

    **Arguments:**

    - `fn`: any callable. Arrays in it, if it is a pytree, are inputs of the call.
    - `abstract_fn`: has no effect. In Equinox functions with the same may be exchanged for one
      another in a program that is compiled; here it is compiled anew.

    !!! example

        >>> import jax
        >>> @noinline
        ... def double(x):
        ...     print("traced")
        ...     return 2 * x
        >>> print(jax.jit(lambda x: double(x) + double(x + 1))(1.0))
        traced
        6.0
    """
    return module_update_wrapper(_Noinline(fn))
