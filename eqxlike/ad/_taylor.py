"""Derivatives of higher order along one direction."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.jet import jet
from jax.extend.core import JaxprEqn, jaxpr_as_fun
from jaxtyping import Array, PyTree

from .._numbers import whole_number
from .._partition import UNTRACED, Rest, split
from .._pytree import is_inexact_array
from .._transforms._derivatives._tangents import full_tangents
from .._transforms._signatures import check_callable, value_and_aux
from ._equations import equations_in

Arrays = list[Array]
Series = list[Arrays]  # the value, and the derivatives of order 1, 2, and so on

# What `jet` computes wrongly, without a word (jax 0.10.2 to 0.12.0.1).
_WRONG_BY_JET = {
    "asinh": "infinite for large negative numbers",
    "atan2": "NaN where the second argument is zero",
    "atanh": "NaN outside of (-1, 1)",
    "acosh": "NaN at 1",
    "clamp": "half the derivative at a bound, where JAX has zero",
    "custom_jvp_call": "differentiates the function, not by the rule",
    "custom_vjp_call": "differentiates the function, not by the rule",
    "pow": "NaN where the base is not positive",
    "rem": "rounds down where the operation rounds to zero",
}


def taylor(fun: Callable[..., Any], order: int, *, has_aux: bool = False) -> Callable[..., Any]:
    """The derivatives of a function along a direction, up to some order.

    With `x(t) = x + t v` they are the derivatives of `fun(x(t))` by `t` at `t = 0`; divided by `k!`
    they are the coefficients of its Taylor series. `jax.experimental.jet` propagates all of them in
    one pass, at a cost that grows with the square of the order (Bettencourt et al., 2019). Where it
    has no rule for an operation, they are nested Jacobian-vector products, which cost twice as much
    with each order.

    **Arguments:**

    - `fun`: a function of any arguments that returns any pytree.
    - `order`: the highest order, 1 or more.
    - `has_aux`: whether `fun` returns `(value, aux)`, with `aux` any pytree that is not
      differentiated.

    **Returns:** a function `derivatives(x, direction, *args, **kwargs)`. `direction` has the
    structure of `x`: beside each floating-point or complex array an array of that shape and dtype,
    or `None` for a zero; beside everything else `None`. It returns a list of length `order + 1`:
    the value, and the derivatives of order 1, 2, ..., with the structure of the value and `None`
    for what is no floating-point or complex array. With `has_aux` it is that list and `aux`, a
    pair.

    **Raises:** `ValueError` if `order` is no positive integer; when called, naming the path:
    `ValueError` if the structure or a shape of `direction` differs, `TypeError` for another dtype.

    !!! example

        >>> import jax.numpy as jnp
        >>> from eqxlike import ad
        >>> value, *derivatives = ad.taylor(lambda x: x**3, 3)(jnp.array(1.0), jnp.array(2.0))
        >>> print([round(float(each)) for each in derivatives])
        [6, 24, 48]
    """
    check_callable(fun, "ad.taylor")
    order = whole_number(order, "ad.taylor: order")

    def derivatives(x: PyTree, direction: PyTree, *args: Any, **kwargs: Any) -> Any:
        arrays, rest = split(x, is_inexact_array)
        arrays = list(map(jnp.asarray, arrays))
        tangents = full_tangents(arrays, rest, direction, "direction", "x")
        value, aux = value_and_aux(fun(x, *args, **kwargs), has_aux, fun)
        value_rest: Rest = UNTRACED

        def of_arrays(*arrays: Array) -> Arrays:
            nonlocal value_rest
            output = fun(rest.merge(arrays), *args, **kwargs)
            outputs, value_rest = split(value_and_aux(output, has_aux, fun)[0], is_inexact_array)
            return list(map(jnp.asarray, outputs))

        series = _by_jet(of_arrays, arrays, tangents, order)
        if series is None:
            series = _by_nesting(of_arrays, arrays, tangents, order)
        found = [value, *(value_rest.merge_into(None, each) for each in series)]
        return (found, aux) if has_aux else found

    return derivatives


def _by_jet(
    function: Callable[..., Arrays], arrays: Arrays, tangents: Arrays, order: int
) -> Series | None:
    """The derivatives by `jet`; `None` where it does not serve."""
    of_path = [[each] + [jnp.zeros_like(each)] * (order - 1) for each in tangents]
    try:
        closed = jax.make_jaxpr(function)(*arrays)
        if any(map(_is_wrong_by_jet, equations_in(closed.jaxpr))):
            return None
        _, found = jet(jaxpr_as_fun(closed), tuple(arrays), of_path)
    except Exception:
        # What it cannot do it says in many ways (jax 0.10.2 to 0.12.0.1): `KeyError` where there is
        # no rule, `UnexpectedTracerError` at a `jax.custom_jvp`, `TypeError` for complex numbers.
        # An error of the function itself comes again from the nested products.
        return None
    return [[each[number] for each in found] for number in range(order)]


def _is_wrong_by_jet(equation: JaxprEqn) -> bool:
    if equation.primitive.name == "convert_element_type":
        # A derivative of a whole number, whole as well.
        return any(map(_is_inexact, equation.invars)) > any(map(_is_inexact, equation.outvars))
    if equation.primitive.name == "gather":
        # The derivative of what is out of bounds would be that value again.
        return equation.params["fill_value"] is not None
    return equation.primitive.name in _WRONG_BY_JET


def _is_inexact(var: Any) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)


def _by_nesting(
    function: Callable[..., Arrays], arrays: Arrays, tangents: Arrays, order: int
) -> Series:
    series = []
    for _ in range(order):
        function = _along(function, tangents)
        series.append(function(*arrays))
    return series


def _along(function: Callable[..., Arrays], tangents: Arrays) -> Callable[..., Arrays]:
    return lambda *arrays: jax.jvp(function, arrays, tuple(tangents))[1]
