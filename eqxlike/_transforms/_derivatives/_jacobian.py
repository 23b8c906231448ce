"""Jacobians and Hessians in the floating-point arrays of the first argument."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PyTree

from ..._module import field
from ..._partition import UNTRACED, Rest, split
from ..._pytree import is_array_like, is_array_or_traced_reference, is_inexact_array
from .._signatures import Params
from .._wrapping import (
    TransformedFunction,
    check_callable,
    differentiated_and_others,
    value_and_aux,
)
from ._by_mode import CannotDifferentiate, path_of_taken


class JacobianFunction(TransformedFunction):
    """The function that `filter_jacfwd` and its like return.

    - `_modes`: the transformations to apply, such as `jax.jacfwd`, the innermost first.
    """

    _has_aux: bool = field(static=True)
    _name: str = field(static=True)
    _modes: tuple[Callable[..., Any], ...] = field(static=True)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        differentiated, others = differentiated_and_others(args, self._name)
        arrays, rest = split(differentiated, is_inexact_array)
        # Leaves that are no arrays cannot pass through JAX.
        value_rest: Rest = UNTRACED
        aux_rest: Rest = UNTRACED

        def of_arrays(arrays: list[Any]) -> tuple[list[Any], list[Any]]:
            nonlocal value_rest, aux_rest
            output = self._function(rest.merge(arrays), *others, **kwargs)
            value, aux = value_and_aux(output, self._has_aux, self)
            value_arrays, value_rest = split(value, is_array_like)
            aux_arrays, aux_rest = split(aux, is_array_or_traced_reference)
            return value_arrays, aux_arrays

        def tree_of(rows: list[Any], depth: int) -> PyTree:
            """The trees in trees for these lists in lists, a level for each mode."""
            subtrees = [tree_of(row, depth - 1) for row in rows] if depth else rows
            return rest.merge_into(None, subtrees)

        transformed: Callable[..., Any] = of_arrays
        if arrays:
            for mode in self._modes:
                transformed = mode(transformed, has_aux=True)
            try:
                rows_of_outputs, aux_arrays = transformed(arrays)
            except CannotDifferentiate as error:
                raise error.at(path_of_taken(rest, error.place)) from None
        else:
            # JAX needs at least one array.
            value_arrays, aux_arrays = of_arrays(arrays)
            rows_of_outputs = [[] for _ in value_arrays]
        depth = len(self._modes) - 1
        jacobian = value_rest.merge_into(None, [tree_of(rows, depth) for rows in rows_of_outputs])
        return (jacobian, aux_rest.merge(aux_arrays)) if self._has_aux else jacobian


def filter_jacfwd(fun: Callable[Params, Any], has_aux: bool = False) -> Callable[Params, PyTree]:
    """The Jacobian of a function in the arrays of its first argument, by forward mode.

    It takes one pass for each number among the inputs: use it for more outputs than inputs.

    **Arguments:**

    - `fun`: a function of any arguments that returns any pytree.
    - `has_aux`: whether `fun` returns `(value, aux)`, with `aux` any pytree that is not
      differentiated.

    **Returns:** a function of the same arguments that returns the Jacobian, or `(jacobian, aux)`.
    The Jacobian has the structure of the value, with a tree in place of each array, of shape
    `(*out)`, and `None` in place of each leaf that is no array or number. Each of these trees has
    the structure of the first argument, with an array of shape `(*out, *in)` in place of each
    floating-point array, of shape `(*in)`, and `None` in place of everything else.

    **Raises:** when called, `TypeError` if the first argument is passed by keyword, or an array in
    it is complex.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> def scale(parameters, x):
        ...     return parameters["scale"] ** parameters["power"] * x
        >>> jacobian = eqx.filter_jacfwd(scale)({"scale": jnp.array(3.0), "power": 2}, jnp.ones(2))
        >>> print(jacobian["scale"], jacobian["power"])
        [6. 6.] None
    """
    check_callable(fun, "filter_jacfwd")
    return JacobianFunction(fun, has_aux, "filter_jacfwd", (jax.jacfwd,))


def filter_jacrev(fun: Callable[Params, Any], has_aux: bool = False) -> Callable[Params, PyTree]:
    """The Jacobian of a function in the arrays of its first argument, by reverse mode.

    It takes one pass for each number among the outputs. Arguments and output are those of
    `filter_jacfwd`.

    **Raises:** when called, `TypeError` if the first argument is passed by keyword, or an array of
    the value is not real.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> print(eqx.filter_jacrev(lambda x: x.sum())(jnp.ones(3)))
        [1. 1. 1.]
    """
    check_callable(fun, "filter_jacrev")
    return JacobianFunction(fun, has_aux, "filter_jacrev", (jax.jacrev,))


def filter_hessian(fun: Callable[Params, Any], has_aux: bool = False) -> Callable[Params, PyTree]:
    """The second derivatives of a function in the arrays of its first argument.

    It uses forward mode over reverse mode. Arguments and errors are those of `filter_jacfwd`.

    **Returns:** a function of the same arguments that returns the Hessian, or `(hessian, aux)`. The
    Hessian is like the Jacobian, with another tree of the structure of the first argument in place
    of each array; its arrays have shape `(*out, *in, *in)`.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> hessian = eqx.filter_jit(eqx.filter_hessian(lambda p: p["a"] ** 2 * p["b"]))
        >>> second = hessian({"a": jnp.array(3.0), "b": jnp.array(5.0)})
        >>> print(second["a"]["a"], second["a"]["b"], second["b"]["b"])
        10.0 6.0 0.0
    """
    check_callable(fun, "filter_hessian")
    return JacobianFunction(fun, has_aux, "filter_hessian", (jax.jacrev, jax.jacfwd))
