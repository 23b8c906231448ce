"""Stored arrays made of ours: each of one array, of several parts, or of what `save` returns."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..._pytree import is_on_cpu
from ..._transforms import NamedLeaf
from ._files import SUPPORTED, Writing, dtype_name
from ._names import Stored


class _Part(NamedTuple):
    """One of our arrays as a part of a stored one: the array `number` of those `save` returns."""

    ours: str
    leaf: Any
    rows: tuple[int, ...]
    stored: Stored
    number: int

    def numbers(self) -> np.ndarray:
        leaf = self.leaf
        if is_on_cpu(leaf):
            array = np.asarray(leaf)[self.rows]
        else:
            # A JAX array keeps the copy that NumPy makes of it. Here a short-lived array keeps it.
            array = leaf[self.rows] if self.rows else leaf.copy()
        try:
            return self.stored.saved(np.asarray(array))[self.number]
        except Exception as error:
            error.add_note(f"This was raised for {self.ours}, by `save` in `names`.")
            raise

    def shape_and_dtype(self) -> tuple[tuple[int, ...], str]:
        if self.stored.save is None:
            return self.leaf.shape[len(self.rows) :], dtype_name(self.leaf)
        array = self.numbers()
        return array.shape, dtype_name(array)


def arrays_to_write(leaves: Sequence[NamedLeaf], stored: dict[str, Stored]) -> dict[str, Writing]:
    """The arrays of a file by name.

    **Raises:** `ValueError` with all arrays that cannot be written.
    """
    parts: dict[str, list[_Part]] = {}
    problems: list[str] = []
    for leaf in leaves:
        for ours, rows in leaf.rows.items():
            how = stored.get(ours)
            if how is None:
                continue
            if isinstance(leaf.leaf, jax.ShapeDtypeStruct):
                problems.append(f"{ours} has no numbers, it is a jax.ShapeDtypeStruct")
            elif how.save is None and (how.load is not None or len(how.names) > 1):
                problems.append(
                    f"{ours} is made of {', '.join(how.names)} by a function without an inverse: "
                    "write `train.Stored(..., load=function, save=inverse)` in `names`"
                )
            else:
                for number, name in enumerate(how.names):
                    parts.setdefault(name, []).append(_Part(ours, leaf.leaf, rows, how, number))
    for name, found in parts.items():
        found.sort(key=lambda part: part.stored.bounds)
        problems += _problems_of_bounds(name, found)
    arrays = {}
    for name, found in parts.items() if not problems else ():
        if array := _writing(name, found, problems):
            arrays[name] = array
    if problems:
        raise ValueError(f"export_safetensors: {'; '.join(problems)}.")
    return arrays


def _problems_of_bounds(name: str, parts: list[_Part]) -> list[str]:
    """What is wrong if the arrays are not the parts of one, each once."""
    ours = ", ".join(part.ours for part in parts)
    num = parts[0].stored.bounds[2]
    layouts = {(p.stored.bounds[2], p.stored.axis, p.stored.transpose) for p in parts}
    if len(layouts) > 1:
        return [f"{ours} are parts of {name}, and differ in the number of parts, axis or transpose"]
    held = [index for part in parts for index in range(*part.stored.bounds[:2])]
    if missing := sorted({*range(num)} - {*held}):
        return [f"{name} lacks the parts {missing} of {num}; the model has {ours}"]
    return [] if len(held) == num else [f"{ours} are stored in the same place, {name}"]


def _writing(name: str, parts: list[_Part], problems: list[str]) -> Writing | None:
    """The stored array that is made of `parts`; adds to `problems` if they do not fit together."""
    shapes, dtypes = zip(*(part.shape_and_dtype() for part in parts), strict=True)
    stored, ours = parts[0].stored, ", ".join(part.ours for part in parts)
    if len(set(dtypes)) > 1 or dtypes[0] not in SUPPORTED:
        problems.append(f"{name} is made of {ours}, which have the dtypes {', '.join(dtypes)}")
        return None
    try:
        shape = stored.joined_shape(shapes, [part.stored.bounds for part in parts])
    except ValueError as error:
        found = ", ".join(map(str, shapes))
        problems.append(f"{name} is made of {ours}, of shape {found}: {error}")
        return None
    return Writing(shape, dtypes[0], lambda: stored.joined([part.numbers() for part in parts]))
