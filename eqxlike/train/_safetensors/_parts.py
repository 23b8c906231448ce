"""Assembles the arrays of a file from the arrays of a model."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ...extend import NamedLeaf, is_on_cpu
from ._files import SUPPORTED, Writing, dtype_name
from ._names import Stored


class _Part(NamedTuple):
    """An array of the model that is a part of a stored array.

    - `ours`: its name in the model.
    - `leaf`: the leaf that contains the array.
    - `rows`: index of the array in the leaf if the leaf stacks layers, otherwise empty.
    - `stored`: the layout of the array in the file.
    - `number`: index of the part among the arrays that `save` returns.
    """

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
            # A JAX array keeps its NumPy copy for as long as the array exists. So make a temporary
            # JAX array here: it is freed after this call, together with its NumPy copy.
            array = leaf[self.rows] if self.rows else leaf.copy()
        try:
            return self.stored.saved(np.asarray(array))[self.number]
        except Exception as error:
            error.add_note(f"The function `save` in `names` raised this for {self.ours}.")
            raise

    def shape_and_dtype(self) -> tuple[tuple[int, ...], str]:
        if self.stored.save is None:
            return self.leaf.shape[len(self.rows) :], dtype_name(self.leaf)
        array = self.numbers()
        return array.shape, dtype_name(array)


def arrays_to_write(leaves: Sequence[NamedLeaf], stored: dict[str, Stored]) -> dict[str, Writing]:
    """The arrays to write, by name in the file.

    **Raises:** `ValueError`, with a list of all problems, if an array cannot be written.
    """
    parts: dict[str, list[_Part]] = {}
    problems: list[str] = []
    for leaf in leaves:
        for ours, rows in leaf.rows.items():
            if (how := stored.get(ours)) is None:
                continue
            if isinstance(leaf.leaf, jax.ShapeDtypeStruct):
                problems.append(f"{ours} is a jax.ShapeDtypeStruct without values")
            elif how.save is None and (how.load is not None or len(how.names) > 1):
                problems.append(
                    f"{ours} is loaded from {', '.join(how.names)} by a function without an "
                    "inverse: use `train.Stored(..., load=function, save=inverse)` in `names`"
                )
            else:
                for number, name in enumerate(how.names):
                    parts.setdefault(name, []).append(_Part(ours, leaf.leaf, rows, how, number))
    arrays: dict[str, Writing] = {}
    for name, found in parts.items():
        match _writing(name, sorted(found, key=lambda part: part.stored.bounds)):
            case str() as problem:
                problems.append(problem)
            case writing:
                arrays[name] = writing
    if problems:
        raise ValueError(f"export_safetensors: {'; '.join(problems)}.")
    return arrays


def _writing(name: str, parts: list[_Part]) -> Writing | str:
    """The stored array that is made of `parts`. If there is a problem, returns a description of the
    problem.
    """
    ours, stored, bounds = ", ".join(p.ours for p in parts), parts[0].stored, parts[0].stored.bounds
    layouts = {
        (each.bounds[2], each.axis, each.groups, each.transpose)
        for each in (part.stored for part in parts)
    }
    if len(layouts) > 1:
        return (
            f"{ours} are parts of {name}, but differ in the number of parts, axis, groups or "
            "transpose"
        )
    held = [index for part in parts for index in range(*part.stored.bounds[:2])]
    if missing := sorted({*range(bounds[2])} - {*held}):
        return f"{name} lacks the parts {missing} of {bounds[2]}; the model has {ours}"
    if len(held) > bounds[2]:
        return f"{ours} have the same name in the file, {name}"
    shapes, dtypes = zip(*(part.shape_and_dtype() for part in parts), strict=True)
    if len(set(dtypes)) > 1 or dtypes[0] not in SUPPORTED:
        names = ", ".join(dtypes)
        return f"{name} is made of {ours}, which have different or unsupported dtypes: {names}"
    try:
        whole = stored.joined([np.broadcast_to(np.False_, shape) for shape in shapes])
        sizes = [part.stored.view(whole).size for part in parts]
        if sizes != [math.prod(shape) for shape in shapes]:
            raise ValueError(f"parts of {sizes} numbers are expected")
    except ValueError as error:
        return f"{name} is made of {ours}, of shape {', '.join(map(str, shapes))}: {error}"
    return Writing(whole.shape, dtypes[0], lambda: stored.joined([p.numbers() for p in parts]))
