"""One spelling for each call: keywords and defaults put in the places of the signature."""

import inspect
from collections.abc import Callable
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
        self.is_variadic = (
            self.signature is None
            or not fills_defaults
            or any(parameter.kind in _VARIADIC for parameter in self.parameters)
        )
        self.num_by_place = sum(parameter.kind in _BY_PLACE for parameter in self.parameters)
        self.keyword_only = tuple(
            parameter.name
            for parameter in self.parameters
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        )
        # Which argument of a call goes where, for each way in which the function was called:
        # binding by `inspect` takes longer than the call itself.
        self._plans: dict[tuple[int, tuple[str, ...]], list[tuple[bool, Any]]] = {}

    def spell(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Spelled:
        """The one spelling of this call. Raises `TypeError` if the function takes no such call."""
        if self.signature is None:
            return (*args, *kwargs.values()), tuple(kwargs)
        if self.is_variadic:
            return self._spell_variadic(args, kwargs)
        if not kwargs and len(args) == self.num_by_place and not self.keyword_only:
            return args, ()
        shape = (len(args), tuple(kwargs))
        plan = self._plans.get(shape)
        if plan is None:
            plan = self._plans[shape] = self._plan(args, kwargs)
        spelled = tuple(
            source if is_default else args[source] if type(source) is int else kwargs[source]
            for is_default, source in plan
        )
        return spelled, self.keyword_only

    def _plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[bool, Any]]:
        """For each parameter `(True, default)`, or `(False, where to find it in the call)`."""
        self._bind(args, kwargs)
        plan: list[tuple[bool, Any]] = []
        for place, parameter in enumerate(self.parameters):
            if place < len(args) and parameter.kind in _BY_PLACE:
                plan.append((False, place))
            elif parameter.name in kwargs:
                plan.append((False, parameter.name))
            else:
                plan.append((True, parameter.default))
        return plan

    def _spell_variadic(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Spelled:
        bound = self._bind(args, kwargs)
        if self.fills_defaults:
            bound.apply_defaults()
        named = dict(bound.kwargs)
        extra = sorted(name for name in named if name not in self.keyword_only)
        names = (*(name for name in self.keyword_only if name in named), *extra)
        return (*bound.args, *(named[name] for name in names)), names

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        assert self.signature is not None
        try:
            return self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.function_name}() {error}") from None

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
