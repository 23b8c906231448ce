"""Pytrees as text."""

from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu
import wadler_lindig as wl
from jaxtyping import PyTree


def tree_pformat(
    pytree: PyTree,
    *,
    width: int = 80,
    indent: int = 2,
    short_arrays: bool = True,
    struct_as_array: bool = False,
    truncate_leaf: Callable[[Any], bool] = lambda node: False,
) -> str:
    """Formats a pytree as readable text.

    **Arguments:**

    - `pytree`: any object.
    - `width`: maximum number of columns. A longer line appears only if it cannot be broken.
    - `indent`: number of spaces for each level.
    - `short_arrays`: print arrays as `f32[3,4]` instead of their values.
    - `struct_as_array`: with `short_arrays`, print a `jax.ShapeDtypeStruct` like an array.
    - `truncate_leaf`: a function that takes a node. If it returns `True`, only the name of the
      node's type is printed, as in `MLP(...)`.

    >>> import jax.numpy as jnp
    >>> tree_pformat({"weight": jnp.ones((2, 3)), "size": 3})
    "{'weight': f32[2,3], 'size': 3}"
    """

    def custom(node: Any) -> wl.AbstractDoc | None:
        if truncate_leaf(node):
            return wl.TextDoc(f"{type(node).__name__}(...)")
        is_struct = isinstance(node, jax.ShapeDtypeStruct) and struct_as_array
        if short_arrays and (is_struct or isinstance(node, jax.Array)):
            weak = "weak_" if getattr(node, "weak_type", False) else ""
            return wl.array_summary(node.shape, f"{weak}{node.dtype}", kind=None)
        if isinstance(node, jax.custom_jvp | jax.custom_vjp):
            # The function's own `repr` contains a memory address.
            return wl.pdoc(node.__wrapped__, **options)
        if isinstance(node, jtu.Partial):
            parts = {"func": node.func, "args": node.args, "keywords": node.keywords}
            return wl.bracketed(
                begin=wl.TextDoc("Partial("),
                docs=wl.named_objs(parts.items(), **options),
                sep=wl.comma,
                end=wl.TextDoc(")"),
                indent=indent,
            )
        return None

    options = {"indent": indent, "short_arrays": short_arrays, "custom": custom}
    return wl.pformat(pytree, width=width, **options)


def tree_pprint(
    pytree: PyTree,
    *,
    width: int = 80,
    indent: int = 2,
    short_arrays: bool = True,
    struct_as_array: bool = False,
    truncate_leaf: Callable[[Any], bool] = lambda node: False,
) -> None:
    """Prints a pytree as readable text. The arguments are the same as for `tree_pformat`.

    >>> import jax.numpy as jnp
    >>> tree_pprint({"weight": jnp.ones((2, 3)), "size": 3}, width=20)
    {
      'weight': f32[2,3],
      'size': 3
    }
    """
    text = tree_pformat(
        pytree,
        width=width,
        indent=indent,
        short_arrays=short_arrays,
        struct_as_array=struct_as_array,
        truncate_leaf=truncate_leaf,
    )
    print(text)
