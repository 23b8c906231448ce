"""From a callable to the function inside and the arguments bound to it, and what lives with it."""

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax

from ..._compat import PjitFunction
from ..._module import BoundMethod, LayerCall, Module, Wrapper
from ._arguments import WRAPPER, signature_of
from ._traces import Policy


class Unbound(NamedTuple):
    """A callable as a function and the arguments bound to it.

    - `function`: the function inside, whose signature calls have to fit.
    - `args`, `kwargs`: the arguments at the front and by name that are bound to it.
    - `is_call`: whether `function` is the `__call__` of a class, which somebody may replace. Then
      the first of `args` is called.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_call: bool = False


_FUNCTIONS = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    PjitFunction,
    jax.custom_jvp,
    jax.custom_vjp,
)
"""Callables of these types are the function themselves: they are compared by identity, and are not
changed in place.
"""


def unbind(callable_: Any) -> Unbound:
    """A callable as a function, and the arguments that are bound to it.

    Bound arguments go into `jit` like all others, so that none of their arrays becomes a constant
    and no other instance is taken for this one.
    """
    if isinstance(callable_, _FUNCTIONS):
        return Unbound(callable_, (), {})
    if isinstance(callable_, BoundMethod | types.MethodType):
        inner = unbind(callable_.__func__)
        return inner._replace(args=(*inner.args, callable_.__self__))
    if type(callable_).__call__ is functools.partial.__call__:
        inner = unbind(callable_.func)
        args = (*inner.args, *callable_.args)
        return inner._replace(args=args, kwargs={**inner.kwargs, **callable_.keywords})
    call = _call_of(type(callable_))
    if isinstance(call, types.FunctionType):
        return Unbound(call, (callable_,), {}, is_call=call is not call_it)
    inner = unbind(call)
    return inner._replace(args=(*inner.args, callable_))


def _call_of(cls: Any) -> Any:
    """The function that a call of an instance of `cls` calls, with the instance in front."""
    found = inspect.getattr_static(cls, "__call__", None)
    if isinstance(found, LayerCall):
        return found.function
    if isinstance(found, types.FunctionType | Module):
        return found
    # Any other descriptor is left to Python: what it gives may depend on the instance.
    return call_it


def call_it(callable_: Any, /, *args: Any, **kwargs: Any) -> Any:
    return callable_(*args, **kwargs)


class Description(NamedTuple):
    """A function to compile, as a user sees it.

    - `anchor`: the function that the user would name; inside one of our wrappers, the function that
      it wraps.
    - `name`: the name of the anchor.
    - `signature`: the signature of the function; `None` if it tells none.
    - `path`: the steps from the function to the anchor: what each calls, and how many arguments and
      which names are bound to that. The signature is made of nothing else.
    """

    anchor: Callable[..., Any]
    name: str
    signature: inspect.Signature | None
    path: tuple[Hashable, ...]


def describe(unbound: Unbound) -> Description:
    """The function to compile for a callable."""
    function, bound, bound_kwargs, _ = unbound
    counts = (len(bound), tuple(bound_kwargs))
    if not (bound and isinstance(bound[0], Wrapper) and function is type(bound[0]).__call__):
        anchor = type(bound[0]) if function is call_it else function
        name = getattr(anchor, "__name__", type(anchor).__name__)
        # The anchor itself is left out, since what is cached with it must not hold it.
        path = ((function is call_it, *counts),)
        return Description(anchor, name, signature_of(function), path)
    inner = unbind(bound[0].__wrapped__)
    description = describe(inner)
    description = description._replace(path=((function, *counts), *description.path))
    signature = description.signature
    parameters = () if signature is None else tuple(signature.parameters.values())
    is_variadic = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters)
    if signature is None or inner.kwargs or is_variadic or len(parameters) < len(inner.args):
        return description._replace(signature=signature_of(function))
    itself = inspect.Parameter(WRAPPER, inspect.Parameter.POSITIONAL_ONLY)
    parameters = [itself, *parameters[len(inner.args) :]]
    return description._replace(signature=signature.replace(parameters=parameters))


class Options:
    """Options of one compiled function, hashable although they may be dicts or lists; not mutated.

    - `values`: keyword arguments of `jax.jit` and the like.
    - `policy`: what a further trace leads to; `None` for nothing.
    """

    __slots__ = ("policy", "values")

    def __init__(self, values: dict[str, Any], policy: Policy | None = None):
        self.values = values
        self.policy = policy

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is Options and self.values == other.values and self.policy == other.policy
        )

    def __hash__(self) -> int:
        return hash(frozenset(self.values))


# --- Tables that may hold the function that they go with: they are in its `__dict__` ---


class _Attachment:
    """A value in the `__dict__` of a function, which knows the function that owns it.

    `functools.wraps` copies the `__dict__`, and so do tools that pickle functions by value. A copy
    in another function does not belong to it, and a pickled one belongs to none.
    """

    __slots__ = ("owner", "value")

    def __init__(self, owner: types.FunctionType | None = None, value: Any = None):
        self.owner = None if owner is None else weakref.ref(owner)
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return _Attachment, ()


def attached(function: types.FunctionType, name: str, make: Callable[[], Any]) -> Any:
    """The value attached to `function` under `name`; `make` makes it the first time.

    A `WeakKeyDictionary` of functions will not do: a value that holds its key would keep both for
    good. A function that is in a cycle with its own `__dict__` is garbage like any other.
    """
    found = vars(function).get(name)
    if found is None or found.owner is None or found.owner() is not function:
        found = vars(function)[name] = _Attachment(function, make())
    return found.value
