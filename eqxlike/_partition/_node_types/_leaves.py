"""Leaves: arrays, and what is static."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from ..._compat import Tracer
from ..._pytree import is_traced_reference
from .._guard import GuardWriter
from .._rebuild import RebuildWriter
from .._static_key import StaticKey
from .._structure import NOTHING, Intern, Structure, intern

# --- An array, which is traced ---


concrete_array_types: set[type] = {np.ndarray, jax.Ref}
"""Instances of these types are arrays and no tracers. Types are added as they are met."""


def is_array_of_jax(value: Any) -> bool:
    """Whether `value` is an array of JAX, a tracer, a traced reference or a NumPy scalar.

    The type of an array that is no tracer is added to `concrete_array_types`.
    """
    if not isinstance(value, jax.Array | np.generic):
        return is_traced_reference(value)
    if not isinstance(value, Tracer):
        concrete_array_types.add(type(value))
    return True


def are_concrete_arrays(values: Iterable[Any]) -> bool:
    """Whether all of `values` are arrays and no tracers; their types are added as above."""
    return all(
        type(value) in concrete_array_types
        or (is_array_of_jax(value) and type(value) in concrete_array_types)
        for value in values
    )


class ArrayLeaf(Structure):
    __slots__ = ()

    is_leaf = True

    def write_build(self, writer: RebuildWriter, parts: list[str]) -> str:
        return writer.array()

    def write_guard(self, writer: GuardWriter, name: str) -> tuple[()]:
        example, known = writer.take(name), writer.constant(concrete_array_types)
        unknown = f"type({name}) not in {known}"
        if example is not None:
            unknown = f"type({name}) is not {writer.constant(type(example))} and {unknown}"
        writer.miss_if(unknown)
        return ()


ARRAY = ArrayLeaf(object, None, NOTHING, ())
ARRAY.num_arrays = 1


# --- A leaf that is no array, or `None`; its `meta` is its value ---


class StaticLeaf(Structure):
    __slots__ = ()

    is_leaf = True

    def write_build(self, writer: RebuildWriter, parts: list[str]) -> str:
        return writer.constant(self.meta)

    def write_guard(self, writer: GuardWriter, name: str) -> tuple[()]:
        writer.miss_if_static_differs(name, self.meta, of_node=False)
        return ()


def static_leaf(value: Any, make: Intern = intern) -> Structure:
    """The Structure of a static leaf. Raises `TypeError` if `value` is not hashable."""
    return make(StaticLeaf, type(value), lambda: value, StaticKey(value), ())


def identity_leaf(value: Any) -> Structure:
    """The Structure of a static leaf that is not hashable, and is compared by identity."""
    static = StaticKey(value, by_identity=True)
    return intern(StaticLeaf, type(value), lambda: value, static, ())


class _Opaque:
    """A stand-in for a value that may change; it hashes by identity."""

    __slots__ = ("of",)

    def __init__(self, value: Any):
        self.of = id(value)

    __hash__ = object.__hash__


def opaque_leaf(value: Any) -> Structure:
    """The Structure of a static leaf that is not hashable, shared with no other leaf."""
    static = StaticKey(_Opaque(value))
    static.is_immutable = False
    return intern(StaticLeaf, type(value), lambda: value, static, ())
