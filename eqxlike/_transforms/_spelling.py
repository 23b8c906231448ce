"""One spelling for each call: keywords and defaults put in the places of the signature."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._compat import PjitFunction

Spelled = tuple[tuple[Any, ...], tuple[str, ...]]
"""`(args, names)`: the last `len(names)` of `args` are passed by these names, the rest by place."""

_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """The signature with which `function` is called, or `None` if it tells none.

    Not that of its `__wrapped__`, as `functools.wraps` would have it: a decorator may take other
    arguments and have other defaults. For what `jax.jit` returns, to fill in a default is not the
    same as to leave it out.
    """
    if isinstance(function, PjitFunction | jax.custom_jvp | jax.custom_vjp):
        return None
    try:
        return inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return None


_Plan = tuple[list[tuple[int, tuple[Any] | None]], tuple[str, ...]]
"""For each argument of the spelled call its place among those given, or a default in brackets; and
the names of the last ones.
"""

_MAX_PLANS = 1024

WRAPPER = "_eqxlike_wrapper"
"""The first parameter of a function that is called with one of our wrappers."""


class _Place:
    """Stands for the argument at this place of a call."""

    __slots__ = ("index",)

    def __init__(self, index: int):
        self.index = index


class Spelling:
    """How calls of one function are brought to one spelling.

    Arguments are in the order of the signature, defaults filled in; keyword-only ones come last.

    **Arguments:**

    - `name`: of the function, for messages.
    - `signature`: `None` for a function that tells none; calls are taken as they are spelled then.
    - `fills_defaults`: whether to fill in a default is the same as to leave it out.
    """

    def __init__(
        self, name: str, signature: inspect.Signature | None, *, fills_defaults: bool = True
    ):
        self.function_name = name
        self.signature = signature
        self.fills_defaults = fills_defaults
        self.parameters = [] if signature is None else list(signature.parameters.values())
        self.num_by_place = sum(parameter.kind in _BY_PLACE for parameter in self.parameters)
        self.keyword_only = tuple(
            parameter.name
            for parameter in self.parameters
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        )
        self.is_spelled_otherwise = (
            signature is None
            or bool(self.keyword_only)
            or any(parameter.kind in _VARIADIC for parameter in self.parameters)
        )
        # Which argument of a call goes where, for each way in which the function was called:
        # binding by `inspect` takes longer than the call itself.
        self._plans: dict[tuple[int, tuple[str, ...]], _Plan] = {}

    def spell(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Spelled:
        """The one spelling of this call. Raises `TypeError` if the function takes no such call."""
        if not kwargs and len(args) == self.num_by_place and not self.is_spelled_otherwise:
            return args, ()
        form = (len(args), tuple(kwargs))
        plan = self._plans.get(form)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[form] = self._plan(*form)
        given = (*args, *kwargs.values())
        return tuple(
            [given[place] if default is None else default[0] for place, default in plan[0]]
        ), plan[1]

    def _plan(self, num_args: int, given_names: tuple[str, ...]) -> "_Plan":
        """How calls are spelled that give so many arguments by place and these by name."""
        if self.signature is None:
            count = num_args + len(given_names)
            return [(place, None) for place in range(count)], given_names
        # Each argument stands for itself by its place in the call.
        places = [_Place(place) for place in range(num_args + len(given_names))]
        bound = self._bind(
            places[:num_args], dict(zip(given_names, places[num_args:], strict=True))
        )
        if self.fills_defaults:
            bound.apply_defaults()
        named = bound.kwargs
        extra = sorted(name for name in named if name not in self.keyword_only)
        names = (*(name for name in self.keyword_only if name in named), *extra)
        values = (*bound.args, *(named[name] for name in names))
        plan = [(value.index, None) if type(value) is _Place else (0, (value,)) for value in values]
        return plan, names

    def _bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        assert self.signature is not None
        try:
            return self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.function_name}() {error}") from None

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
        """The arguments of a call by the names of their parameters, as a message shows them."""
        try:
            bound = None if self.signature is None else self.signature.bind(*args, **kwargs)
        except TypeError:
            bound = None
        if bound is None:
            by_place = [(f"args[{place}]", argument) for place, argument in enumerate(args)]
            return by_place + list(kwargs.items())
        return list(bound.arguments.items())

    def parameter_names(self) -> list[str]:
        """What an option may name."""
        return [each.name for each in self.parameters if each.name != WRAPPER]

    def places(self, name: str, names: tuple[str, ...], num_args: int) -> tuple[int, ...]:
        """The places in a spelled call that belong to the parameter `name`.

        **Arguments:**

        - `names`, `num_args`: of the spelled call.
        """
        parameter = next(each for each in self.parameters if each.name == name)
        first_named = num_args - len(names)
        if parameter.kind in _BY_PLACE:
            place = self.parameters.index(parameter)
            return (place,) if place < first_named else ()
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            return tuple(range(self.num_by_place, first_named))
        is_extra = parameter.kind is inspect.Parameter.VAR_KEYWORD
        return tuple(
            first_named + index
            for index, each in enumerate(names)
            if each == name or (is_extra and each not in self.keyword_only)
        )
