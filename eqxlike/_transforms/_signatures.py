"""Types and helpers for the signatures of transformations.

A transformation returns an object, but is annotated as if it returned a function with the same
parameters. The reason is methods: in a class body, type checkers accept a function as a method, and
allow it to override a method of a base class. Type checkers do not accept an object as a method.
"""

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Literal, NamedTuple, ParamSpec, Protocol, TypedDict, TypeVar

from jax.typing import ArrayLike
from jaxtyping import PyTree

from .._module import Wrapper
from .._pytree import MISSING, describe_node, is_array_like

Params = ParamSpec("Params")
Output = TypeVar("Output")
Output_co = TypeVar("Output_co", covariant=True)
Function = TypeVar("Function", bound=Callable[..., Any])
Value = TypeVar("Value", bound=ArrayLike)
Aux = TypeVar("Aux")


DonateWord = Literal["all", "all-except-first", "warn", "warn-except-first", "none"]
DonateNames = tuple[str, ...] | list[str] | AbstractSet[str]
"""`Iterable[str]` would include every `str`, so a type checker would accept a misspelled word."""


class JitOptions(TypedDict, total=False):
    """The options that `filter_jit` passes on to `jax.jit`."""

    in_shardings: Any
    out_shardings: Any
    keep_unused: bool
    device: Any
    backend: str | None
    inline: Any
    compiler_options: dict[str, Any] | None


class _MapOptions(TypedDict, total=False):
    """The options that `filter_vmap` and `filter_pmap` share."""

    in_axes: PyTree[Any]
    out_axes: PyTree[Any]
    axis_name: Hashable
    axis_size: int | None


class VmapOptions(_MapOptions, total=False):
    """The options of `filter_vmap`, including the options passed on to `jax.vmap`."""

    spmd_axis_name: Hashable
    sum_match: bool


class PmapOptions(_MapOptions, total=False):
    """The options of `filter_pmap`, including the options passed on to `jax.pmap`."""

    donate: Literal["all", "warn", "none"]
    devices: Sequence[Any] | None
    backend: str | None


class GradOptions(TypedDict, total=False):
    """The options of `filter_grad`, including the options passed on to `jax.value_and_grad`."""

    mode: Any
    holomorphic: bool
    allow_int: bool


# --- Overloads: a compiled function has `.lower`; a compiled method is typed as a function ---


class _NamesSelf(Protocol):
    def __call__(_protocol, self: Any, *args: Any, **kwargs: Any) -> Any: ...


class _NamesCls(Protocol):
    def __call__(_protocol, cls: Any, *args: Any, **kwargs: Any) -> Any: ...


Method = TypeVar("Method", bound=_NamesSelf | _NamesCls)
"""A method: a function whose first parameter is named `self` or `cls`."""


class AnyArguments(Protocol[Output_co]):
    """`Callable[..., T]`, a function with unknown parameters.

    A function of this type also matches `Method`. So an overload for `AnyArguments` must come
    before the overload for `Method`.
    """

    def __call__(self, *, _no_parameter_of_yours: "AnyArguments[Any]") -> Output_co: ...


# --- The common parts of transformed functions ---


def optional_function(transform: Function) -> Function:
    """Makes a transformation return a decorator if it is called without a function."""
    signature = inspect.signature(transform)

    @functools.wraps(transform)
    def transform_or_decorator(fun: Any = MISSING, **options: Any) -> Any:
        if fun is MISSING:
            try:
                signature.bind(None, **options)
            except TypeError as error:
                raise TypeError(f"{transform.__name__}: {error}.") from None
            return functools.partial(transform_or_decorator, **options)
        check_callable(fun, transform.__name__)
        return transform(fun, **options)

    return transform_or_decorator  # pyright: ignore[reportReturnType]


class TransformedFunction(Wrapper):
    """Base class of transformed functions: a pytree that contains the original function.

    It has the metadata of the original function. In a class body, it becomes a method.
    """

    _function: Any

    @property
    def __wrapped__(self) -> Any:
        return self._function


class Call(NamedTuple):
    """The arguments of a call as one pytree, whose paths begin with `.args` or `.kwargs`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def check_callable(fun: Any, transform: str) -> None:
    """Raises `TypeError` unless `fun` can be called."""
    if not callable(fun):
        raise TypeError(
            f"{fun!r} is not a callable object: `{transform}` expects a function."
            f"{hint_of_forward(fun)}"
        )


def hint_of_forward(model: Any) -> str:
    """Says how to rename a method `forward`, as in PyTorch; empty if there is no such method."""
    hint = f" A Module is called through `__call__`: rename `{type(model).__name__}.forward`."
    return hint if hasattr(model, "forward") else ""


def differentiated_and_others(args: tuple[Any, ...], transform: str) -> tuple[Any, tuple[Any, ...]]:
    """Splits `args` into the first argument and the rest. Raises `TypeError` if `args` is empty."""
    if not args:
        raise TypeError(
            f"Functions wrapped with `eqxlike.{transform}` must have their first argument passed "
            "by position, not keyword. (This is the argument that is differentiated.)"
        )
    return args[0], args[1:]


def value_and_aux(output: Any, has_aux: bool, function: Any) -> tuple[Any, Any]:
    """Splits the output of `function` into the value to differentiate and the auxiliary output."""
    if not has_aux:
        return output, None
    name = getattr(function, "__name__", "the function")
    return pair(output, f"With `has_aux=True`, {name} must return a pair (value, aux)")


def pair(returned: Any, expectation: str) -> tuple[Any, Any]:
    """Splits a pair. Raises `TypeError` if `returned` is no pair; the message has `expectation`."""
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        kind = f"an object of type {type(returned).__name__}"
        got = describe_node(returned) if is_array_like(returned) else kind
        raise TypeError(f"{expectation}; it returned {got}.")
    first, second = returned
    return first, second
