"""Lists the arrays of safetensors files, and reads and writes the arrays one by one."""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...extend import listed, open_to_replace
from .._checks import importing

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
_CODES = {name: code for code, name in _DTYPES.items()}
SUPPORTED = set(_CODES)


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
        entry = {"dtype": _CODES[array.dtype], "shape": array.shape, "data_offsets": (begin, end)}
        header[name] = entry
    content = json.dumps(header, ensure_ascii=False).encode()
    content += b" " * (-len(content) % 8)
    file.write(len(content).to_bytes(8, "little") + content)
    for _, array in order:
        numbers = array.make()
        numbers = np.ascontiguousarray(numbers, numbers.dtype.newbyteorder("<"))
        file.write(numbers.reshape(-1).view(np.uint8))
