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
    """Writes the arrays of a model to a safetensors file, named by their paths with dots.

    The weight of the first layer in a tuple is `layers.0.weight`, as in the `state_dict` of a
    PyTorch model with the same fields. The layers of a `ScanStack` are numbered in the same way and
    written separately. In a pair `(model, state)` the arrays of the state are named after their
    layer: `0.norm.running_mean`, `0.norm.running_var` and `0.norm.batch_counter` for an
    `nn.BatchNorm`.

    Arrays are written one by one. An existing file is replaced atomically.

    **Arguments:**

    - `model`: any pytree. Leaves that are not arrays, and static fields, are left out.
    - `path`: the file, or a folder, in which the file is `model.safetensors`.
    - `names`: a table from names in the model to names in the file, as in `import_safetensors`. For
      export, replace each pair of a name and a function by a `Stored` with `load` and `save`.
    - `metadata`: a mapping from strings to strings. `format` is `pt` by default, because some tools
      accept no other value.
    - `max_shard_bytes`: maximum size of the arrays in one file. A larger model is written to
      `model-00001-of-00003.safetensors` and so on, and `model.safetensors.index.json` lists these
      files, as in Hugging Face's libraries. `path` gives the folder and the name, here `model`.

    **Raises:** `TypeError` for a dtype that safetensors does not have, such as PRNG keys and
    complex128; `ValueError` if two arrays have the same name, if parts of a stored array are
    missing, or for a `load` without `save`; `FileExistsError` if the folder has an earlier model
    that tools would read instead; `OSError` if the file cannot be written.

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

    - `model_like`: a model of the structure to return. It may have `jax.ShapeDtypeStruct`s in place
      of arrays, from `filter_eval_shape`. Each array gets the sharding of the array that it
      replaces, and each device's part is read separately.
    - `path`: a file, a folder, an index of shards (`*.safetensors.index.json`), or a sequence of
      files. For a folder, its index is read, or all its `*.safetensors` files if it has no index.
    - `names`: a table from names in the model, as `export_safetensors` writes them, to names in the
      file; or a function of the name in the model. Arrays without an entry have the same name in
      the file. In a key, `*` matches any text, and `{i}` or another word in braces matches text
      without a dot; the value repeats them: `{"blocks.{i}.norm.*": "h.{i}.ln.*"}`. An exact key has
      priority, then the first matching pattern. The first of several `*` matches as much text as
      possible. A value can also be a `Stored`, for an array that is stored transposed or as a part
      of a larger one; a pair `(name, function)`, which reads `function(stored)`; or `None`, for an
      array that is not in the file and stays unchanged.
    - `dtype`: `"like"` casts floats to the float dtypes of `model_like`, and integers to its
      integer dtypes; `None` rejects another dtype.
    - `ignore`: patterns of names (`fnmatch`), such as `"*.attn.bias"`. An array of the file with a
      matching name may be unused. An array of `model_like` with a matching name, in the model or in
      the file, may be missing in the file, and then stays unchanged.
    - `strict`: whether each array of the file must be used, unless `ignore` matches. Each array of
      `model_like` must always be in the file, unless `ignore` matches.

    **Returns:** the model with the arrays that were read. Shapes may differ from those in the file
    by axes of size 1.

    **Raises:** `ValueError` if arrays are missing, unused, or have another shape or dtype, with a
    list of them; `ValueError` for a damaged file, a file in another format, or a name that is in
    two files; `OSError` if a file cannot be read; `TypeError` as `export_safetensors`;
    `ImportError` without safetensors: `pip install 'eqxlike[train]'`.

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
    """The leaves with their names, after a check of names and dtypes. Only arrays have names."""
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
