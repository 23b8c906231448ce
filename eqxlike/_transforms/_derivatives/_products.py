"""Products with a Jacobian: `filter_jvp` and `filter_vjp`."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad
from jaxtyping import PyTree

from ..._compat import Tracer, manual_axis_type, vary, varying_axes
from ..._module import Module, field
from ..._partition import UNTRACED, Rest, split, split_leaves
from ..._pytree import is_array_or_traced_reference, is_inexact_array, is_inexact_array_like
from .._signatures import Aux, Output, Params, check_callable, value_and_aux
from ._linear_call import is_inexact
from ._tangents import tangents_of

# --- Forward-mode derivatives of functions of any arguments ---


def filter_jvp(
    fn: Callable[..., Output], primals: Sequence[PyTree], tangents: Sequence[PyTree], **kwargs: Any
) -> tuple[Output, PyTree]:
    """Computes the value of a function and a Jacobian-vector product, for arguments of any type.

    **Arguments:**

    - `fn`: a function of any arguments that returns any pytree.
    - `primals`: a tuple or list of the positional arguments.
    - `tangents`: a tuple or list with the structure of `primals`. The tangent of a floating-point
      or complex array, or of a Python `float` or `complex`, is an array of the same shape and
      dtype, or `None` for zero. The tangent of any other leaf is `None`. `None` may also replace a
      whole subtree of zeros.
    - `**kwargs`: keyword arguments of `fn`. They are not differentiated.

    **Returns:** `(fn(*primals, **kwargs), tangent)`. The tangent has the structure of the value. It
    is `None` at leaves that are not differentiable, and at leaves that do not depend on an input
    with a tangent.

    **Raises:** `ValueError` if the structures or shapes of `primals` and `tangents` differ.
    `TypeError` if their dtypes differ, or if a leaf that is not differentiable has a tangent. The
    messages name the path.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> def scale(x, factor, label):
        ...     return {"scaled": factor * x, "factor": factor, "label": label}
        >>> primals = (jnp.array(3.0), jnp.array(2.0), "doubled")
        >>> value, tangent = eqx.filter_jvp(scale, primals, (jnp.array(1.0), None, None))
        >>> print(value["scaled"], tangent["scaled"], tangent["factor"], tangent["label"])
        6.0 2.0 None None
    """
    check_callable(fn, "filter_jvp")
    for name, given in (("primals", primals), ("tangents", tangents)):
        if not isinstance(given, tuple | list):
            raise TypeError(
                f"`{name}` must be a tuple or list with an element for each positional argument; "
                f"it is of type {type(given).__name__}."
            )
    leaves, treedef = jtu.tree_flatten(tuple(primals))
    types = [leaf if is_inexact_array_like(leaf) else None for leaf in leaves]
    found = tangents_of(types, treedef, tuple(tangents), "tangents", "primals")
    perturbed, rest = split_leaves(leaves, treedef, [tangent is not None for tangent in found])
    directions = rest.take(found)
    if not perturbed:
        output = fn(*primals, **kwargs)
        return output, jtu.tree_map(lambda _: None, output)
    output_rest: Rest = UNTRACED
    is_zero: list[bool] = []

    def of_perturbed(perturbed: list[Any]) -> tuple[list[Any], list[Any]]:
        nonlocal output_rest, is_zero
        returned = fn(*rest.merge(perturbed), **kwargs)
        # An output that is not a tracer does not depend on any input.
        traced, output_rest = split(returned, lambda leaf: isinstance(leaf, Tracer))
        is_zero = _find_zeros(perturbed, traced)
        zero, not_zero = (
            [leaf for leaf, each in zip(traced, is_zero, strict=True) if each is side]
            for side in (True, False)
        )
        return not_zero, zero

    not_zero, derivatives, zero = jax.jvp(
        of_perturbed, (list(map(_as_array, perturbed)),), (directions,), has_aux=True
    )
    of_zero, of_not_zero, next_derivative = iter(zero), iter(not_zero), iter(derivatives)
    output = output_rest.merge(next(of_zero if each else of_not_zero) for each in is_zero)
    tangent = output_rest.merge_into(
        None, (None if each else next(next_derivative) for each in is_zero)
    )
    return output, tangent


def _as_array(leaf: Any) -> Any:
    # Convert a Python number here, because JAX would make it an instance of a subclass of `float`.
    return leaf if is_inexact_array(leaf) else jnp.asarray(leaf)


def _find_zeros(perturbed: list[Any], traced: list[Any]) -> list[bool]:
    """Returns, for each array in `traced`, whether its tangent is a symbolic zero.

    An array with a symbolic zero does not depend on `perturbed`. Only the JVP rule of a primitive
    sees symbolic zeros, so this function calls a primitive on the arrays. JAX calls the rule only
    if an operand has a tangent. `perturbed[0]` has a tangent, so it is an operand too. A call of
    the primitive takes 7 us; a call of a `jax.custom_jvp` would take 90 us.
    """
    tangents: list[Any] = []
    _report_p.bind(perturbed[0], *traced, report=tangents.extend)
    return [
        isinstance(tangent, ad.Zero) or not is_inexact_array(leaf)
        for tangent, leaf in zip(tangents[1:], traced, strict=True)
    ]


def _report_tangents(
    primals: Any, tangents: Any, *, report: Callable[[Any], None]
) -> tuple[list[Any], list[Any]]:
    report(tangents)
    return [], []


_report_p = Primitive("report_tangents")
_report_p.multiple_results = True
ad.primitive_jvps[_report_p] = _report_tangents


# --- Reverse-mode derivatives of functions of any arguments ---


class Pullback(Module):
    """The function that `filter_vjp` returns. It maps a cotangent of the output to gradients.

    It is a pytree whose leaves are the residuals of the forward pass.
    """

    _vjp: Callable[[list[Any]], tuple[list[Any]]]
    _primals: Rest = field(static=True)
    _output: Rest = field(static=True)
    _types: tuple[jax.ShapeDtypeStruct, ...] = field(static=True)

    def __call__(self, cotangent: PyTree, /) -> tuple[PyTree, ...]:
        differentiable = (each if is_inexact(each) else None for each in self._types)
        types = self._output.leaves_into(None, differentiable)
        found = tangents_of(types, self._output.treedef, cotangent, "cotangent", "output")
        cotangents = [
            _zero(struct) if each is None else vary(each, varying_axes(struct))
            for each, struct in zip(self._output.take(found), self._types, strict=True)
        ]
        (gradients,) = self._vjp(cotangents)
        return self._primals.merge_into(None, gradients)


def _zero(struct: jax.ShapeDtypeStruct) -> Any:
    """The zero cotangent that JAX expects for an output of this shape and dtype."""
    if is_inexact(struct):
        return vary(jnp.zeros(struct.shape, struct.dtype), varying_axes(struct))
    return np.zeros(struct.shape, jax.dtypes.float0)


@overload
def filter_vjp(
    fun: Callable[Params, Output], *primals: Params.args, **no_keywords: Params.kwargs
) -> tuple[Output, Pullback]: ...
@overload
def filter_vjp(
    fun: Callable[..., Output], *primals: PyTree, has_aux: Literal[False]
) -> tuple[Output, Pullback]: ...
@overload
def filter_vjp(
    fun: Callable[..., tuple[Output, Aux]], *primals: PyTree, has_aux: Literal[True]
) -> tuple[Output, Pullback, Aux]: ...
def filter_vjp(fun: Callable[..., Any], *primals: PyTree, has_aux: bool = False) -> Any:
    """Computes the value of a function, and a function for vector-Jacobian products.

    **Arguments:**

    - `fun`: a function of any arguments that returns any pytree.
    - `*primals`: the arguments of `fun`. Floating-point and complex arrays in them are
      differentiated.
    - `has_aux`: whether `fun` returns `(value, aux)`. `aux` is any pytree, and is not
      differentiated.

    **Returns:** `(value, pullback)`, or `(value, pullback, aux)`. `pullback` takes a cotangent with
    the structure of the value. The cotangent of a floating-point or complex array is an array of
    the same shape and dtype, or `None` for zero. The cotangent of any other leaf is `None`.
    `pullback` returns a tuple with one gradient for each argument. A gradient has `None` at each
    leaf that is not a floating-point or complex array. `pullback` is a pytree, so it may be an
    argument or an output of a transformed function.

    **Raises:**

    - `TypeError` if `has_aux` is true and `fun` does not return a pair.
    - `ValueError`, when `pullback` is called, if the structure or a shape of the cotangent is
      wrong. The message names the path.
    - `TypeError`, when `pullback` is called, if a dtype is wrong, or if a leaf that is not
      differentiable has a cotangent. The message names the path.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> def scale(x, factor, label):
        ...     return factor * x, label
        >>> value, pullback = eqx.filter_vjp(scale, jnp.array(3.0), jnp.array(2.0), "doubled")
        >>> print(*value)
        6.0 doubled
        >>> print(*pullback((jnp.array(1.0), None)))
        2.0 3.0 None
    """
    check_callable(fun, "filter_vjp")
    arrays, rest = split(primals, is_inexact_array)
    # JAX returns only arrays. The trace stores all other leaves of the output here.
    value_rest: Rest = UNTRACED
    aux_rest: Rest = UNTRACED

    def of_arrays(arrays: list[Any]) -> tuple[list[Any], list[Any]]:
        nonlocal value_rest, aux_rest
        value, aux = value_and_aux(fun(*rest.merge(arrays)), has_aux, fun)
        value_arrays, value_rest = split(value, is_array_or_traced_reference)
        aux_arrays, aux_rest = split(aux, is_array_or_traced_reference)
        return value_arrays, aux_arrays

    value_arrays, vjp, aux_arrays = jax.vjp(of_arrays, arrays, has_aux=True)
    types = tuple(
        # A NumPy array may have a dtype that JAX does not support.
        jax.ShapeDtypeStruct(
            each.shape, jnp.result_type(each), manual_axis_type=manual_axis_type(each)
        )
        for each in value_arrays
    )
    value, pullback = value_rest.merge(value_arrays), Pullback(vjp, rest, value_rest, types)
    return (value, pullback, aux_rest.merge(aux_arrays)) if has_aux else (value, pullback)
