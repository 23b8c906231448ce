"""`export_safetensors` and `import_safetensors`: models in safetensors files."""

import collections
import fnmatch
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

import jax.tree_util as jtu
from jaxtyping import PyTree

from ...extend import NamedLeaf, named_leaves
from .._checks import check_not_deleted
from ._files import SUPPORTED, Source, dtype_name, find_entries, write_files
from ._names import Names, stored_by_name
from ._parts import arrays_to_write
from ._reader import IGNORE, OTHER_NAMES, Reader

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
        reader.refuse_unused()
    reader.raise_if_unfit(path)
    new = [reader.read(leaf, rows) for leaf, rows in zip(leaves, found, strict=True)]
    reader.raise_if_unfit(path)
    return jtu.tree_unflatten(jtu.tree_structure(model_like), new)


def _checked_leaves(model: PyTree, taker: str) -> list[NamedLeaf]:
    """Checks the names and dtypes of the arrays of a model. Returns the leaves with their names."""
    leaves = named_leaves(model)
    for each in leaves:
        if each.rows and dtype_name(each.leaf) not in SUPPORTED:
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
