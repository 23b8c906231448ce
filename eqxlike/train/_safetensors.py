"""Models in safetensors files, as PyTorch's tools write and read them."""

import collections
import dataclasses
import difflib
import fnmatch
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._pytree import listed, open_to_replace
from ._checkpoints import place_like
from ._checks import check_not_deleted

Model = TypeVar("Model")
NameInFile = str | tuple[str, Callable[[np.ndarray], np.ndarray]]
Names = Mapping[str, NameInFile] | Callable[[str], NameInFile]

# The names of dtypes in the files.
_DTYPES = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    **{f"F{size}": f"float{size}" for size in (16, 32, 64)},
    **{f"I{size}": f"int{size}" for size in (8, 16, 32, 64)},
    **{f"U{size}": f"uint{size}" for size in (8, 16, 32, 64)},
}
_SUPPORTED = set(_DTYPES.values())


def export_safetensors(
    model: PyTree, path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes the arrays of a model to a safetensors file, each named by its path with dots.

    The weight of the first of a tuple of layers is `layers.0.weight`, as in the `state_dict` of a
    PyTorch model of the same fields. A file that is there is replaced as a whole.

    **Arguments:**

    - `model`: any pytree. What is not an array is left out: numbers, functions, static fields.
    - `path`: the file.
    - `metadata`: strings by strings, for whoever reads the file. `format` is `pt`, unless given
      here: some tools read no other.

    **Raises:** `TypeError` for an array of a dtype that safetensors does not have, such as PRNG
    keys and complex128; `ValueError` if two arrays have one name; `OSError` if the file cannot be
    written; `ImportError` without safetensors, which `pip install 'eqxlike[train]'` brings.

    >>> import pathlib, tempfile, jax
    >>> from eqxlike import nn
    >>> from safetensors.numpy import load_file
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> export_safetensors(nn.Linear(2, 3, key=jax.random.key(0)), path)
    >>> {name: array.shape for name, array in sorted(load_file(path).items())}
    {'bias': (3,), 'weight': (3, 2)}
    """
    check_not_deleted(model, "model", "train.export_safetensors")
    named, _ = _named_leaves(model, "train.export_safetensors")
    arrays = {}
    for name, leaf in named:
        if name is not None:
            array = np.asarray(leaf, order="C")
            arrays[name] = array.astype(array.dtype.newbyteorder("="), copy=False)
    content = _safetensors().numpy.save(arrays, metadata={"format": "pt", **(metadata or {})})
    with open_to_replace(pathlib.Path(path)) as file:
        file.write(content)


def import_safetensors(
    model_like: Model,
    path: str | os.PathLike[str],
    names: Names | None = None,
    *,
    dtype: Literal["like"] | None = None,
    ignore: str | Sequence[str] = (),
    strict: bool = True,
) -> Model:
    """Reads the arrays of a model from a safetensors file.

    **Arguments:**

    - `model_like`: a model of the structure to return; it may have `jax.ShapeDtypeStruct`s for
      arrays, as of `filter_eval_shape`. Arrays come back with the sharding of those in it.
    - `path`: the file.
    - `names`: the name in the file for each name of ours, as `export_safetensors` gives them: a
      table, in which names that are the same may be left out, or a function of ours. In the place
      of a name a pair `(name, function)` will do, with a function of the array in the file that
      returns ours: to transpose it, to cast it, or to take a part of it.
    - `dtype`: `"like"` casts floats to the floats of `model_like`, and integers to its integers;
      `None` refuses another dtype.
    - `ignore`: patterns of names, such as `"*.attn.bias"` (`fnmatch`). An array of the file whose
      name matches may be unused. An array of `model_like` whose name, here or in the file, matches
      may be missing from the file: then it stays unchanged.
    - `strict`: whether each array of the file must be used. Each array of `model_like` must be in
      the file in any case, unless `ignore` matches.

    **Returns:** the model with the arrays that were read.

    **Raises:** `ValueError` if arrays are missing, unused, or have another shape or dtype: it names
    them all. `ValueError` for a damaged file, a file in another format, and the index of several
    files; `OSError` if the file cannot be read; `TypeError` and `ImportError` as
    `export_safetensors`.

    !!! example

        A `state_dict` of PyTorch, in a model of ours.

        >>> import pathlib, tempfile, jax, numpy as np
        >>> from eqxlike import nn
        >>> from safetensors.numpy import save_file
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> state_dict = {"0.weight": np.ones((3, 2), "f4"), "0.bias": np.zeros(3, "f4")}
        >>> save_file(state_dict, path)
        >>> like = nn.Linear(2, 3, key=jax.random.key(0))
        >>> model = import_safetensors(like, path, {"weight": "0.weight", "bias": "0.bias"})
        >>> model(np.ones(2, "f4"))
        Array([2., 2., 2.], dtype=float32)
    """
    check_not_deleted(model_like, "model_like", "train.import_safetensors")
    if dtype not in (None, "like"):
        raise ValueError(f'import_safetensors: dtype must be None or "like", got {dtype!r}.')
    patterns = [ignore] if isinstance(ignore, str) else ignore
    is_ignored = re.compile("|".join(map(fnmatch.translate, patterns)) or "(?!)").match
    named, treedef = _named_leaves(model_like, "train.import_safetensors")
    sources = _sources([name for name, _ in named if name is not None], names)
    file = _File(pathlib.Path(path))
    is_unnamed = names is None and any(each.name not in file.entries for each in sources.values())
    hint = (
        " If the file uses other names, pass a table of `names`."
        if is_unnamed
        else " Add names that may be missing or unused to `ignore`."
    )
    file.refuse(
        _problems_in_header(named, sources, file, is_ignored, strict, dtype == "like"), hint
    )
    leaves, problems = [], []
    for name, leaf in named:
        if name is None or sources[name].name not in file.entries:
            leaves.append(leaf)
            continue
        array = sources[name].read(file)
        if problem := _mismatch(leaf, array.shape, str(array.dtype), dtype == "like"):
            problems.append(f"{sources[name]} {problem}")
            continue
        cast = array.astype(leaf.dtype, copy=False)
        if array.dtype.kind in "iu" and (cast != array).any():
            problems.append(f"{sources[name]} has integers that {leaf.dtype} cannot represent")
        leaves.append(place_like(cast, leaf))
    file.refuse(problems)
    return treedef.unflatten(leaves)


@dataclasses.dataclass(frozen=True)
class _Source:
    """Where an array of ours comes from."""

    ours: str
    name: str
    function: Callable[..., Any] | None

    def __str__(self) -> str:
        return self.ours if self.ours == self.name else f"{self.ours} (in the file {self.name})"

    def read(self, file: "_File") -> np.ndarray:
        """The array, as ours is."""
        array = file.read(self.name)
        if self.function is None:
            return array
        try:
            # A copy: it may be an array that the function keeps.
            return np.array(self.function(array))
        except Exception as error:
            error.add_note(f"This was raised by the function in `names` for {self}.")
            raise


class _File:
    """A safetensors file: what is in it, and its arrays one by one."""

    def __init__(self, path: pathlib.Path) -> None:
        safetensors = _safetensors()
        self.path = path
        with open(path, "rb") as file:
            try:
                # Looks at the header, and whether the file is as long as that says.
                with safetensors.safe_open(path, framework="np"):
                    pass
            except safetensors.SafetensorError as error:
                _refuse_index(path)
                raise ValueError(f"{path} is damaged, or no safetensors file: {error}") from error
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
            self._start = file.tell()
        header.pop("__metadata__", None)
        self.entries: dict[str, dict[str, Any]] = header

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], str]:
        """Of one array; the dtype as the file calls it where nobody else knows it."""
        entry = self.entries[name]
        dtype = str(entry["dtype"])
        return tuple(entry["shape"]), _DTYPES.get(dtype, dtype)

    def read(self, name: str) -> np.ndarray:
        """One array."""
        shape, dtype = self.shape_and_dtype(name)
        begin, end = self.entries[name]["data_offsets"]
        with open(self.path, "rb") as file:
            file.seek(self._start + begin)
            numbers = np.fromfile(file, np.uint8, end - begin)
        return numbers.view(jnp.dtype(dtype)).reshape(shape)

    def refuse(self, problems: list[str], hint: str = "") -> None:
        """Raises `ValueError` if there are problems."""
        if problems:
            raise ValueError(f"{self.path} does not fit `model_like`: {'; '.join(problems)}.{hint}")


def _refuse_index(path: pathlib.Path) -> None:
    """Raises `ValueError` for the index of a model that is split into several files."""
    try:
        shards = sorted({*json.loads(path.read_bytes())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError):
        return
    raise ValueError(
        f"{path} is the index of a model in {len(shards)} files: {listed(shards)}. Join them into "
        "one file, and import it: `save_file({name: array for shard in shards for name, array in "
        "load_file(shard).items()}, path)`, with the functions of `safetensors.numpy`."
    )


def _problems_in_header(
    named: list[tuple[str | None, Any]],
    sources: dict[str, _Source],
    file: _File,
    is_ignored: Callable[[str], Any],
    strict: bool,
    casts: bool,
) -> list[str]:
    """What is wrong as far as can be told before an array is read."""
    problems = []
    used = {source.name for source in sources.values()}
    unused = [name for name in file.entries if name not in used and not is_ignored(name)]
    for name, leaf in named:
        if name is None:
            continue
        source = sources[name]
        if source.name not in file.entries:
            is_optional = is_ignored(source.name) or is_ignored(name)
            # In the place of a struct something has to come.
            if not is_optional or isinstance(leaf, jax.ShapeDtypeStruct):
                near = ", ".join(_nearest([source.name], unused))
                problems.append(f"{source} is missing" + (near and f", nearest: {near}"))
            continue
        shape, dtype = file.shape_and_dtype(source.name)
        if dtype not in _SUPPORTED:
            problems.append(f"{source} is of dtype {dtype}, which JAX does not have")
        elif source.function is None and (problem := _mismatch(leaf, shape, dtype, casts)):
            problems.append(f"{source} {problem}")
    if strict:
        problems += [f"{name} is in the file, but not in the model" for name in unused]
    return problems


def _mismatch(like: Any, shape: tuple[int, ...], dtype: str, casts: bool) -> str | None:
    """What is wrong with an array in the place of `like`."""
    expected = like.dtype.newbyteorder("=") if isinstance(like, np.ndarray) else like.dtype
    if shape != like.shape:
        return f"has shape {shape}, but {like.shape} is expected"
    if dtype != str(expected):
        kinds = jnp.floating, jnp.complexfloating, jnp.integer
        is_castable = any(
            jnp.issubdtype(dtype, kind) and jnp.issubdtype(expected, kind) for kind in kinds
        )
        if not (casts and is_castable):
            way_out = ' (pass `dtype="like"` to cast it)' if is_castable else ""
            return f"has dtype {dtype}, but {expected} is expected{way_out}"
    if not _is_numpys(like) and jax.dtypes.canonicalize_dtype(expected) != expected:
        flag = "`jax.config.update('jax_enable_x64', True)`"
        return f"has dtype {dtype}, which JAX has only with {flag}"
    return None


def _sources(ours: list[str], names: Names | None) -> dict[str, _Source]:
    """Where each array of ours comes from, by our name."""
    table = names if isinstance(names, Mapping) else {}
    if names is not None and not callable(names) and names is not table:
        raise TypeError(f"`names` is expected to be a table or a function, and is {names!r}.")
    if unknown := [name for name in table if name not in set(ours)]:
        raise ValueError(
            f"`names` has {', '.join(map(str, unknown))}, but no array of `model_like` has that "
            f"name; nearest: {', '.join(_nearest(unknown, ours)) or ', '.join(ours)}."
        )
    sources = {}
    for name in ours:
        match entry := names(name) if callable(names) else table.get(name, name):
            case str():
                sources[name] = _Source(name, entry, None)
            case (str() as theirs, function) if callable(function):
                sources[name] = _Source(name, theirs, function)
            case _:
                raise TypeError(
                    "`names` gives the name in the file, a string, or a pair of it and a function; "
                    f"for {name} it gave {entry!r}."
                )
    return sources


def _named_leaves(model: PyTree, taker: str) -> tuple[list[tuple[str | None, Any]], Any]:
    """Each leaf with its name, `None` if it is not an array; and the treedef."""
    paths_and_leaves, treedef = jtu.tree_flatten_with_path(model)
    named = []
    for path, leaf in paths_and_leaves:
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
            named.append((None, leaf))
            continue
        if str(leaf.dtype.newbyteorder("=") if _is_numpys(leaf) else leaf.dtype) not in _SUPPORTED:
            raise TypeError(
                f"{taker}: safetensors has no dtype {leaf.dtype}, which is that of "
                f"model{jtu.keystr(path)}. Cast it, or take it out of the model."
            )
        # Of a frozen array the last part of the path is empty.
        parts = [jtu.keystr((key,), simple=True) for key in path]
        named.append((".".join(part for part in parts if part), leaf))
    counts = collections.Counter(name for name, _ in named if name is not None)
    if several := [name for name, count in counts.items() if count > 1]:
        raise ValueError(
            f"{taker}: these names stand for more than one array each: {', '.join(several)}. "
            "Rename fields or keys with dots in them, or that read the same."
        )
    return named, treedef


def _nearest(names: Iterable[Any], known: list[str]) -> list[str]:
    return [near for name in names for near in difflib.get_close_matches(str(name), known)]


def _is_numpys(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | np.generic)


def _safetensors() -> ModuleType:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "Safetensors files need safetensors: `pip install 'eqxlike[train]'`."
        ) from error
    return safetensors
