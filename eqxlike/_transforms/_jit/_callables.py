"""From a callable to the function inside, the arguments bound to it, and its dispatcher."""

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax

from ..._compat import PjitFunction
from ..._module import BoundMethod, LayerCall, Module, Wrapper
from ._arguments import WRAPPER, ArgumentOrder, signature_of
from ._cache import attached
from ._dispatch import Dispatcher
from ._traces import History, Policy, place_of


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
        return Unbound(call, (callable_,), {}, is_call=call is not _call)
    inner = unbind(call)
    return inner._replace(args=(*inner.args, callable_))


def _call_of(cls: Any) -> Any:
    """The function that a call of an instance of `cls` calls, with the instance in front."""
    found = inspect.getattr_static(cls, "__call__", None)
    if isinstance(found, LayerCall):
        return found.__wrapped__
    if isinstance(found, types.FunctionType | Module):
        return found
    # Any other descriptor is left to Python: what it gives may depend on the instance.
    return _call


def _call(callable_: Any, /, *args: Any, **kwargs: Any) -> Any:
    return callable_(*args, **kwargs)


class _Description(NamedTuple):
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


def _describe(unbound: Unbound) -> _Description:
    function, bound, bound_kwargs, _ = unbound
    counts = (len(bound), tuple(bound_kwargs))
    if not (bound and isinstance(bound[0], Wrapper) and function is type(bound[0]).__call__):
        anchor = type(bound[0]) if function is _call else function
        name = getattr(anchor, "__name__", type(anchor).__name__)
        # The anchor itself is left out, since what is cached with it must not hold it.
        path = ((function is _call, *counts),)
        return _Description(anchor, name, signature_of(function), path)
    inner = unbind(bound[0].__wrapped__)
    description = _describe(inner)
    description = description._replace(path=((function, *counts), *description.path))
    signature = description.signature
    parameters = () if signature is None else tuple(signature.parameters.values())
    is_variadic = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters)
    if signature is None or inner.kwargs or is_variadic or len(parameters) < len(inner.args):
        return description._replace(signature=signature_of(function))
    itself = inspect.Parameter(WRAPPER, inspect.Parameter.POSITIONAL_ONLY)
    parameters = [itself, *parameters[len(inner.args) :]]
    return description._replace(signature=signature.replace(parameters=parameters))


# --- The dispatcher of a callable ---


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


_NAME = "__eqxlike_dispatchers__"
_dispatchers: weakref.WeakKeyDictionary[Any, dict[Hashable, Dispatcher]] = (
    weakref.WeakKeyDictionary()
)
"""The dispatchers of each function live with it, so that `filter_jit(f)` in a loop does not compile
in each turn: in the `__dict__` of the function, or here if it has none.
"""


def dispatcher_for(unbound: Unbound, donate: Any, options: Options) -> Dispatcher:
    """The dispatcher of a callable: the same one however often the function is wrapped.

    A callable that would be called otherwise gets another one.
    """
    function, bound, bound_kwargs, _ = unbound
    description = _describe(unbound)
    wrapper_types = tuple(type(each) for each in bound if isinstance(each, Wrapper))
    key = (description.path, wrapper_types, donate, options)

    def make() -> Dispatcher:
        # A default that is left out is not mapped, and one that is filled in would be.
        is_mapping = any(getattr(type(each), "maps_arguments", False) for each in bound[:1])
        name, signature = description.name, description.signature
        return Dispatcher(
            function=_call if unbound.is_call else function,
            unbound_function=function,
            num_bound=len(bound),
            bound_names=tuple(bound_kwargs),
            order=ArgumentOrder(name, signature, fills_defaults=not is_mapping),
            donate=donate,
            jit_options=options.values,
            history=History(*place_of(description.anchor), options.policy, key),
            full_name=_full_name(description.anchor, name),
        )

    anchor = description.anchor
    try:
        if isinstance(anchor, types.FunctionType):
            of_function = attached(anchor, _NAME, dict)
        else:
            of_function = _dispatchers.setdefault(anchor, {})
    except TypeError:
        # Some callables, as the `__call__` of a class in C, have no weak references: each wrapper
        # has a dispatcher of its own.
        return make()
    found = of_function.get(key)
    return of_function.setdefault(key, make()) if found is None else found


def _full_name(function: Callable[..., Any], name: str) -> str:
    module = getattr(function, "__module__", None)
    return name if module is None else f"{module}.{getattr(function, '__qualname__', name)}"
