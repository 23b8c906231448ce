"""Arrays in safetensors files: their names and layout, their files, and shards of files."""

import contextlib
import dataclasses
import difflib
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._check_numbers import whole_number
from ..extend import listed, open_to_replace
from ._checks import importing


@dataclasses.dataclass(frozen=True, init=False)
class Stored:
    """The layout in which a file stores an array of the model. Use it as a value in the table
    `names` of `import_safetensors` and `export_safetensors`.

    Import applies `transpose`, then `part`, then `load`. Export applies `save`, then joins the
    parts to one array, transposes this array back, and reshapes it to `shape`.

    >>> import pathlib, tempfile, jax
    >>> from eqxlike import nn, train
    >>> from safetensors.numpy import load_file
    >>> key1, key2 = jax.random.split(jax.random.key(0))
    >>> layers = {"key": nn.Linear(2, 4, key=key1), "value": nn.Linear(2, 4, key=key2)}
    >>> names = {  # one array for both, with weights as (inputs, outputs)
    ...     "key.*": train.Stored("key_value.*", transpose=True, part=(0, 2)),
    ...     "value.*": train.Stored("key_value.*", transpose=True, part=(1, 2)),
    ... }
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> train.export_safetensors(layers, path, names)
    >>> {name: array.shape for name, array in sorted(load_file(path).items())}
    {'key_value.bias': (8,), 'key_value.weight': (2, 8)}
    >>> layers = train.import_safetensors(layers, path, names)
    """

    names: tuple[str, ...]
    transpose: bool | tuple[int, ...]
    part: tuple[int, int] | tuple[int, int, int] | None
    axis: int
    groups: int
    shape: tuple[int, ...] | None
    load: Callable[..., Any] | None
    save: Callable[..., Any] | None

    def __init__(
        self,
        *names: str,
        transpose: bool | Sequence[int] = False,
        part: Sequence[int] | None = None,
        axis: int = 0,
        groups: int = 1,
        shape: Sequence[int] | None = None,
        load: Callable[..., Any] | None = None,
        save: Callable[..., Any] | None = None,
    ):
        """**Arguments:**

        - `names`: the name of the array in the file. Pass several names if the model's array is
          computed from several arrays of the file. Import then needs `load`, and export needs
          `save`.
        - `transpose`: `True` swaps the last two axes. A tuple permutes the axes of the stored array
          as `numpy.transpose` does. For example, `(3, 2, 0, 1)` turns (height, width, inputs,
          outputs) into (outputs, inputs, height, width). An array is unchanged if it has fewer than
          two axes, or if its number of axes is not the length of the tuple. So one pattern can
          match both weight and bias.
        - `part`: which part of the stored array is the model's array. With `(k, n)`, the stored
          array has `n` equal parts along `axis`, and the model's array is part `k`. With `(start,
          stop, n)`, the model's array consists of the parts from `start` to `stop`, exclusive.
          Export needs all parts of a stored array.
        - `axis`: the axis along which the array has parts, counted after `transpose`.
        - `groups`: number of equal groups into which `axis` is divided first. Each group then has
          `n` parts, and the model's array joins part `k` of all groups. For example, the stored
          array may have queries, keys and values of the first head, then of the second head and so
          on. Then use `part=(0, 3), groups=num_heads` for the queries.
        - `shape`: the shape to write, if it differs from the shape in the model by axes of size 1.
          An example is `(-1,)` for the bias of a convolution. Import adds and drops such axes
          automatically.
        - `load`: function that takes the stored arrays and returns the model's array. The stored
          arrays are read-only.
        - `save`: the inverse of `load`. It takes the model's array as a NumPy array and returns a
          tuple of stored arrays, or one array if there is one name.

        **Raises:** `ValueError` if there is no name, or if `part` is out of range.
        """
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"Stored expected names in the file as strings, got {names}.")
        transpose = transpose if isinstance(transpose, bool) else tuple(transpose)
        part, shape = part and tuple(part), shape and tuple(shape)
        groups = whole_number(groups, "groups")
        values = (names, transpose, part, axis, groups, shape, load, save)
        vars(self).update(zip(self.__dataclass_fields__, values, strict=True))
        start, stop, num = self.bounds if part is None or len(part) in (2, 3) else (0, 0, 0)
        if not 0 <= start < stop <= num:
            raise ValueError(
                "Stored expected `part` to be (k, n) with 0 <= k < n, or (start, stop, n) with "
                f"0 <= start < stop <= n; got {part}."
            )

    @property
    def bounds(self) -> tuple[int, int, int]:
        """`(start, stop, total)`: the model's array is parts `start` to `stop - 1` of `total`."""
        first, *others, num = self.part or (0, 1)
        return first, (others[0] if others else first + 1), num

    def view(self, array: np.ndarray) -> np.ndarray:
        """A view of the transposed part of a stored array, to pass to `load`. No numbers are read.

        **Raises:** `ValueError` if the stored array cannot be split into equal parts.
        """
        array = self._transposed(array, is_inverse=False)
        if self.part is None:
            return array
        start, stop, num = self.bounds
        size = array.shape[self.axis] if -array.ndim <= self.axis < array.ndim else 0
        if size % (num * self.groups) or not size:
            each = "" if self.groups == 1 else f"{self.groups} groups of "
            raise ValueError(f"cannot be split into {each}{num} equal parts along axis {self.axis}")
        unit = size // (num * self.groups)
        axis, grouped = self._grouped(array)
        places = [slice(None)] * grouped.ndim
        places[axis + 1] = slice(start * unit, stop * unit)
        return _merged(grouped[tuple(places)], axis)

    def saved(self, array: np.ndarray) -> tuple[np.ndarray, ...]:
        """The arrays that `save` returns for an array of the model, one for each name.

        Such an array may be only a part of a stored array.
        """
        if self.save is None:
            return (array,)
        arrays = self.save(array)
        arrays = (arrays,) if len(self.names) == 1 else tuple(arrays)
        if len(arrays) != len(self.names):
            names = ", ".join(self.names)
            raise ValueError(f"`save` for {names} returned {len(arrays)} arrays")
        return tuple(map(np.asarray, arrays))

    def joined(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Joins all parts of a stored array. Returns the stored array."""
        if len(arrays) > 1:
            axis, _ = self._grouped(arrays[0])
            grouped = [self._grouped(array)[1] for array in arrays]
            array = _merged(np.concatenate(grouped, axis + 1), axis)
        else:
            array = arrays[0]
        array = self._transposed(array, is_inverse=True)
        return array if self.shape is None else array.reshape(self.shape)

    def _grouped(self, array: np.ndarray) -> tuple[int, np.ndarray]:
        """The axis of `part` as a non-negative number, and the array with this axis split in two.

        The first of the two new axes is the axis of groups.
        """
        if not -array.ndim <= self.axis < array.ndim:
            raise ValueError(f"an array of shape {array.shape} has no axis {self.axis}")
        axis, shape = self.axis % array.ndim, array.shape
        size = shape[axis] // self.groups
        return axis, array.reshape(*shape[:axis], self.groups, size, *shape[axis + 1 :])

    def _transposed(self, array: np.ndarray, *, is_inverse: bool) -> np.ndarray:
        if isinstance(self.transpose, bool):
            return array.swapaxes(-1, -2) if self.transpose and array.ndim > 1 else array
        if array.ndim != len(self.transpose):
            return array
        order = np.argsort(self.transpose) if is_inverse else self.transpose
        return array.transpose(order)


def _merged(array: np.ndarray, axis: int) -> np.ndarray:
    """Merges `axis` and the next axis of an array."""
    groups, size = array.shape[axis : axis + 2]
    return array.reshape(*array.shape[:axis], groups * size, *array.shape[axis + 2 :])


NameInFile = str | tuple[str, Callable[..., Any]] | Stored | None
Names = Mapping[str, NameInFile] | Callable[[str], NameInFile]


def stored_by_name(ours: Sequence[str], names: Names | None) -> dict[str, Stored]:
    """The layout of each array of the model, by its name in the model.

    An array is left out if its value in `names` is `None`, because such an array is in no file.

    **Raises:** `ValueError` if a key of `names` matches no array. `TypeError` if a value is not a
    name, a pair, a `Stored` or `None`.
    """
    if names is not None and not isinstance(names, Mapping):
        if not callable(names):
            raise TypeError(f"`names` must be a mapping or a function, got {names!r}.")
        values = ((name, names(name)) for name in ours)
        return {name: _as_stored(name, value) for name, value in values if value is not None}
    table = dict(names or {})
    patterns = {key: _pattern(key) for key in table if re.search(_WILD, str(key))}
    found: dict[str, Stored] = {}
    matched = set(ours)
    for name in ours:
        matches = {key: match for key, each in patterns.items() if (match := each.fullmatch(name))}
        matched.update(matches)
        key = name if name in table else next(iter(matches), None)
        value = name if key is None else table[key]
        if value is not None:
            stored = _as_stored(name, value)
            found[name] = _filled(stored, key, matches[key]) if key in matches else stored
    if unknown := [key for key in table if key not in matched]:
        raise ValueError(
            f"`names` has {', '.join(map(str, unknown))}, but no array of the model has that name; "
            f"nearest: {', '.join(nearest(unknown, ours)) or ', '.join(ours)}."
        )
    return found


def nearest(names: Iterable[Any], known: Sequence[str]) -> list[str]:
    """The names in `known` that are similar to one of `names`."""
    return [near for name in names for near in difflib.get_close_matches(str(name), known)]


_WILD = r"\*|\{\w+\}"


def _pattern(key: str) -> re.Pattern[str]:
    """Compiles a key. `*` matches any text. `{i}` matches text without dots; if `{i}` occurs
    several times, it matches the same text each time.
    """
    seen: set[str] = set()

    def group(match: re.Match[str]) -> str:
        word = match[1]
        if word is None:
            return "(.*)"
        is_repeated = word in seen
        seen.add(word)
        return f"(?P=w_{word})" if is_repeated else f"(?P<w_{word}>[^.]+)"

    return re.compile(re.sub(r"\\\*|\\\{(\w+)\\\}", group, re.escape(key)))


def _filled(stored: Stored, key: str, match: re.Match[str]) -> Stored:
    """Replaces the wildcards in the value of a pattern by the texts that the key has matched."""
    words = match.re.groupindex.values()
    stars = [text for i, text in enumerate(match.groups(), start=1) if i not in words]

    def fill(name: str) -> str:
        left = iter(stars)

        def text(wild: re.Match[str]) -> str:
            word = f"w_{wild[0].strip('{}')}"
            found = next(left, None) if wild[0] == "*" else match.groupdict().get(word)
            if found is None:
                raise ValueError(
                    f"`names` maps {key} to {name}, but {wild[0]} is missing in the key."
                )
            return found

        return re.sub(_WILD, text, name)

    new = Stored("")
    vars(new).update({**vars(stored), "names": tuple(map(fill, stored.names))})
    return new


def _as_stored(ours: str, value: Any) -> Stored:
    match value:
        case Stored():
            return value
        case str():
            return Stored(value)
        case (str() as name, function) if callable(function):
            return Stored(name, load=function)
    raise TypeError(
        "A value in `names` must be the name in the file, a pair of the name and a function, a "
        f"`train.Stored`, or None; for {ours} it is {value!r}."
    )


# --- Files, shards and the index of shards ---


Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

# Maps the names of dtypes in files to JAX's dtypes.
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
CODES = {name: code for code, name in _DTYPES.items()}


def dtype_name(array: Any) -> str:
    """The name of the dtype of an array or a struct, ignoring its byte order."""
    is_numpys = isinstance(array, np.ndarray | np.generic)
    return str(array.dtype.newbyteorder("=") if is_numpys else array.dtype)


@dataclasses.dataclass(frozen=True)
class Entry:
    """An array in a file. If JAX does not support its dtype, `dtype` is the name of the dtype in
    the file.
    """

    path: pathlib.Path
    shape: tuple[int, ...]
    dtype: str
    offset: int

    def read(self) -> np.ndarray:
        """The array as a memory map. The numbers are read from the file when they are used."""
        dtype = np.dtype(jnp.dtype(self.dtype))
        if 0 in self.shape:
            return np.empty(self.shape, dtype)
        num_bytes = int(np.prod(self.shape)) * dtype.itemsize
        data = np.memmap(self.path, np.uint8, "r", self.offset, (num_bytes,))
        return data.view(np.ndarray).view(dtype).reshape(self.shape)


def find_entries(source: Source) -> dict[str, Entry]:
    """Finds arrays by name in a file, a folder, the shards of an index, or several files.

    **Raises:** `ValueError` if a file is damaged, or if two files have an array of the same name.
    `OSError` if a file cannot be read, or if a folder has no file.
    """
    several = [source] if isinstance(source, str | os.PathLike) else source
    found: dict[str, Entry] = {}
    for path in (file for each in several for file in _files(pathlib.Path(each))):
        for name, entry in _read_header(path).items():
            if name in found:
                raise ValueError(
                    f"{name} is in two files, {found[name].path} and {path}: pass one of them."
                )
            found[name] = entry
    return found


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    """The safetensors files of a path, which may be a file, an index of shards, or a folder."""
    if path.is_dir():
        indices = sorted(path.glob("*.safetensors.index.json"))
        files = indices or sorted(path.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{path} has no file `*.safetensors`.")
        if len(indices) > 1:
            names = listed([index.name for index in indices])
            raise ValueError(f"{path} has several indices, {names}: pass one of them.")
        return _files(indices[0]) if indices else files
    if path.suffix != ".json":
        return [path]
    try:
        shards = {*json.loads(path.read_bytes())["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is damaged or not an index: it has no valid `weight_map`."
        ) from error
    files = [path.parent / shard for shard in sorted(shards)]
    if missing := [str(file) for file in files if not file.exists()]:
        raise FileNotFoundError(f"{path} lists shards that are missing: {listed(missing)}.")
    return files


def _read_header(path: pathlib.Path) -> dict[str, Entry]:
    """The arrays of one file by name."""
    with importing("Reading safetensors files needs safetensors", "train"):
        import safetensors
    with open(path, "rb") as file:
        try:
            # `safe_open` checks the header and the length of the file.
            with safetensors.safe_open(path, framework="np"):
                pass
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path} is damaged or not a safetensors file: {error}") from error
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start = file.tell()
    header.pop("__metadata__", None)
    entries = {}
    for name, entry in header.items():
        dtype, offset = str(entry["dtype"]), start + entry["data_offsets"][0]
        entries[name] = Entry(path, tuple(entry["shape"]), _DTYPES.get(dtype, dtype), offset)
    return entries


@dataclasses.dataclass(frozen=True)
class Writing:
    """An array to write. `make` computes the array just before it is written."""

    shape: tuple[int, ...]
    dtype: str
    make: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * jnp.dtype(self.dtype).itemsize


def write_files(
    path: pathlib.Path,
    arrays: Mapping[str, Writing],
    metadata: Mapping[str, str],
    max_shard_bytes: int | None,
) -> None:
    """Writes arrays to one file, or to shards and an index in the same folder.

    An existing file is replaced only when all new files are complete.

    **Raises:** `FileExistsError` if the folder has another model that tools would read instead.
    """
    shards = list(_split(arrays, max_shard_bytes))
    stem, num = path.name.removesuffix(".safetensors"), len(shards)
    names = [f"{stem}-{i:05}-of-{num:05}.safetensors" for i in range(1, num + 1)]
    files = [path] if num == 1 else [path.with_name(name) for name in names]
    index = path.with_name(f"{stem}.safetensors.index.json")
    other = path if num > 1 else index
    if other.exists():
        raise FileExistsError(
            f"{other} exists, and tools would read it instead of {files[0]}: remove it, or export "
            "to another folder."
        )
    with contextlib.ExitStack() as stack:
        if num > 1:
            pairs = zip(files, shards, strict=True)
            weight_map = {name: file.name for file, part in pairs for name in part}
            size = sum(each.num_bytes for each in arrays.values())
            content = {"metadata": {"total_size": size}, "weight_map": weight_map}
            opened = stack.enter_context(open_to_replace(index))
            opened.write(json.dumps(content, indent=2, sort_keys=True).encode())
        for file, part in zip(files, shards, strict=True):
            _write(stack.enter_context(open_to_replace(file)), part, metadata)


def _split(arrays: Mapping[str, Writing], limit: int | None) -> Iterator[dict[str, Writing]]:
    """Splits arrays into shards of at most `limit` bytes. A larger array gets its own shard."""
    part: dict[str, Writing] = {}
    size = 0
    for name, array in arrays.items():
        if part and limit is not None and size + array.num_bytes > limit:
            yield part
            part, size = {}, 0
        part[name] = array
        size += array.num_bytes
    yield part


def _write(file: Any, arrays: Mapping[str, Writing], metadata: Mapping[str, str]) -> None:
    # Write the widest dtypes first, so that all arrays are aligned.
    order = sorted(arrays.items(), key=lambda item: (-jnp.dtype(item[1].dtype).itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, array in order:
        begin, end = end, end + array.num_bytes
        entry = {"dtype": CODES[array.dtype], "shape": array.shape, "data_offsets": (begin, end)}
        header[name] = entry
    content = json.dumps(header, ensure_ascii=False).encode()
    content += b" " * (-len(content) % 8)
    file.write(len(content).to_bytes(8, "little") + content)
    for _, array in order:
        numbers = array.make()
        numbers = np.ascontiguousarray(numbers, numbers.dtype.newbyteorder("<"))
        file.write(numbers.reshape(-1).view(np.uint8))
