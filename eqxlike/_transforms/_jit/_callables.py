"""Splits callables into functions and bound arguments; attaches caches to functions."""

import dataclasses
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
    """A callable as a function and its bound arguments.

    - `function`: the innermost function. Calls must fit its signature.
    - `args`, `kwargs`: the bound positional and keyword arguments.
    - `is_call`: whether `function` is the `__call__` of a class. If so, `args[0]` is called
      instead, because `__call__` may be replaced later.
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
"""Callables of these types are not split into a function and arguments. They are compared by
identity, and do not change in place.
"""


def unbind(callable_: Any) -> Unbound:
    """Splits a callable into a function and its bound arguments.

    Bound arguments are passed to `jax.jit` like all other arguments. So the arrays in them do not
    become constants, and a call never uses the arrays of another instance.
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
    """The function that runs when an instance of `cls` is called. It takes the instance first."""
    found = inspect.getattr_static(cls, "__call__", None)
    if isinstance(found, LayerCall):
        return found.function
    if isinstance(found, types.FunctionType | Module):
        return found
    # `__call__` is a descriptor of another kind, so its value may depend on the instance. `call_it`
    # calls the instance, and Python resolves the descriptor.
    return call_it


def call_it(callable_: Any, /, *args: Any, **kwargs: Any) -> Any:
    return callable_(*args, **kwargs)


class Description(NamedTuple):
    """A function to compile, as a user sees it.

    - `anchor`: the function that the user knows. If the callable is a wrapper of eqxlike, this is
      the wrapped function.
    - `name`: the name of the anchor.
    - `signature`: the signature of the function; `None` if it is unknown.
    - `path`: one entry for each wrapper around the anchor. An entry has the function of the
      wrapper, and the number and the names of the bound arguments. The signature depends only on
      the anchor and the path.
    """

    anchor: Callable[..., Any]
    name: str
    signature: inspect.Signature | None
    path: tuple[Hashable, ...]


def describe(unbound: Unbound) -> Description:
    """Describes the function of a callable."""
    function, bound, bound_kwargs, _ = unbound
    counts = (len(bound), tuple(bound_kwargs))
    if not (bound and isinstance(bound[0], Wrapper) and function is type(bound[0]).__call__):
        anchor = type(bound[0]) if function is call_it else function
        name = getattr(anchor, "__name__", type(anchor).__name__)
        # The path must not contain the anchor: a cache that lives with the anchor may contain the
        # path, and must not keep the anchor alive.
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


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class Options:
    """Options of a compiled function. They are hashable even if a value is a dict or a list.

    - `values`: keyword arguments of `jax.jit` or `jax.pmap`. They are never changed.
    - `policy`: the reaction to a retrace, or `None`.
    """

    values: dict[str, Any] = dataclasses.field(hash=False)
    policy: Policy | None = None


# --- Caches in the `__dict__` of a function, which may refer to the function ---


class _Attachment:
    """A value in the `__dict__` of a function, with a weak reference to this function.

    `functools.wraps` copies the `__dict__` of a function, and so do tools that pickle functions by
    value. The weak reference shows that the copied value belongs to the original function, not to
    the copy. A pickled value belongs to no function.
    """

    __slots__ = ("owner", "value")

    def __init__(self, owner: types.FunctionType | None = None, value: Any = None):
        self.owner = None if owner is None else weakref.ref(owner)
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return _Attachment, ()


def attached(function: types.FunctionType, name: str, make: Callable[[], Any]) -> Any:
    """The value that is attached to `function` under `name`. The first call makes it with `make`.

    A `WeakKeyDictionary` with functions as keys would leak, because a value that refers to its key
    would keep both alive. A value in the `__dict__` of the function may refer to the function:
    Python collects this cycle.
    """
    found = vars(function).get(name)
    if found is None or found.owner is None or found.owner() is not function:
        found = vars(function)[name] = _Attachment(function, make())
    return found.value
