"""Checks of data: inputs and targets of the same length, without NaN."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, PyTree, Shaped

from .._compat import Tracer
from .._pytree import describe_node, is_array_like


def check_data(data: Any) -> tuple[PyTree[Array], PyTree[Array]]:
    """`(x, y)` as arrays of JAX. The values of traced ones are not looked at.

    **Raises:** `TypeError` or `ValueError` that names what is wrong, and where.
    """
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise TypeError(f"data must be a pair (x, y), got {describe_node(data)}.")
    lengths: dict[str, int] = {}
    for name, tree in zip(("x", "y"), data, strict=True):
        leaves = jtu.tree_leaves_with_path(tree)
        if not leaves:
            raise ValueError(f"data: {name} has no arrays.")
        for path, leaf in leaves:
            where = f"{name}{jtu.keystr(path)}"
            if not is_array_like(leaf) or jnp.ndim(leaf) == 0:
                raise TypeError(
                    f"data: {where} must be an array with an axis of examples, got "
                    f"{describe_node(leaf)}."
                )
            lengths[where] = jnp.shape(leaf)[0]
            _check_finite(leaf, where)
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{where} {length}" for where, length in lengths.items())
        raise ValueError(f"data: all arrays must have one length; they have {listed}.")
    if 0 in lengths.values():
        raise ValueError("data: there is no example.")
    x, y = jtu.tree_map(jnp.asarray, tuple(data))
    return x, y


def _check_finite(array: Any, where: str) -> None:
    if isinstance(array, Tracer) or not jnp.issubdtype(jnp.result_type(array), jnp.inexact):
        return
    if not bool(_all_finite(array)):
        is_finite = jnp.isfinite(jnp.asarray(array))
        place = tuple(int(each[0]) for each in jnp.where(~is_finite))
        index = ", ".join(map(str, place))
        raise ValueError(
            f"data: {where}[{index}] is {jnp.asarray(array)[place]}; "
            f"{int(jnp.sum(~is_finite))} of {is_finite.size} numbers there are not finite. Leave "
            "such examples out, or fill them in."
        )


@jax.jit
def _all_finite(array: Any) -> Array:
    return jnp.all(jnp.isfinite(array))


def num_examples(batch: PyTree[Shaped[Array, "B ..."]], caller: str) -> int:
    """The length of the axis of examples.

    **Raises:** `ValueError`, in the name of `caller`, if the arrays have not one such length.
    """
    shapes = [jnp.shape(leaf) for leaf in jtu.tree_leaves(batch)]
    lengths = {shape[:1] for shape in shapes}
    if len(lengths) != 1 or lengths == {()}:
        raise ValueError(
            f"{caller} expects a batch of arrays with one leading length, got shapes "
            f"{sorted(shapes)}."
        )
    ((length,),) = lengths
    return length


def struct_of_example(tree: PyTree[Array]) -> PyTree[jax.ShapeDtypeStruct]:
    """The shapes and dtypes of one example."""
    return jtu.tree_map(lambda each: jax.ShapeDtypeStruct(each.shape[1:], each.dtype), tree)
