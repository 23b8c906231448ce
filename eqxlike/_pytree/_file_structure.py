"""Signs in a file that it was written from a tree of another structure."""

import math
import os
from typing import Any, BinaryIO

import jax
import numpy as np

from .._dtypes import is_key
from ._leaf_format import has_record

Shape = tuple[int, ...]


def explain_structure(file: BinaryIO, start: int, likes: list[Any], is_whole: bool) -> str:
    """A sentence, for an error, on the tree that a file was written from, as its shapes tell.

    A file has no structure, only one leaf after another, so this counts and compares them.

    **Arguments:**

    - `file`: open for reading, and can seek.
    - `start`: where in it the first leaf begins.
    - `likes`: the leaves of the tree to read it into.
    - `is_whole`: whether all that follows was written from one tree.

    **Returns:** the sentence; empty if the structure may well be the same, or nothing is known.
    """
    found = _shapes_in(file, start)
    if found is None:
        return ""
    expected = [_shape_in_file(like) for like in likes if has_record(like)]
    num_others = sum(one != other for one, other in zip(found, expected, strict=False))
    if len(found) < len(expected) and not num_others:
        return (
            "The file was cut off, or written from a tree of another structure than `like`: it has "
            f"{_count(found)}, and `like` has {len(expected)}. "
        )
    if len(found) < len(expected) or (is_whole and len(found) > len(expected)):
        return (
            "The file was written from a tree of another structure than `like`: it has "
            f"{_count(found)}, and `like` has {len(expected)}. "
        )
    if num_others > 1:
        return (
            "The file seems to have been written from a tree of another structure than `like`: "
            f"{num_others} of its {_count(expected)} have another shape. "
        )
    return ""


def _count(shapes: list[Shape]) -> str:
    return f"{len(shapes)} {'array or number' if len(shapes) == 1 else 'arrays and numbers'}"


def _shapes_in(file: BinaryIO, start: int) -> list[Shape] | None:
    """The shape of each record up to the end; `None` if something else comes before."""
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    shapes = []
    size = file.seek(0, os.SEEK_END)
    file.seek(start)
    while file.tell() < size:
        try:
            shape, _, dtype = readers[np.lib.format.read_magic(file)](file)
        except (KeyError, ValueError):
            return None
        shapes.append(shape)
        file.seek(math.prod(shape) * dtype.itemsize, os.SEEK_CUR)
    return shapes


def _shape_in_file(like: Any) -> Shape:
    if isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        if is_key(like):
            like = jax.eval_shape(jax.random.key_data, like)
        return like.shape
    return np.shape(like)
