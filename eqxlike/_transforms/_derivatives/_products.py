"""Products with a Jacobian: `filter_jvp`, `filter_vjp`, and the tangents that they take."""

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
from ..._pytree import (
    describe_node,
    find_difference,
    is_array_like,
    is_array_or_traced_reference,
    is_inexact_array,
    is_inexact_array_like,
)
from .._flat_call import path_of
from .._signatures import Aux, Output, Params, check_callable, value_and_aux
from ._linear_call import fill, is_inexact, select

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
    has_tangents: list[bool] = []

    def of_perturbed(perturbed: list[Any]) -> tuple[list[Any], list[Any]]:
        nonlocal output_rest, has_tangents
        returned = fn(*rest.merge(perturbed), **kwargs)
        # An output that is not a tracer does not depend on any input.
        traced, output_rest = split(returned, lambda leaf: isinstance(leaf, Tracer))
        has_tangents = _flag_tangents(perturbed, traced)
        return select(traced, has_tangents), traced

    # Convert Python numbers here, because JAX would make them instances of a subclass of `float`.
    perturbed = [leaf if is_inexact_array(leaf) else jnp.asarray(leaf) for leaf in perturbed]
    _, derivatives, arrays = jax.jvp(of_perturbed, (perturbed,), (directions,), has_aux=True)
    found = fill(derivatives, [None] * len(arrays), has_tangents)
    return output_rest.merge(arrays), output_rest.merge_into(None, found)


def _flag_tangents(perturbed: list[Any], traced: list[Any]) -> list[bool]:
    """Returns, for each array in `traced`, whether it has a tangent that is no symbolic zero.

    An array with a symbolic zero does not depend on `perturbed`. Only the JVP rule of a primitive
    sees symbolic zeros, so this function calls a primitive on the arrays. JAX calls the rule only
    if an operand has a tangent. `perturbed[0]` has a tangent, so it is an operand too. A call of
    the primitive takes 7 us; a call of a `jax.custom_jvp` would take 90 us.
    """
    tangents: list[Any] = []
    _report_p.bind(perturbed[0], *traced, report=tangents.extend)
    return [
        not isinstance(tangent, ad.Zero) and is_inexact_array(leaf)
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


# --- Tangents, cotangents and gradients: trees with the structure of another tree ---
#
# In these trees, `None` means zero, and may replace a leaf or a whole subtree.


def tangents_of(types: list[Any], treedef: Any, tangents: PyTree, name: str, of: str) -> list[Any]:
    """The tangent of each leaf of a tree, or `None` for zero.

    **Arguments:**

    - `types`: for each leaf, an object with the shape and dtype of the leaf (such as the leaf
      itself), or `None` if the leaf is not differentiable.
    - `treedef`: the structure of the tree.
    - `name`, `of`: the names of `tangents` and of the tree in error messages.

    **Raises:** `ValueError` if the structures or the shapes differ. `TypeError` if the dtypes
    differ, or if a leaf that is not differentiable has a tangent. The messages name the path.
    """
    found = match_leaves(treedef, tangents, name, of)
    return checked_tangents(found, types, treedef, name, of)


def full_tangents(
    arrays: Sequence[Any], rest: Rest, tangents: PyTree, name: str, of: str
) -> list[Any]:
    """The tangents of `arrays`, with zeros for `None`.

    **Arguments:**

    - `arrays`, `rest`: the tree of primals, split into its arrays and the rest.
    - `name`, `of`: as in `tangents_of`.

    **Raises:** the errors of `tangents_of`.
    """
    types = rest.leaves_into(None, arrays)
    found = rest.take(tangents_of(types, rest.treedef, tangents, name, of))
    return [
        jnp.zeros(array.shape, array.dtype) if tangent is None else jnp.asarray(tangent)
        for array, tangent in zip(arrays, found, strict=True)
    ]


def match_leaves(treedef: Any, tree: PyTree, name: str, of: str) -> list[Any]:
    """The subtree of `tree` at each leaf of `treedef`. `None` in `tree` may replace a subtree.

    **Raises:** `ValueError` if the structures differ; the message names the path.
    """
    try:
        return treedef.flatten_up_to(tree)
    except (TypeError, ValueError):
        # `flatten_up_to` raises if the structures differ, but also if `None` replaces a subtree.
        # The code below accepts such a `None`.
        found: list[Any] = []

        def take(whole: PyTree, part: PyTree) -> bool | None:
            if part is None:
                found.extend([None] * len(jtu.tree_leaves(whole)))
            elif whole is _LEAF:
                found.append(part)
            else:
                return None
            return True

        whole = treedef.unflatten([_LEAF] * treedef.num_leaves)
        if difference := find_difference(whole, tree, take):
            raise ValueError(
                f"{name} must have the structure of {of}: {difference.explain(of, name)}."
            ) from None
        return found


def check_structure(treedef: Any, tree: PyTree, name: str, of: str) -> None:
    """Raises `ValueError` if the structure of `tree` is not `treedef`. The message has the path."""
    if jtu.tree_structure(tree) != treedef:
        match_leaves(treedef, tree, name, of)
        raise ValueError(f"{name} must have the structure of {of}, but contains None.")


_LEAF = object()


def checked_tangents(
    tangents: list[Any], types: list[Any], treedef: Any, name: str, of: str
) -> list[Any]:
    """Checks each tangent, and converts it to an array. See `tangents_of` for the arguments."""
    return [
        None if tangent is None else _checked(tangent, struct, place, treedef, name, of)
        for place, (tangent, struct) in enumerate(zip(tangents, types, strict=True))
    ]


def _checked(tangent: Any, struct: Any, place: int, treedef: Any, name: str, of: str) -> Any:
    dtype = getattr(tangent, "dtype", None)
    if (
        dtype is not None
        and dtype == getattr(struct, "dtype", None)
        and tangent.shape == struct.shape
    ):
        return tangent
    if struct is None and dtype == jax.dtypes.float0:
        return None
    path = path_of(place, treedef)
    if struct is None:
        raise TypeError(
            f"{name}{path} must be None, since {of}{path} is not differentiable; it is "
            f"{describe_node(tangent)}."
        )
    expected_dtype = jnp.result_type(struct)
    if isinstance(tangent, float) or (
        isinstance(tangent, complex) and jnp.issubdtype(expected_dtype, jnp.complexfloating)
    ):
        # A Python number has no dtype of its own, so it takes the expected dtype.
        tangent = jnp.asarray(tangent, expected_dtype)
    if not is_array_like(tangent):
        raise TypeError(
            f"{name}{path} must be an array like {of}{path}, or None; it is "
            f"{describe_node(tangent)}."
        )
    if jnp.shape(tangent) != jnp.shape(struct):
        raise ValueError(
            f"{name}{path} must have the shape of {of}{path}, which is {jnp.shape(struct)}; it has "
            f"shape {jnp.shape(tangent)}."
        )
    if jnp.result_type(tangent) != expected_dtype:
        raise TypeError(
            f"{name}{path} must have the dtype of {of}{path}, which is {expected_dtype}; it has "
            f"dtype {jnp.result_type(tangent)}."
        )
    return tangent


def varying_like(cotangent: Any, array: Any) -> Any:
    """Makes a cotangent vary along the same mesh axes as its array, inside `jax.shard_map`.

    The cotangent of a replicated array is a sum over the devices. Reverse mode returns this sum.
    Forward mode and custom rules return one cotangent for each device, so this function sums them.
    """
    axes = varying_axes(cotangent) - varying_axes(array)
    cotangent = jax.lax.psum(cotangent, tuple(sorted(axes, key=str))) if axes else cotangent
    return vary(cotangent, varying_axes(array))
