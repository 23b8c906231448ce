"""An array: what is traced."""

from typing import Any

import jax
import numpy as np

from ..._compat import Tracer
from ..._pytree import is_traced_reference
from .._guard import GuardWriter
from .._rebuild import RebuildWriter
from .._structure import NOTHING, Structure

concrete_array_types: set[type] = {np.ndarray, jax.Ref}
"""Types whose instances are known to be arrays and no tracers; filled as they are met."""


def is_array_of_jax(value: Any) -> bool:
    """Whether `value` is an array of JAX, tracers and references included, or a NumPy scalar; notes
    its type.
    """
    if not isinstance(value, jax.Array | np.generic):
        return is_traced_reference(value)
    if not isinstance(value, Tracer):
        concrete_array_types.add(type(value))
    return True


class ArrayLeaf(Structure):
    __slots__ = ()

    is_leaf = True

    def write_build(self, writer: RebuildWriter, parts: list[str]) -> str:
        return writer.array()

    def write_guard(self, writer: GuardWriter, name: str) -> tuple[()]:
        example = writer.constant(type(writer.take(name)))
        known = writer.constant(concrete_array_types)
        writer.miss_if(f"type({name}) is not {example} and type({name}) not in {known}")
        return ()


ARRAY = ArrayLeaf(object, None, NOTHING, ())
ARRAY.num_arrays = 1
