"""Restoring a state."""

import collections
import contextlib
import dataclasses
import errno
import functools
import itertools
import os
import pathlib
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ..._pytree import committed_sharding
from ..._traceback import stacklevel_of_user
from ._background import wait_for_newest
from ._format import (
    STEP_NAME,
    CheckpointError,
    Description,
    Leaf,
    Manifest,
    StoredFile,
    StoredLeaf,
    checksum_of,
    checksum_of_file,
    describe,
    in_threads,
    open_arrays,
    orbax,
    read_manifest,
    steps_in,
)

State = TypeVar("State")


class _StateAndData(NamedTuple, Generic[State]):
    state: State
    data: Any


class Restored(_StateAndData[State]):
    """The contents of a checkpoint: a pair of `state` and `data`.

    - `state`: of the structure of `like`.
    - `data`: what was given to `save` along.
    - `left_out`: the names of the parts with arrays that were not restored.
    """

    left_out: tuple[str, ...] = ()


Only = str | Sequence[str] | None


def restore(path: str | os.PathLike[str], like: State, *, only: Only = None) -> Restored[State]:
    """Reads a state that `save` has written.

    Structure, shapes, dtypes and the checksums of manifest and files are checked before any array
    is allocated; the checksum of each array is checked as it is placed. A checkpoint holds no code:
    it is JSON and numbers.

    **Arguments:**

    - `path`: the folder that was given to `save`.
    - `like`: a state of the structure that was saved, such as a new one; it may have
      `jax.ShapeDtypeStruct`s for arrays, as of `filter_eval_shape`, and then takes no memory.
      Arrays get the sharding of those in `like`, where those were put somewhere on purpose,
      whatever their sharding was when they were saved; they are NumPy arrays where those in `like`
      are. Functions, strings and Python numbers come from `like`, and copies of its frozen arrays
      if the checkpoint was saved without (`save(..., with_frozen=False)`). For a checkpoint of a
      `TrainState`, `like` may also be the model: then the model alone is restored.
    - `only`: the name of a part to restore, or several: `"model"`, `("model", "model_state")`. All
      other parts come from `like`, and may have another structure, for example for another
      optimiser.

    **Returns:** a `Restored`, of `state` and `data`. Its `left_out` names the parts that were not
    restored. A warning says if the model is restored without the `model_state` that was saved with
    it, such as the statistics of `nn.BatchNorm`.

    **Raises:** `CheckpointError` if the checkpoint is damaged; it names the file and the leaf, and
    the newest whole one in the folder. A plain `ValueError`, with all differences, if it is whole
    and `like` has another structure, shape or dtype, if a newer version of eqxlike wrote it, or if
    it or `like` lacks a part that `only` names. `FileNotFoundError` if there is no checkpoint.

    >>> import pathlib, tempfile, jax.numpy as jnp
    >>> from eqxlike import train
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "checkpoint"
    >>> _ = train.save(path, {"weight": jnp.ones(2)}, {"epoch": 3})
    >>> restore(path, like={"weight": jnp.zeros(2)})
    Restored(state={'weight': Array([1., 1.], dtype=float32)}, data={'epoch': 3})
    """
    wait_for_newest()
    folder = pathlib.Path(os.path.realpath(path))
    try:
        return read_one(folder, like, only=only)
    except CheckpointError as error:
        other = _newest_whole_near(folder)
        if other is None:
            raise
        raise CheckpointError(f"{error} The newest whole one here is {other}.") from error


def read_one(
    folder: pathlib.Path, like: State, tree: str | None = None, only: Only = None
) -> Restored[State]:
    """Reads one checkpoint, and no other one where it is damaged.

    **Arguments:**

    - `tree`: the name of a tree that was saved with the state, to read instead of the state.
    """
    whole = describe(like)
    while True:
        manifest = read_manifest(folder)
        try:
            part = _Part(manifest, whole, [True] * len(whole.leaves))
            if tree is None:
                part = _part_of(folder, manifest, whole, only)
            _check_fits(folder, part.manifest, part.like, tree)
            check_files(folder, manifest)
            # `jax.transfer_guard` is for accidental transfers; this one is asked for.
            with jax.transfer_guard("allow"):
                read = iter(_read(folder, part.manifest, part.like, tree))
            pairs = zip(part.are_read, whole.leaves, strict=True)
            leaves = [next(read) if is_read else leaf for is_read, (_, leaf) in pairs]
            restored = Restored(whole.treedef.unflatten(leaves), manifest.data)
            restored.left_out = part.left_out
            return restored
        except Exception:
            # Another process may have put a newer one in its place meanwhile, and half-read arrays
            # fail in many ways: as missing files, wrong sums, or whatever Orbax raises. Any other
            # error is raised here or at the next attempt.
            with contextlib.suppress(ValueError, OSError):
                if read_manifest(folder).arrays_folder != manifest.arrays_folder:
                    continue
            raise


def _newest_whole_near(path: pathlib.Path) -> pathlib.Path | None:
    """The newest checkpoint whose files are all as they were written: next to a checkpoint in its
    folder, or in a folder of them.
    """
    for other in steps_in(path.parent if STEP_NAME.fullmatch(path.name) else path).values():
        with contextlib.suppress(ValueError, OSError):
            if other != path:
                check_files(other, read_manifest(other))
                return other
    return None


# --- A part of a checkpoint ---


class _Part(NamedTuple):
    """The part of a checkpoint to restore.

    - `manifest`, `like`: with the leaves and nodes of this part alone.
    - `are_read`: for each leaf of the whole `like`, whether it is restored.
    - `left_out`: the other parts of the checkpoint that have arrays.
    """

    manifest: Manifest
    like: Description
    are_read: list[bool]
    left_out: tuple[str, ...] = ()


def _part_of(folder: pathlib.Path, manifest: Manifest, like: Description, only: Only) -> _Part:
    """The parts that `only` names; the model of a `TrainState` if `like` is not a `TrainState`.

    **Raises:** `ValueError` if the checkpoint or `like` lacks a part.
    """
    roots = [dict(nodes).get("", "").partition("(")[0] for nodes in (manifest.nodes, like.nodes)]
    is_model = only in (None, "model") and roots[0] == "TrainState" != roots[1]
    if only is None and not is_model:
        return _Part(manifest, like, [True] * len(like.leaves))
    names = ("model",) if is_model else (only,) if isinstance(only, str) else tuple(only or ())
    root = ".model" if is_model else ""
    nodes = [[f"{root}{path}", text] for path, text in like.nodes]
    pairs = [(dataclasses.replace(each, path=root + each.path), leaf) for each, leaf in like.leaves]
    stored = [each for each in manifest.leaves if each.tree is None]
    for owner, paths in (
        (f"the checkpoint {folder}", [*dict(manifest.nodes), *(each.leaf.path for each in stored)]),
        ("`like`", [*dict(nodes), *(each.path for each, _ in pairs)]),
    ):
        parts = dict.fromkeys(_name_of_part(path) for path in paths if path)
        if unknown := [name for name in names if name not in parts]:
            raise ValueError(
                f"restore: {owner} has no part named {', '.join(map(repr, unknown))}; its parts "
                f"are {', '.join(map(repr, parts)) or 'none'}."
            )

    def is_in(path: str) -> bool:
        return _name_of_part(path) in names

    with_arrays = dict.fromkeys(_name_of_part(each.leaf.path) for each in stored if each.name)
    left_out = tuple(name for name in with_arrays if name not in names)
    if "model" in names and "model_state" in left_out:
        warnings.warn(
            f"The model of {folder} is restored without the model_state that was saved with it, "
            "such as the statistics of BatchNorm. To restore both, pass a TrainState as `like` and "
            '`only=("model", "model_state")`.',
            stacklevel=stacklevel_of_user(),
        )
    some_nodes = [node for node in manifest.nodes if is_in(node[0])]
    leaves = [each for each in stored if is_in(each.leaf.path)]
    part = dataclasses.replace(manifest, nodes=some_nodes, leaves=leaves)
    are_read = [is_in(each.path) for each, _ in pairs]
    nodes = [node for node in nodes if is_in(node[0])]
    like = Description(list(itertools.compress(pairs, are_read)), nodes, like.treedef)
    return _Part(part, like, are_read, left_out)


def _name_of_part(path: str) -> str:
    """The first name in a path, such as `model` in `.model.weight` and in `['model'].weight`."""
    found = re.match(r"\.(\w+)|\[(.*?)\]", path)
    return "" if found is None else found[1] or found[2].strip("'")


# --- Whether a checkpoint is whole, and fits what it is to be restored into ---


_MAX_LISTED = 8
"""At most this many differences are listed."""


def _check_fits(
    folder: pathlib.Path, manifest: Manifest, like: Description, tree: str | None
) -> None:
    """Raises `ValueError` with all differences if a checkpoint is of another structure than `like`;
    `KeyError` if it has no such tree.
    """
    if tree is not None and tree not in manifest.beside:
        raise KeyError(
            f"{folder} has nothing named {tree!r} beside its state, but "
            f"{', '.join(map(repr, manifest.beside)) or 'no other tree'}."
        )
    stored = [each.leaf for each in manifest.leaves if each.tree == tree]
    nodes = manifest.nodes if tree is None else manifest.beside[tree]
    found = list(_differences(stored, dict(nodes), like))
    if not found:
        return
    listed = "; ".join(found[:_MAX_LISTED])
    is_state = dict(nodes).get("", "").startswith("TrainState")
    hint = ' To restore the model alone: `train.restore(..., only="model")`.' if is_state else ""
    more = f"; and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
    raise ValueError(
        f"The checkpoint {folder} is whole, and does not fit `like`: {listed}{more}. Build `like` "
        f"in the same way as the saved state, or give the folder of another checkpoint.{hint}"
    )


def _differences(stored: list[Leaf], nodes: dict[str, str], like: Description) -> Iterator[str]:
    there = collections.Counter(leaf.path for leaf in stored)
    here = collections.Counter(leaf.path for leaf, _ in like.leaves)
    if there != here:
        for path in (here - there).elements():
            yield f"like{path} is missing in the checkpoint"
        for path in (there - here).elements():
            yield f"the checkpoint has state{path}, which `like` has not"
        return
    expected_nodes = dict(like.nodes)
    for path in expected_nodes.keys() | nodes.keys():
        found, wanted = nodes.get(path, "no node"), expected_nodes.get(path, "no node")
        if found != wanted:
            yield f"like{path} is {wanted}, and was {found}"
    for found, (wanted, leaf) in zip(stored, like.leaves, strict=True):
        # Leaves without a stable text, such as functions, are not compared.
        if found.path != wanted.path:
            yield f"state{found.path} comes where `like` has like{wanted.path}"
        elif found.kind == wanted.kind == "static" and None in (found.text, wanted.text):
            continue
        elif found.kind == "frozen" and found.text == wanted.describe():
            if not isinstance(leaf, jax.Array | np.ndarray):
                yield (
                    f"like{wanted.path} must be an array with its values: the checkpoint was saved "
                    "without frozen arrays"
                )
        elif found != wanted:
            yield f"like{wanted.path} is {wanted.describe()}, and was {found.describe()}"
        elif wanted.kind == "array" and isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            if str(jax.dtypes.canonicalize_dtype(wanted.dtype)) != wanted.dtype:
                yield (
                    f"like{wanted.path} is of dtype {wanted.dtype}, which JAX has only with "
                    "`jax.config.update('jax_enable_x64', True)`"
                )


def check_files(folder: pathlib.Path, manifest: Manifest) -> None:
    """Raises `CheckpointError`, with the path of the leaf, if a file is not as it was written."""
    arrays = folder / manifest.arrays_folder
    places = {each.name: f", with the values of {each.place}," for each in manifest.leaves}
    files = manifest.files_by_leaf()
    for stored in manifest.leaves:
        held = sum(file.size for file in files.get(stored.name or "", []))
        if held < stored.leaf.num_bytes:
            raise CheckpointError(
                f"{folder} is damaged: its manifest promises {stored.leaf.num_bytes} bytes "
                f"of {stored.place}, and its files hold {held}."
            )

    def check(entry: tuple[str, StoredFile]) -> None:
        name, file = entry
        if problem := _problem_of(arrays / name, file):
            place = places.get(name.partition("/")[0], "")
            raise CheckpointError(f"{folder} is damaged: {arrays / name}{place} {problem}.")

    in_threads(check, manifest.files.items())


def _problem_of(path: pathlib.Path, file: StoredFile) -> str | None:
    """What is wrong with a file, in words."""
    try:
        size = os.stat(path).st_size
        if size != file.size:
            how = "cut off" if size < file.size else "longer than it was"
            return f"is {how}. It should have {file.size} bytes, and has {size}"
        is_same = checksum_of_file(path) == file.checksum
    except (FileNotFoundError, NotADirectoryError):
        return "is missing"
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return f"cannot be read: {error.strerror}"
    return None if is_same else "was changed after it was written; its checksum differs"


# --- The arrays: from the files, each of the type of a leaf, and where that is ---


def _read(
    folder: pathlib.Path, manifest: Manifest, like: Description, tree: str | None
) -> list[Any]:
    """The value of each leaf."""
    stored = [each for each in manifest.leaves if each.tree == tree]
    pairs = [(each, leaf) for each, (_, leaf) in zip(stored, like.leaves, strict=True)]
    arrays = _read_arrays(folder, manifest, [pair for pair in pairs if pair[0].name is not None])
    # Popped, so that each array is freed once it is placed.
    return [_placed(folder, each, leaf, arrays.pop(each.name, None)) for each, leaf in pairs]


def _read_arrays(
    folder: pathlib.Path, manifest: Manifest, pairs: list[tuple[StoredLeaf, Any]]
) -> dict[str | None, Any]:
    """The arrays by their names: JAX arrays where `like` has a sharding, else NumPy arrays.

    **Raises:** `CheckpointError`, before any is read, if those in the files are not those in the
    manifest.
    """
    if not pairs:
        return {}
    ocp = orbax()
    with open_arrays(folder / manifest.arrays_folder) as (handler, path):
        try:
            found = handler.metadata(path).tree
            shapes = {
                name: (tuple(each.shape), str(np.dtype(each.dtype))) for name, each in found.items()
            }
        except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
            raise CheckpointError(f"{folder} is damaged: Orbax cannot read it: {error}") from error
        restore_args = {}
        for stored, like in pairs:
            if shapes.get(stored.name) != (stored.leaf.shape, stored.stored_dtype):
                raise CheckpointError(
                    f"{folder} is damaged: its manifest promises {stored.leaf.describe()} as "
                    f"{stored.place}, and the files hold {shapes.get(stored.name, 'none')}."
                )
            is_as_stored = stored.leaf.kind == "array" and stored.stored_dtype == stored.leaf.dtype
            # With a sharding each device reads only its part.
            sharding = committed_sharding(like) if is_as_stored else None
            restore_args[stored.name] = (
                ocp.RestoreArgs(restore_type=np.ndarray)
                if sharding is None
                else ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding)
            )
        names = dict.fromkeys(restore_args, 0)
        args = ocp.args.PyTreeRestore(names, restore_args=restore_args, partial_restore=True)
        return handler.restore(path, args=args)


def _placed(folder: pathlib.Path, stored: StoredLeaf, like: Any, value: Any) -> Any:
    """The value, with the type, device and sharding of `like`."""
    leaf = stored.leaf
    if leaf.kind == "static":
        return like
    if leaf.kind == "frozen":
        # A step that donates the restored state must not delete the array of `like`.
        return like.copy()
    if value is None:
        value = np.zeros(leaf.shape or (), leaf.dtype)
    is_here = isinstance(value, np.ndarray) or value.is_fully_addressable
    if stored.checksum is not None and is_here and checksum_of(value) != stored.checksum:
        raise CheckpointError(
            f"{folder} is damaged: the values of {stored.place} are not those that were saved; "
            "their checksum differs."
        )
    if stored.stored_dtype not in (None, leaf.dtype):
        value = value.view(jnp.dtype(leaf.dtype))
    if leaf.kind == "array":
        return place_like(value, like)
    sharding = committed_sharding(like)
    # Compiled, since `jax.device_put` of keys reaches no devices of other processes.
    wrap: Any = functools.partial(jax.random.wrap_key_data, impl=leaf.key)
    return wrap(value) if sharding is None else jax.jit(wrap, out_shardings=sharding)(value)


def place_like(value: Any, like: Any) -> Any:
    """The numbers in `value`, a JAX or NumPy array, with the type and the sharding of `like`.

    Nobody else may use `value`: on a CPU JAX takes over the memory of NumPy's arrays.
    """
    if isinstance(like, np.ndarray | np.generic):
        array = np.asarray(value).astype(like.dtype, copy=False)
        return array if isinstance(like, np.ndarray) else array[()]
    return jax.device_put(value, committed_sharding(like))
