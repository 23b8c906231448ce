"""Import and export of weights in safetensors files, which PyTorch's tools read and write."""

import collections
import dataclasses
import fnmatch
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ..extend import NamedLeaf, committed_sharding, is_on_cpu, named_leaves
from ._checkpoints import place_like
from ._checks import check_not_deleted
from ._stored import (
    CODES,
    Entry,
    Names,
    Source,
    Stored,
    Writing,
    dtype_name,
    find_entries,
    nearest,
    stored_by_name,
    write_files,
)

Model = TypeVar("Model")


def export_safetensors(
    model: PyTree,
    path: str | os.PathLike[str],
    names: Names | None = None,
    *,
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int | None = None,
) -> None:
    """Writes the arrays of a model to a safetensors file.

    The name of an array in the file is its path in the model, joined with dots. For example, the
    weight of the first layer in a tuple `layers` is `layers.0.weight`, as in the `state_dict` of a
    PyTorch model with the same fields. The layers of a `ScanStack` are numbered in the same way and
    written separately. If `model` is a pair `(model, state)`, the arrays of the state are named
    after their layer. For example, an `nn.BatchNorm` has `0.norm.running_mean`,
    `0.norm.running_var` and `0.norm.batch_counter`.

    Arrays are written one by one. An existing file is replaced atomically.

    **Arguments:**

    - `model`: any pytree. Leaves that are not arrays, and static fields, are left out.
    - `path`: the file or a folder. In a folder, the file is named `model.safetensors`.
    - `names`: a table from names in the model to names in the file, as in `import_safetensors`. A
      pair of a name and a function is not allowed for export. Use a `Stored` with `load` and `save`
      instead.
    - `metadata`: a mapping from strings to strings. The default of its entry `format` is `pt`,
      because some tools accept no other value.
    - `max_shard_bytes`: maximum size of the arrays in one file. A larger model is written to
      several files, as in Hugging Face's libraries: `model-00001-of-00003.safetensors` and so on.
      `model.safetensors.index.json` lists these files. The files are in the folder of `path`. If
      `path` is a file, its name without the ending replaces `model` in these names.

    **Raises:**

    - `TypeError` if safetensors does not support the dtype of an array, such as the dtype of PRNG
      keys, or complex128.
    - `ValueError` if two arrays have the same name, if parts of a stored array are missing, or if a
      `Stored` has `load` but no `save`.
    - `FileExistsError` if the folder has another model that tools would read instead.
    - `OSError` if the file cannot be written.

    >>> import pathlib, tempfile, jax
    >>> from eqxlike import nn
    >>> from safetensors.numpy import load_file
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> export_safetensors(nn.Linear(2, 3, key=jax.random.key(0)), path, {"*": "linear.*"})
    >>> {name: array.shape for name, array in sorted(load_file(path).items())}
    {'linear.bias': (3,), 'linear.weight': (3, 2)}
    """
    check_not_deleted(model, "model", "train.export_safetensors")
    leaves = _checked_leaves(model, "train.export_safetensors")
    stored = stored_by_name([name for leaf in leaves for name in leaf.rows], names)
    arrays = arrays_to_write(leaves, stored)
    path = pathlib.Path(path)
    path = path / "model.safetensors" if path.is_dir() else path
    write_files(path, arrays, {"format": "pt", **(metadata or {})}, max_shard_bytes)


def import_safetensors(
    model_like: Model,
    path: Source,
    names: Names | None = None,
    *,
    dtype: Literal["like"] | None = None,
    ignore: str | Sequence[str] = (),
    strict: bool = True,
) -> Model:
    """Reads the arrays of a model from safetensors files.

    **Arguments:**

    - `model_like`: a model with the structure of the result. The model may contain
      `jax.ShapeDtypeStruct`s instead of arrays, as `filter_eval_shape` returns. Each array gets the
      sharding of the array that it replaces. If an array is split over devices, each part is read
      separately.
    - `path`: a file, a folder, an index of shards (`*.safetensors.index.json`), or a sequence of
      files. If a folder has an index, the index is used, otherwise all `*.safetensors` files.
    - `names`: a table that maps the names of arrays in the model to names in the file. Names in the
      model are the names that `export_safetensors` writes by default. An array without an entry has
      the same name in the file. Instead of a table, `names` may be a function that takes the name
      in the model and returns a value of the table.
        - A key may be a pattern. In a pattern, `*` matches any text, and `{i}`, or any word in
          braces, matches text without a dot. The value repeats the wildcards, as in
          `{"blocks.{i}.norm.*": "h.{i}.ln.*"}`. If a pattern has several `*`, the first `*` matches
          as much text as possible.
        - If a key is equal to the name, that key is used. Otherwise the first pattern that matches
          is used.
        - A value is the name in the file. It may also be a `Stored`, if the array is transposed in
          the file, or is a part of a larger array. Or the value may be a pair `(name, function)`.
          Then the result is `function(stored)`, where `stored` is the array in the file. `None`
          says that the array is not in the file and stays unchanged.
    - `dtype`: `"like"` casts floats to the float dtypes of `model_like`, and integers to its
      integer dtypes. With `None`, a difference in dtype is an error.
    - `ignore`: a pattern of names (`fnmatch`) or several patterns, such as `"*.attn.bias"`. An
      array of the file may be unused if its name matches. An array of `model_like` may be missing
      in the file if its name in the model or its name in the file matches. The array then stays
      unchanged.
    - `strict`: whether every array of the file must be used, unless its name matches `ignore`. Even
      with `strict=False`, every array of `model_like` must be in the file, unless its name matches
      `ignore`.

    **Returns:** the model with the arrays that were read. The shape of an array in the model and
    its shape in the file may differ by axes of size 1.

    **Raises:**

    - `ValueError`, with a list of the arrays, if arrays are missing, unused, or have another shape
      or dtype.
    - `ValueError` if a file is damaged or has another format, or if two files have an array of the
      same name.
    - `OSError` if a file cannot be read.
    - `TypeError` if safetensors does not support the dtype of an array of `model_like`.
    - `ImportError` without safetensors: `pip install 'eqxlike[train]'`.

    !!! example

        Load a PyTorch `state_dict`.

        >>> import pathlib, tempfile, jax, numpy as np
        >>> from eqxlike import nn
        >>> from safetensors.numpy import save_file
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> state_dict = {"0.weight": np.ones((3, 2), "f4"), "0.bias": np.zeros(3, "f4")}
        >>> save_file(state_dict, path)
        >>> like = nn.Linear(2, 3, key=jax.random.key(0))
        >>> model = import_safetensors(like, path, {"*": "0.*"})
        >>> model(np.ones(2, "f4"))
        Array([2., 2., 2.], dtype=float32)
    """
    check_not_deleted(model_like, "model_like", "train.import_safetensors")
    if dtype not in (None, "like"):
        raise ValueError(f'import_safetensors: dtype must be None or "like", got {dtype!r}.')
    patterns = [ignore] if isinstance(ignore, str) else ignore
    is_ignored = re.compile("|".join(map(fnmatch.translate, patterns)) or "(?!)").match
    leaves = _checked_leaves(model_like, "train.import_safetensors")
    stored = stored_by_name([name for leaf in leaves for name in leaf.rows], names)
    entries = find_entries(path)
    remedy = OTHER_NAMES if names is None else IGNORE
    reader = Reader(entries, stored, is_ignored, dtype == "like", remedy)
    found = [reader.find(leaf) for leaf in leaves]
    if strict:
        remedy = "" if OTHER_NAMES in reader.remedies else IGNORE
        for name in reader.unused():
            reader.note(f"{name} is in the file, but not in the model", remedy)
    reader.raise_if_unfit(path)
    new = [reader.read(leaf, rows) for leaf, rows in zip(leaves, found, strict=True)]
    reader.raise_if_unfit(path)
    return jtu.tree_unflatten(jtu.tree_structure(model_like), new)


def _checked_leaves(model: PyTree, taker: str) -> list[NamedLeaf]:
    """Checks the names and dtypes of the arrays of a model. Returns the leaves with their names."""
    leaves = named_leaves(model)
    for each in leaves:
        if each.rows and dtype_name(each.leaf) not in CODES:
            raise TypeError(
                f"{taker}: safetensors does not support {each.leaf.dtype}, the dtype of "
                f"model{jtu.keystr(each.path)}. Cast the array, or remove it from the model."
            )
    counts = collections.Counter(name for leaf in leaves for name in leaf.rows)
    if several := [name for name, count in counts.items() if count > 1]:
        raise ValueError(
            f"{taker}: several arrays have the same name: {', '.join(several)}. Rename fields or "
            "keys that contain dots or have the same text."
        )
    return leaves


# --- Arrays in files: found, checked and read ---


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
                self.note(f"{ours} has no name in `names` and no values in `model_like`")
            return None
        if missing := [name for name in stored.names if name not in self.entries]:
            is_optional = self.is_ignored(ours) or all(map(self.is_ignored, missing))
            # A struct has no values, so it cannot stay unchanged, even if it is optional.
            if not is_optional or isinstance(leaf, jax.ShapeDtypeStruct):
                theirs = "" if missing == [ours] else f" (in the file {', '.join(missing)})"
                # Search for similar names only if there are few problems, because a search takes
                # milliseconds.
                is_few = len(self.problems) < _MAX_NEAREST
                near = ", ".join(nearest(missing, self.unused())) if is_few else ""
                near = near and f", nearest: {near}"
                self.note(f"{ours}{theirs} is missing{near}", self.remedy_for_names)
            return None
        entries = [self.entries[name] for name in stored.names]
        files = ", ".join(dict.fromkeys(entry.path.name for entry in entries))
        where = f"{ours} ({', '.join(stored.names)} in {files})"
        if unknown := [each.dtype for each in entries if each.dtype not in CODES]:
            self.note(f"{where} has dtype {unknown[0]}, which JAX does not support")
        elif stored.load is None and len(entries) > 1:
            self.note(f"{where} has several names in `names` but no `load`")
        else:
            for entry in entries:
                view = np.broadcast_to(np.empty((), jnp.dtype(entry.dtype)), entry.shape)
                try:
                    view = stored.view(view)
                except ValueError as error:
                    self.note(f"{where}, of shape {entry.shape}, {error}")
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
                        self.note(f"{source.where} {problem}")
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
            self.note(
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
                self.note(f"{text} expected", cast if is_castable else convert)
        is_numpys = isinstance(leaf, np.ndarray | np.generic)
        if not is_numpys and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            flag = "`jax.config.update('jax_enable_x64', True)`"
            self.note(f"{where} must be {expected}, which JAX supports only with {flag}")

    def raise_if_unfit(self, source: Source) -> None:
        """Raises `ValueError` with all problems if there is a problem."""
        if self.problems:
            several = [source] if isinstance(source, str | os.PathLike) else source
            where, problems = ", ".join(map(str, several)), "; ".join(dict.fromkeys(self.problems))
            remedies = "".join(f" {remedy}." for remedy in self.remedies if remedy)
            raise ValueError(f"{where} does not fit `model_like`: {problems}.{remedies}")

    def note(self, problem: str, remedy: str = "") -> None:
        self.problems.append(problem)
        self.remedies[remedy] = None

    def unused(self) -> list[str]:
        return [n for n in self.entries if n not in self.used and not self.is_ignored(n)]


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


# --- Arrays to write ---


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
    if len(set(dtypes)) > 1 or dtypes[0] not in CODES:
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
