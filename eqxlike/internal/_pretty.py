"""Arrays in pretty-printed trees."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import wadler_lindig as wl

from .._pytree import tree_pformat


@dataclasses.dataclass(frozen=True, slots=True)
class TreeWLCustom:
    """For `custom` of `wadler_lindig`: how `tree_pformat` shows arrays.

    - `truncate_leaf`: where it says `True` of a node, its type alone is shown, as in `MLP(...)`.
    - `short_arrays`: arrays as `f32[3,4]` instead of their values.
    - `struct_as_array`: a `jax.ShapeDtypeStruct` as `short_arrays` shows an array, if it does.

    >>> import jax.numpy as jnp
    >>> wl.pformat([jnp.ones(2)], custom=TreeWLCustom(lambda node: False, True, False))
    '[f32[2]]'
    """

    truncate_leaf: Callable[[Any], bool]
    short_arrays: bool
    struct_as_array: bool

    def __call__(self, obj: Any) -> wl.AbstractDoc | None:
        """The document of a node, or `None` where `wadler_lindig` knows one."""
        if self.truncate_leaf(obj):
            return wl.TextDoc(f"{type(obj).__name__}(...)")
        is_struct = isinstance(obj, jax.ShapeDtypeStruct) and self.struct_as_array
        if self.short_arrays and (is_struct or isinstance(obj, jax.Array)):
            return wl.TextDoc(tree_pformat(obj, struct_as_array=True))
        return None
