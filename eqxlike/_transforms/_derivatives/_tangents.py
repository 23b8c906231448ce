"""Tangents, cotangents and gradients: trees with the structure of another tree.

In these trees, `None` means zero, and may replace a leaf or a whole subtree.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from ..._compat import vary, varying_axes
from ..._partition import Rest
from ..._pytree import describe_node, find_difference, is_array_like


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
    path = jtu.keystr(path_of(place, treedef))
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


def path_of(place: int, treedef: Any) -> tuple[Any, ...]:
    """The path of the leaf with index `place`."""
    return jtu.tree_leaves_with_path(treedef.unflatten(range(treedef.num_leaves)))[place][0]
