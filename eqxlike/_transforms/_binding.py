"""From any callable to the function that is compiled, what is bound to it, and its dispatcher."""

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import jax

from .._compat import PjitFunction
from .._module import BoundMethod, Module, Wrapper
from ._attached import attached
from ._dispatcher import Dispatcher
from ._spelling import Spelling, signature_of


class Options:
    """Keyword arguments, hashable although their values may be dicts or lists; not mutated."""

    __slots__ = ("values",)

    def __init__(self, values: dict[str, Any]):
        self.values = values

    def __eq__(self, other: object) -> bool:
        return type(other) is Options and self.values == other.values

    def __hash__(self) -> int:
        return hash(frozenset(self.values))


# Callables that are themselves the function: compared by identity, and not changed in place.
_FUNCTIONS = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    PjitFunction,
    jax.custom_jvp,
    jax.custom_vjp,
)


def unbind(callable_: Any) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """A callable as a function, and the arguments that are bound to it.

    These go into `jit` like the others, so that none of their arrays becomes a constant and no
    change of their state is missed.
    """
    if isinstance(callable_, _FUNCTIONS):
        return callable_, (), {}
    if isinstance(callable_, BoundMethod | types.MethodType):
        function, bound, kwargs = unbind(callable_.__func__)
        return function, (*bound, callable_.__self__), kwargs
    if isinstance(callable_, functools.partial):
        function, bound, kwargs = unbind(callable_.func)
        return function, (*bound, *callable_.args), {**kwargs, **callable_.keywords}
    call = type(callable_).__call__
    function, bound, kwargs = unbind(call) if isinstance(call, Module) else (call, (), {})
    return function, (*bound, callable_), kwargs


def _describe(
    function: Callable[..., Any], bound: tuple[Any, ...]
) -> tuple[Callable[..., Any], str, inspect.Signature | None]:
    """The function that a user would name, what its name is, and how `function` is called.

    Of one of our wrappers that is what it wraps, after the wrapper itself.
    """
    if not (bound and isinstance(bound[0], Wrapper) and function is type(bound[0]).__call__):
        name = getattr(function, "__name__", type(function).__name__)
        return function, name, signature_of(function)
    inner, inner_bound, inner_kwargs = unbind(bound[0].__wrapped__)
    anchor, name, signature = _describe(inner, inner_bound)
    if signature is None or inner_kwargs:
        return anchor, name, signature_of(function)
    parameters = list(signature.parameters.values())[len(inner_bound) :]
    if len(signature.parameters) < len(inner_bound) or any(
        each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters
    ):
        return anchor, name, signature_of(function)
    itself = inspect.Parameter("_eqxlike_wrapper", inspect.Parameter.POSITIONAL_ONLY)
    return anchor, name, signature.replace(parameters=[itself, *parameters])


# The dispatchers of the wrappers of each function, so that `filter_jit(f)` in a loop does not
# compile in each turn. They live with the function: in it, or here for what has no `__dict__`.
_NAME = "__eqxlike_dispatchers__"
_dispatchers: weakref.WeakKeyDictionary[Any, dict[Hashable, Dispatcher]] = (
    weakref.WeakKeyDictionary()
)


def dispatcher_for(
    function: Callable[..., Any], bound: tuple[Any, ...], donate: Any, options: Options
) -> Dispatcher:
    anchor, name, signature = _describe(function, bound)

    def make() -> Dispatcher:
        # A default that is left out is not mapped, and one that is filled in would be.
        is_mapping = any(getattr(type(each), "maps_arguments", False) for each in bound[:1])
        spelling = Spelling(name, signature, fills_defaults=not is_mapping)
        return Dispatcher(function, len(bound), spelling, donate, options.values)

    try:
        if isinstance(anchor, types.FunctionType):
            of_function = attached(anchor, _NAME, dict)
        else:
            of_function = _dispatchers.setdefault(anchor, {})
    except TypeError:
        # Not weakly referenced, as the `__call__` of a class in C: each wrapper has its own.
        return make()
    kinds = tuple(type(each) for each in bound if isinstance(each, Wrapper))
    key = (kinds, len(bound), donate, options)
    found = of_function.get(key)
    return of_function.setdefault(key, make()) if found is None else found
