"""Gradients with respect to the floating-point arrays of the first argument."""

import functools
from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

import jax
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ..._missing import MISSING
from ..._module import field
from ..._partition import UNTRACED, Rest, split
from ..._pytree import is_array_or_traced_reference, is_inexact_array
from .._signatures import Aux, GradOptions, Params, Value
from .._wrapping import (
    TransformedFunction,
    check_callable,
    differentiated_and_others,
    value_and_aux,
)
from ._advice import advised
from ._by_mode import DifferentiationMode, check_mode, value_and_grad_by


class _GradFunction(TransformedFunction):
    """The function that `filter_value_and_grad` and `filter_grad` return."""

    _has_aux: bool = field(static=True)
    _returns_value: bool = field(static=True)
    _mode: DifferentiationMode | None
    _grad_options: tuple[tuple[str, Any], ...] = field(static=True)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        differentiated, others = differentiated_and_others(args, "filter_{grad, value_and_grad}")
        arrays, rest = split(differentiated, is_inexact_array)
        # Leaves of the auxiliary output that are no arrays cannot pass through JAX.
        aux_rest: Rest = UNTRACED

        def of_arrays(arrays: list[Any]) -> Any:
            nonlocal aux_rest
            output = self._function(rest.merge(arrays), *others, **kwargs)
            value, aux = value_and_aux(output, self._has_aux, self)
            aux_arrays, aux_rest = split(aux, is_array_or_traced_reference)
            return value, aux_arrays

        options, name = dict(self._grad_options), getattr(self, "__name__", "the function")
        with advised(self._mode, name):
            if self._mode is None:
                differentiated_function = jax.value_and_grad(of_arrays, has_aux=True, **options)
                (value, aux_arrays), gradients = differentiated_function(arrays)
            else:
                (value, aux_arrays), gradients = value_and_grad_by(
                    self._mode, of_arrays, arrays, rest, options, name
                )
        gradient = rest.merge_into(None, gradients)
        aux = aux_rest.merge(aux_arrays)
        if self._returns_value:
            return ((value, aux), gradient) if self._has_aux else (value, gradient)
        return (gradient, aux) if self._has_aux else gradient


def _make(
    fun: Any, has_aux: bool, returns_value: bool, mode: Any, gradkwargs: dict[str, Any]
) -> Any:
    if "argnums" in gradkwargs:
        raise ValueError(
            "`argnums` should not be passed. If you need to differentiate multiple objects then "
            "collect them into a tuple and pass that as the first argument."
        )
    transform = "filter_value_and_grad" if returns_value else "filter_grad"
    if mode is not None:
        check_mode(mode, transform)
        # Without a mode JAX says so, when called.
        if unknown := gradkwargs.keys() - GradOptions.__annotations__.keys():
            raise TypeError(f"`{transform}` got an unexpected keyword argument {min(unknown)!r}.")
    if fun is MISSING:
        return functools.partial(
            _make,
            has_aux=has_aux,
            returns_value=returns_value,
            mode=mode,
            gradkwargs=gradkwargs,
        )
    check_callable(fun, transform)
    return _GradFunction(fun, has_aux, returns_value, mode, tuple(sorted(gradkwargs.items())))


@overload
def filter_value_and_grad(
    *, has_aux: Literal[False] = False, **gradkwargs: Unpack[GradOptions]
) -> Callable[[Callable[Params, Value]], Callable[Params, tuple[Value, PyTree]]]: ...
@overload
def filter_value_and_grad(
    *, has_aux: Literal[True], **gradkwargs: Unpack[GradOptions]
) -> Callable[
    [Callable[Params, tuple[Value, Aux]]], Callable[Params, tuple[tuple[Value, Aux], PyTree]]
]: ...
@overload
def filter_value_and_grad(
    *, has_aux: bool, **gradkwargs: Unpack[GradOptions]
) -> Callable[[Callable[Params, Any]], Callable[Params, tuple[Any, PyTree]]]: ...
@overload
def filter_value_and_grad(
    fun: Callable[Params, Value],
    *,
    has_aux: Literal[False] = False,
    **gradkwargs: Unpack[GradOptions],
) -> Callable[Params, tuple[Value, PyTree]]: ...
@overload
def filter_value_and_grad(
    fun: Callable[Params, tuple[Value, Aux]],
    *,
    has_aux: Literal[True],
    **gradkwargs: Unpack[GradOptions],
) -> Callable[Params, tuple[tuple[Value, Aux], PyTree]]: ...
@overload
def filter_value_and_grad(
    fun: Callable[Params, Any], *, has_aux: bool, **gradkwargs: Unpack[GradOptions]
) -> Callable[Params, tuple[Any, PyTree]]: ...
def filter_value_and_grad(
    fun: Callable[..., Any] = MISSING,
    *,
    has_aux: bool = False,
    mode: DifferentiationMode | None = None,
    **gradkwargs: Any,
) -> Any:
    """The value of a function and its gradient in the floating-point arrays of its first argument.

    **Arguments:**

    - `fun`: a function from any arguments to a floating-point scalar. Without it, a decorator is
      returned.
    - `has_aux`: whether `fun` returns `(value, aux)`, with `aux` any pytree.
    - `mode`: how to differentiate, one of those in `eqxlike.ad`; `None` is JAX's reverse mode.
    - `**gradkwargs`: `holomorphic`, `allow_int` as in `jax.value_and_grad`.

    **Returns:** a function of the same arguments that returns `(value, gradient)`, or
    `((value, aux), gradient)`. The gradient has the structure of the first argument, with `None`
    for every leaf that is not a floating-point or complex array.

    **Raises:** `ValueError` if `argnums` is given, and `TypeError` if `mode` is no mode; when
    called, `TypeError` if the first argument is passed by keyword or the value is no floating-point
    scalar. An error of JAX's, which a mode cannot differentiate, has a note that names one which
    can.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> @eqx.filter_value_and_grad
        ... def loss(parameters, x):
        ...     return (parameters["scale"] * x).sum() ** parameters["power"]
        >>> value, gradient = loss({"scale": jnp.array(3.0), "power": 2}, jnp.ones(2))
        >>> print(value, gradient["scale"], gradient["power"])
        36.0 24.0 None
    """
    return _make(fun, has_aux, True, mode, gradkwargs)


@overload
def filter_grad(
    *, has_aux: Literal[False] = False, **gradkwargs: Unpack[GradOptions]
) -> Callable[[Callable[Params, ArrayLike]], Callable[Params, PyTree]]: ...
@overload
def filter_grad(
    *, has_aux: Literal[True], **gradkwargs: Unpack[GradOptions]
) -> Callable[[Callable[Params, tuple[ArrayLike, Aux]]], Callable[Params, tuple[PyTree, Aux]]]: ...
@overload
def filter_grad(
    *, has_aux: bool, **gradkwargs: Unpack[GradOptions]
) -> Callable[[Callable[Params, Any]], Callable[Params, Any]]: ...
@overload
def filter_grad(
    fun: Callable[Params, ArrayLike],
    *,
    has_aux: Literal[False] = False,
    **gradkwargs: Unpack[GradOptions],
) -> Callable[Params, PyTree]: ...
@overload
def filter_grad(
    fun: Callable[Params, tuple[ArrayLike, Aux]],
    *,
    has_aux: Literal[True],
    **gradkwargs: Unpack[GradOptions],
) -> Callable[Params, tuple[PyTree, Aux]]: ...
@overload
def filter_grad(
    fun: Callable[Params, Any], *, has_aux: bool, **gradkwargs: Unpack[GradOptions]
) -> Callable[Params, Any]: ...
def filter_grad(
    fun: Callable[..., Any] = MISSING,
    *,
    has_aux: bool = False,
    mode: DifferentiationMode | None = None,
    **gradkwargs: Any,
) -> Any:
    """The gradient of a function in the floating-point arrays of its first argument.

    Arguments and errors are those of `filter_value_and_grad`.

    **Returns:** a function of the same arguments that returns the gradient, or `(gradient, aux)`.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> print(eqx.filter_grad(lambda x: x**2)(jnp.array(3.0)))
        6.0
    """
    return _make(fun, has_aux, False, mode, gradkwargs)
