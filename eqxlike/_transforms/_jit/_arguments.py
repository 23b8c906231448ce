"""What a call consists of: the function and its bound arguments, and the order of all arguments.

The order decides which array of a call a sharding belongs to, and which arrays are donated.
"""

import contextlib
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from inspect import Parameter
from typing import Any, NamedTuple, get_args

import jax
from jaxtyping import PyTree

from ..._compat import PjitFunction
from ..._module import BoundMethod, LayerCall, Module, Wrapper
from ..._partition import ATOMS, flatten
from ..._traceback import compile_function, tuple_of
from .._flat_call import shardings_of_arrays
from .._signatures import DonateWord

# --- Callables as functions and bound arguments ---


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


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of `function` itself, or `None` if it is unknown.

    The signature of `function.__wrapped__`, an attribute that `functools.wraps` sets, is ignored,
    because `function` may take other arguments and have other defaults. For functions compiled by
    `jax.jit`, the result is `None`, because `jax.jit` treats an omitted argument differently from
    an argument that equals the default.
    """
    if isinstance(function, PjitFunction | jax.custom_jvp | jax.custom_vjp):
        return None
    try:
        return inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return None


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


_attaching = threading.RLock()


def attached(function: types.FunctionType, name: str, make: Callable[[], Any]) -> Any:
    """The value that is attached to `function` under `name`. The first call makes it with `make`.

    A `WeakKeyDictionary` with functions as keys would leak, because a value that refers to its key
    would keep both alive. A value in the `__dict__` of the function may refer to the function:
    Python collects this cycle.
    """
    # With the lock, threads that ask for a new value at the same time get the same value.
    with _attaching:
        found = vars(function).get(name)
        if found is None or found.owner is None or found.owner() is not function:
            found = vars(function)[name] = _Attachment(function, make())
        return found.value


# --- The order of arguments ---


_BY_PLACE = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


_MAX_PLANS = 1024

WRAPPER = "_eqxlike_wrapper"
"""The name of the first parameter of a `__call__`, if this parameter is a wrapper of eqxlike."""


class _Placeholder(str):
    """Placeholder for an argument. Its text is code that reads `args` or `kwargs`."""

    __slots__ = ()


def _is_constant(default: Any) -> bool:
    """Whether passing this default is the same as omitting the argument. `False` for arrays."""
    if type(default) is tuple:
        return all(map(_is_constant, default))
    return type(default) in ATOMS


class ArgumentOrder:
    """Arranges the arguments of one function in the same order, however a call passes them.

    Arguments are in the order of the signature, with keyword-only arguments last. Defaults are
    filled in if they are constants: numbers, strings and similar values, and tuples of these.

    **Arguments:**

    - `name`: the name of the function, for messages.
    - `signature`: the signature of the function. With `None`, arguments stay in the order of the
      call.
    - `unbound`: the function and its bound arguments. Only their number and names are kept.
    - `fills_defaults`: whether to fill in omitted defaults.
    """

    def __init__(
        self,
        name: str,
        signature: inspect.Signature | None,
        unbound: Unbound,
        fills_defaults: bool,
    ):
        self.function_name = name
        self.signature = signature
        self.num_bound = len(unbound.args)
        self.bound_names = tuple(unbound.kwargs)
        self.fills_defaults = fills_defaults
        self.parameters = [] if signature is None else list(signature.parameters.values())
        self.by_place = [each.name for each in self.parameters if each.kind in _BY_PLACE]
        self.num_by_place = len(self.by_place)
        self.keyword_only = tuple(
            each.name for each in self.parameters if each.kind is Parameter.KEYWORD_ONLY
        )
        self.must_be_arranged = (
            signature is None
            or bool(self.keyword_only)
            or any(parameter.kind in _VARIADIC for parameter in self.parameters)
        )
        # One plan for each pattern of positional and keyword arguments. The plans are stored,
        # because binding by `inspect` takes longer than the call itself.
        self._plans: dict[tuple[int, tuple[str, ...]], tuple[Any, tuple[str, ...]]] = {}

    def arrange(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        """Orders the arguments of a call.

        Returns `(ordered, names)`. The last `len(names)` of the ordered arguments have these names.
        The rest are positional.

        **Raises:** `TypeError` if the arguments do not fit the signature.
        """
        if not kwargs and len(args) == self.num_by_place and not self.must_be_arranged:
            return args, ()
        pattern = (len(args), tuple(kwargs))
        plan = self._plans.get(pattern)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[pattern] = self._plan(*pattern)
        return plan[0](args, kwargs), plan[1]

    def _plan(
        self, num_args: int, given_names: tuple[str, ...]
    ) -> tuple[Callable[..., tuple[Any, ...]], tuple[str, ...]]:
        """Makes the plan for calls with this number of arguments and these keywords.

        Returns a function of `args` and `kwargs` that returns the ordered arguments, and the names
        of the last ordered arguments.
        """
        args = [_Placeholder(f"args[{place}]") for place in range(num_args)]
        kwargs = {name: _Placeholder(f"kwargs[{name!r}]") for name in given_names}
        if self.signature is None:
            values, names = [*args, *kwargs.values()], given_names
        else:
            bound = self._bind(args, kwargs)
            self._fill_defaults(bound)
            named = bound.kwargs
            extra = sorted(name for name in named if name not in self.keyword_only)
            names = (*(name for name in self.keyword_only if name in named), *extra)
            values = [*bound.args, *(named[name] for name in names)]
        namespace: dict[str, Any] = {}
        parts = []
        for value in values:
            if type(value) is not _Placeholder:
                namespace[default := f"default{len(parts)}"] = value
            parts.append(value if type(value) is _Placeholder else default)
        lines = ["def arrange(args, kwargs):", f"    return {tuple_of(parts)}"]
        return compile_function(lines, namespace, f"call of {self.function_name}"), names

    def _fill_defaults(self, bound: inspect.BoundArguments) -> None:
        given = bound.arguments
        is_any_left_out = False
        bound.arguments = {}
        for parameter in self.parameters:
            name, default = parameter.name, parameter.default
            if name in given:
                bound.arguments[name] = given[name]
                continue
            can_be_given = parameter.kind is not Parameter.POSITIONAL_ONLY or not is_any_left_out
            if self.fills_defaults and can_be_given and _is_constant(default):
                bound.arguments[name] = default
            elif parameter.kind in _BY_PLACE:
                is_any_left_out = True

    def _bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        assert self.signature is not None
        try:
            return self.signature.bind(*args, **kwargs)
        except TypeError as error:
            hint = ""
            if "too many positional" in str(error):
                hint = (
                    f": it takes ({', '.join(self.by_place)}), and got {len(args)}. Pass arrays "
                    "that belong together, such as inputs and targets, as one argument, a tuple."
                )
            raise TypeError(f"{self.function_name}() {error}{hint}") from None

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
        """A pair for each argument: the name that messages show, and the argument."""
        with contextlib.suppress(TypeError):
            if self.signature is not None:
                return list(self.signature.bind(*args, **kwargs).arguments.items())
        return [(f"args[{place}]", each) for place, each in enumerate(args)] + list(kwargs.items())

    def labels(self, num_args: int, names: tuple[str, ...]) -> list[str]:
        """The names of `num_args` ordered arguments in messages. The last ones are `names`."""
        num_by_place = num_args - len(names)
        more = (each.name for each in self.parameters if each.kind is Parameter.VAR_POSITIONAL)
        variadic = next(more, "args")
        rest = [f"{variadic}[{index}]" for index in range(num_by_place - self.num_by_place)]
        return [*self.by_place[:num_by_place], *rest, *names]

    def unknown_among(self, names: Iterable[str]) -> str:
        """Part of a message: says which of `names` is not a parameter; `""` if all are."""
        known = [each.name for each in self.parameters if each.name != WRAPPER]
        has = f"it has {', '.join(map(repr, known)) or 'none'}."
        for name in names:
            if name not in known:
                return f"{self.function_name} has no parameter named {name!r}; {has}"
        return ""

    def places(self, name: str, names: tuple[str, ...], num_args: int) -> tuple[int, ...]:
        """The indices of the arguments of the parameter `name` in an ordered call.

        **Arguments:**

        - `names`, `num_args`: the names and the number of arguments of the ordered call.
        """
        kind = next(each.kind for each in self.parameters if each.name == name)
        if kind not in _VARIADIC:
            labels = self.labels(num_args, names)
            return (labels.index(name),) if name in labels else ()
        first_named = num_args - len(names)
        if kind is Parameter.VAR_POSITIONAL:
            return tuple(range(self.num_by_place, first_named))
        extra = (place for place, each in enumerate(names) if each not in self.keyword_only)
        return tuple(first_named + place for place in extra)


# --- The shardings of arguments: `filter_jit(in_shardings=...)` ---


def check_in_shardings(in_shardings: PyTree, order: ArgumentOrder) -> None:
    """Raises `ValueError` if a key of `in_shardings` is not a parameter of the function."""
    if isinstance(in_shardings, Mapping) and (unknown := order.unknown_among(in_shardings)):
        raise ValueError(
            "The keys of `filter_jit(..., in_shardings=...)` must be names of parameters of the "
            f"function. {unknown}"
        )


def shardings_of_arguments(
    in_shardings: PyTree, order: ArgumentOrder, ordered: tuple[Any, ...], names: tuple[str, ...]
) -> list[Any]:
    """The sharding, or `None`, for each array of an ordered call.

    **Arguments:**

    - `in_shardings`: a prefix of the tuple of arguments; or a dictionary from names of parameters
      to prefixes of their arguments. Arguments that are not in the dictionary stay where they are.
    - `ordered`, `names`: the arguments of the ordered call, and the names of the last arguments.

    **Raises:** `ValueError` if `in_shardings` is not a prefix, or has too few or too many entries.
    """
    if isinstance(in_shardings, Mapping):
        num_by_place = len(ordered) - len(names)
        by_name = dict(zip(names, ordered[num_by_place:], strict=True))
        shardings = []
        for name, argument in order.named(ordered[:num_by_place], by_name):
            label = f"in_shardings[{name!r}]"
            shardings += shardings_of_arrays(label, in_shardings.get(name), argument)
        return shardings
    # Bound arguments, such as the instance of a method, stay where they are.
    unplaced = shardings_of_arrays("in_shardings", None, ordered[: order.num_bound])
    args = ordered[order.num_bound :]
    if isinstance(in_shardings, tuple | list):
        labels = order.labels(len(ordered), names)[order.num_bound :]
        parameters = {parameter.name: parameter for parameter in order.parameters}
        needed = [
            label
            for label, argument in zip(labels, args, strict=True)
            if label not in order.bound_names and not _is_default(argument, parameters.get(label))
        ]
        rest = labels[len(in_shardings) :]
        if len(in_shardings) > len(args) or not set(needed).isdisjoint(rest):
            raise ValueError(
                f"`in_shardings` has {len(in_shardings)} entries, but this call of "
                f"{order.function_name} has {len(needed)} arguments to place: "
                f"{', '.join(needed) or 'none'}. Expected is one entry for each, in this order, "
                "with `None` for an argument that stays where it is; or a dictionary by name, "
                "such as `in_shardings={'x': sharding}`."
            )
        in_shardings = (*in_shardings, *[None] * len(rest))
    return unplaced + shardings_of_arrays("in_shardings", in_shardings, args)


def _is_default(argument: Any, parameter: Parameter | None) -> bool:
    """Returns `True` if `argument` and the default of `parameter` have the same Structure."""
    if parameter is None or parameter.default is Parameter.empty:
        return False
    _, default = flatten(parameter.default, is_output=True)
    return flatten(argument, is_output=True, with_abstract=True)[1] is default


# --- Donated arguments: one of five words, or names of parameters ---
#
# If two arguments share a donated buffer, JAX raises an error. `explain_error` adds the paths of
# both arguments to the error.


Donate = DonateWord | str | tuple[str, ...]

_WORDS = get_args(DonateWord)


def check_donate(donate: Donate | Iterable[str], order: ArgumentOrder) -> Donate:
    """Returns `donate` as one of the five words, or as a tuple of parameter names.

    **Raises:** `ValueError` if a word or name is unknown.
    """
    if donate in _WORDS:
        return donate  # pyright: ignore
    donate_names = (donate,) if isinstance(donate, str) else tuple(donate)
    if unknown := order.unknown_among(donate_names):
        raise ValueError(
            f"`filter_jit(..., donate=...)` must be one of {', '.join(map(repr, _WORDS))}, or "
            f"names of parameters of the function. {unknown}"
        )
    return donate_names


def donated_places(
    donate: Donate, order: ArgumentOrder, names: tuple[str, ...], num_args: int
) -> tuple[int, ...]:
    """The indices of the donated arguments in an ordered call.

    **Arguments:**

    - `donate`: any value except `"none"`. As in Equinox, "first" means the first argument after the
      bound arguments, such as a Module that is called.
    - `names`, `num_args`: the names and the number of arguments of the ordered call.
    """
    if isinstance(donate, tuple):
        return tuple(place for name in donate for place in order.places(name, names, num_args))
    spared = order.num_bound if donate.endswith("-except-first") else None
    return tuple(place for place in range(num_args) if place != spared)
