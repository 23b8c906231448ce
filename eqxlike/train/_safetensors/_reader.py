"""`Reader`: finds the arrays of a model in files, checks them and reads them."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ...extend import NamedLeaf, committed_sharding
from .._checkpoints import place_like
from ._files import SUPPORTED, Entry, Source, dtype_name
from ._names import Stored, nearest

Rows = tuple[int, ...]

OTHER_NAMES = "If the file uses other names, pass a table of `names`"
IGNORE = "Add names that may be missing or unused to `ignore`"
_MAX_NEAREST = 20


class Found(NamedTuple):
    """The layout of an array that was found.

    - `where`: a text for errors, with the name in the model, the name in the file, and the file.
    """

    where: str
    stored: Stored


@dataclasses.dataclass
class Reader:
    """Finds the arrays of a model in files, and reads them. Collects problems and remedies, which
    `raise_if_unfit` raises.
    """

    entries: dict[str, Entry]
    stored: dict[str, Stored]
    is_ignored: Callable[[str], Any]
    casts: bool
    remedy_for_names: str
    problems: list[str] = dataclasses.field(default_factory=list)
    remedies: dict[str, None] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.used = {name for each in self.stored.values() for name in each.names}

    def find(self, leaf: NamedLeaf) -> dict[Rows, Found | None]:
        """Finds the array of a leaf without reading it. If the leaf stacks layers, finds the array
        of each layer.

        Returns a dict. The keys are the indices of layers, or `()` if the leaf is one array. The
        values are `Found`, or `None` if the array stays unchanged.
        """
        # A file may store stacked layers as a single array. Its name is then the path of the leaf.
        parts = (jtu.keystr((key,), simple=True) for key in leaf.path)
        whole = ".".join(part for part in parts if part)
        stored = {ours: self.stored[ours] for ours in leaf.rows if ours in self.stored}
        is_other = whole in self.entries and whole not in leaf.rows
        if is_other and not any(
            name in self.entries for each in stored.values() for name in each.names
        ):
            self.used.add(whole)
            return {(): self._find_row(whole, leaf.leaf, (), Stored(whole))}
        return {
            rows: self._find_row(ours, leaf.leaf, rows, stored.get(ours))
            for ours, rows in leaf.rows.items()
        }

    def _find_row(self, ours: str, leaf: Any, rows: Rows, stored: Stored | None) -> Found | None:
        if stored is None:
            if isinstance(leaf, jax.ShapeDtypeStruct):
                self._note(f"{ours} has no name in `names` and no values in `model_like`")
            return None
        if missing := [name for name in stored.names if name not in self.entries]:
            is_optional = self.is_ignored(ours) or all(map(self.is_ignored, missing))
            # A struct has no values, so it cannot stay unchanged, even if it is optional.
            if not is_optional or isinstance(leaf, jax.ShapeDtypeStruct):
                theirs = "" if missing == [ours] else f" (in the file {', '.join(missing)})"
                # Search for similar names only if there are few problems, because a search takes
                # milliseconds.
                is_few = len(self.problems) < _MAX_NEAREST
                near = ", ".join(nearest(missing, self._unused())) if is_few else ""
                near = near and f", nearest: {near}"
                self._note(f"{ours}{theirs} is missing{near}", self.remedy_for_names)
            return None
        entries = [self.entries[name] for name in stored.names]
        files = ", ".join(dict.fromkeys(entry.path.name for entry in entries))
        where = f"{ours} ({', '.join(stored.names)} in {files})"
        if unknown := [each.dtype for each in entries if each.dtype not in SUPPORTED]:
            self._note(f"{where} has dtype {unknown[0]}, which JAX does not support")
        elif stored.load is None and len(entries) > 1:
            self._note(f"{where} has several names in `names` but no `load`")
        else:
            for entry in entries:
                view = np.broadcast_to(np.empty((), jnp.dtype(entry.dtype)), entry.shape)
                try:
                    view = stored.view(view)
                except ValueError as error:
                    self._note(f"{where}, of shape {entry.shape}, {error}")
                    continue
                if stored.load is None:
                    self._check_fit(where, leaf, rows, view)
        return Found(where, stored)

    def read(self, leaf: NamedLeaf, found: dict[Rows, Found | None]) -> Any:
        """Reads a leaf from the files. `found` is the result of `find`."""
        like, num_problems = leaf.leaf, len(self.problems)
        if not any(found.values()):
            return like
        numbers = {rows: self._load(like, rows, each) for rows, each in found.items()}
        if len(self.problems) > num_problems:
            return like

        def fill(index: Any) -> np.ndarray:
            """Reads the part `index` of the array, one layer at a time."""
            ranges = [range(size)[each] for each, size in zip(index, like.shape, strict=True)]
            out = np.empty(tuple(map(len, ranges)), like.dtype)
            for rows, array in numbers.items():
                if all(row in each for row, each in zip(rows, ranges, strict=False)):
                    at = tuple(row - each.start for row, each in zip(rows, ranges, strict=False))
                    new = array.reshape(like.shape[len(rows) :])[index[len(rows) :]]
                    out[at] = new
                    is_cast = new.dtype.kind in "iu" and new.dtype != out.dtype
                    if is_cast and (out[at] != new).any() and (source := found[rows]):
                        problem = f"has integers that {like.dtype} cannot represent"
                        self._note(f"{source.where} {problem}")
            return out

        sharding = committed_sharding(like)
        if sharding is None or sharding.is_fully_replicated:
            new = place_like(fill((slice(None),) * like.ndim), like)
        else:
            new = jax.make_array_from_callback(like.shape, sharding, fill)
        # Wait for the copy to the device, so that the host's memory has only one array at a time.
        return jax.block_until_ready(new)

    def _load(self, leaf: Any, rows: Rows, found: Found | None) -> np.ndarray:
        """The numbers of one layer, as a memory map of the file unless `load` computes them."""
        if found is None:
            return np.asarray(leaf[rows])
        views = [found.stored.view(self.entries[name].read()) for name in found.stored.names]
        if found.stored.load is None:
            return views[0]
        try:
            array = np.asarray(found.stored.load(*views))
        except Exception as error:
            error.add_note(f"The function in `names` raised this for {found.where}.")
            raise
        self._check_fit(found.where, leaf, rows, array)
        return array

    def _check_fit(self, where: str, leaf: Any, rows: Rows, array: np.ndarray) -> None:
        """Adds a problem if an array does not have the shape and dtype that `leaf` expects."""
        shape, expected, dtype = leaf.shape[len(rows) :], dtype_name(leaf), str(array.dtype)
        text = f"{where} is {dtype} of shape {array.shape}, but {expected} of shape {shape} is"
        if _without_ones(array.shape) != _without_ones(shape):
            is_transposed = array.ndim > 1 and array.swapaxes(-1, -2).shape == shape
            self._note(
                f"{text} expected",
                "Read transposed weights with `train.Stored(name, transpose=True)`"
                if is_transposed
                else "Make a model of these sizes, or describe the layout with `train.Stored`",
            )
        elif dtype != expected:
            kinds = jnp.floating, jnp.complexfloating, jnp.integer
            both = array.dtype, leaf.dtype
            is_castable = any(all(jnp.issubdtype(each, kind) for each in both) for kind in kinds)
            if not (self.casts and is_castable):
                cast = 'Pass `dtype="like"` to cast'
                convert = "Convert arrays with `train.Stored(name, load=function)`"
                self._note(f"{text} expected", cast if is_castable else convert)
        is_numpys = isinstance(leaf, np.ndarray | np.generic)
        if not is_numpys and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            flag = "`jax.config.update('jax_enable_x64', True)`"
            self._note(f"{where} must be {expected}, which JAX supports only with {flag}")

    def refuse_unused(self) -> None:
        """Adds a problem for each array of the file that is not in the model."""
        remedy = "" if OTHER_NAMES in self.remedies else IGNORE
        for name in self._unused():
            self._note(f"{name} is in the file, but not in the model", remedy)

    def raise_if_unfit(self, source: Source) -> None:
        """Raises `ValueError` with all problems if there is a problem."""
        if self.problems:
            several = [source] if isinstance(source, str | os.PathLike) else source
            where, problems = ", ".join(map(str, several)), "; ".join(dict.fromkeys(self.problems))
            remedies = "".join(f" {remedy}." for remedy in self.remedies if remedy)
            raise ValueError(f"{where} does not fit `model_like`: {problems}.{remedies}")

    def _note(self, problem: str, remedy: str = "") -> None:
        self.problems.append(problem)
        self.remedies[remedy] = None

    def _unused(self) -> list[str]:
        return [n for n in self.entries if n not in self.used and not self.is_ignored(n)]


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]
