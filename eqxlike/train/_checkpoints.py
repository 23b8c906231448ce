"""`save`, `restore`, and `CheckpointFolder` with the newest and best checkpoints of a run."""

import collections
import copy
import os
import pathlib
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._check_numbers import whole_number
from .._dtypes import is_key, without_key_dtype
from .._traceback import stacklevel_of_user
from ..extend import committed_sharding, flag_frozen, is_array_or_struct
from ._checks import check_folder, check_not_deleted
from ._orbax import (
    MANIFEST,
    NODE,
    CheckpointError,
    Entry,
    Saved,
    Saving,
    check_files,
    describe,
    join_all,
    open_manager,
    read_arrays,
    read_manifest,
    write,
)

State = TypeVar("State")


def save(
    path: str | os.PathLike[str],
    state: PyTree,
    data: Any = None,
    *,
    background: bool = False,
    with_frozen: bool = True,
) -> Saving:
    """Writes a state to a folder. `restore` reads the state from this folder.

    The checkpoint is first written to a temporary folder. When the checkpoint is complete, it is
    moved to `path` and replaces an earlier checkpoint there. If the process is killed or the disk
    is full, the earlier checkpoint stays.

    **Arguments:**

    - `path`: the folder to create, or the checkpoint to replace. Folders above it are created.
    - `state`: a `TrainState`, or any pytree. JAX and NumPy arrays of numbers and bools, and PRNG
      keys, are written. Other leaves are not restored from the checkpoint, because `restore` takes
      them from `like`. But the values of Python numbers, strings and bools are recorded, so that
      `restore` rejects a `like` with different values.
    - `data`: extra JSON values to save, such as the position of an iterator. JSON values are
      `None`, bools, numbers, strings, lists and dicts.
    - `background`: whether to write in a thread. If `True`, `save` copies the arrays to the host
      and then returns. After that, the state may be donated or changed. The next save, and the exit
      of the interpreter, wait for the thread.
    - `with_frozen`: whether to write arrays that `nn.freeze` has marked. `False` makes the
      checkpoint small if most arrays are frozen, as in a model with adapters. `restore` then takes
      the frozen arrays from `like`, so load the pretrained weights into `like` first. `restore`
      checks the shapes and dtypes of frozen arrays, but not their values.

    **Returns:** a `Saving`. Its `wait()` returns when the checkpoint is complete, and raises the
    error if writing failed. If `wait()` is not called, the error is printed, and the next save to
    this folder raises it.

    **Raises:**

    - `TypeError` if an array has values other than numbers, bools and PRNG keys, if a leaf is a
      `jax.Ref`, or if `data` is not JSON.
    - `RuntimeError` if an array was donated.
    - `OSError` if the checkpoint cannot be written, for example if `path` is a file.
    - `ImportError` without Orbax: `pip install 'eqxlike[train]'`.

    >>> import pathlib, tempfile, jax.numpy as jnp
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "checkpoint"
    >>> saving = save(path, {"weight": jnp.ones(2), "rate": 0.1}, {"epoch": 3}, background=True)
    >>> saving.wait()
    >>> restore(path, {"weight": jnp.zeros(2), "rate": 0.1}).data
    {'epoch': 3}
    """
    folder = CheckpointFolder(path, keep_last=1)
    join_all()
    step = max(_steps_in(folder.folder), default=-1) + 1
    return folder.save(step, state, data, background=background, with_frozen=with_frozen)


class _StateAndData(NamedTuple, Generic[State]):
    state: State
    data: Any


class Restored(_StateAndData[State]):
    """The contents of a checkpoint: a pair of `state` and `data`.

    - `state`: the state, with the structure of `like`.
    - `data`: the `data` passed to `save`.
    - `left_out`: names of the parts of the checkpoint, such as `"model_state"`, that have arrays
      but were not restored.
    """

    left_out: tuple[str, ...] = ()


Only = str | Sequence[str] | None


def restore(path: str | os.PathLike[str], like: State, *, only: Only = None) -> Restored[State]:
    """Reads a state that `save` has written.

    The structure, the shapes, the dtypes and the checksums of all files are checked before any
    array is read. A checkpoint contains only JSON and numbers, no code.

    **Arguments:**

    - `path`: the folder passed to `save`, or a checkpoint in a `CheckpointFolder`. If the folder
      contains several checkpoints, the newest is read.
    - `like`: a state with the structure that was saved, such as a new state. If the checkpoint has
      a `TrainState`, `like` may also be a model; then only the model is restored.
        - `like` may contain `jax.ShapeDtypeStruct`s instead of arrays, as `filter_eval_shape`
          returns. Then `like` takes no memory.
        - If an array in `like` is committed to a sharding, the restored array gets this sharding.
          The sharding of the saved array does not matter.
        - If an array in `like` is a NumPy array, the restored array is a NumPy array too.
        - Leaves that are not arrays, such as functions, strings and Python numbers, come from
          `like`.
        - If the checkpoint was saved with `with_frozen=False`, frozen arrays are copied from
          `like`.
    - `only`: name of the part to restore, such as `"model"`, or several names, such as `("model",
      "model_state")`. All other parts come from `like`. The structure of the other parts may differ
      from the checkpoint, for example because `like` has another optimiser.

    **Returns:** a `Restored`, which is a pair of `state` and `data`. Its `left_out` has the names
    of the parts that were not restored. `restore` warns if it restores a model without its saved
    `model_state`, such as the statistics of `nn.BatchNorm`.

    **Raises:** `CheckpointError`, with the file and the leaf, if the checkpoint is damaged. A plain
    `ValueError`, with all differences, if `like` has another structure, shape or dtype, or if the
    checkpoint or `like` lacks a part that is in `only`. `FileNotFoundError` if there is no
    checkpoint. `NotADirectoryError` if `path` is a file. `TypeError` if `path` is not a path.

    >>> import pathlib, tempfile, jax.numpy as jnp
    >>> from eqxlike import train
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "checkpoint"
    >>> _ = train.save(path, {"weight": jnp.ones(2)}, {"epoch": 3})
    >>> restore(path, like={"weight": jnp.zeros(2)})
    Restored(state={'weight': Array([1., 1.], dtype=float32)}, data={'epoch': 3})
    """
    check_folder(path, "restore(path, like): path")
    join_all()
    while True:
        folder = _newest_at(path)
        try:
            return _read_one(folder, like, only=only)
        except Exception:
            # Raise the error, unless another process has replaced the checkpoint by a newer
            # checkpoint.
            if folder == _newest_at(path):
                raise


class CheckpointFolder:
    """A folder with the checkpoints of one run. The name of a checkpoint contains its step.

    Only one run may write to the folder at a time. The run may have several processes. Any number
    of processes may read the folder.

    **Arguments:**

    - `folder`: the folder, created at the first `save`.
    - `keep_last`: number of newest checkpoints to keep, at least one.
    - `keep_best`: number of checkpoints with the best scores to keep in addition to the newest.
      `None` keeps only the newest.
    - `mode`: `"min"` if the smallest score is the best, `"max"` if the largest is.

    **Raises:** `ValueError` if an argument is out of range, or the folder is itself a checkpoint.

    >>> import tempfile, jax.numpy as jnp
    >>> with CheckpointFolder(tempfile.mkdtemp(), keep_last=2) as checkpoints:
    ...     for step in (10, 20, 30):
    ...         _ = checkpoints.save(step, {"weight": jnp.full(2, step)})
    >>> [path.name for path in checkpoints.paths()]
    ['step_000000030', 'step_000000020']
    >>> checkpoints.restore_newest({"weight": jnp.zeros(2, int)}).state
    {'weight': Array([30, 30], dtype=int32)}
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep_last: int = 3,
        keep_best: int | None = None,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        check_folder(folder, "CheckpointFolder: folder")
        self.folder = pathlib.Path(os.path.realpath(folder))
        if (self.folder / MANIFEST).exists():
            raise ValueError(
                f"CheckpointFolder expected a folder of checkpoints, but {self.folder} is itself a "
                f"checkpoint: pass {self.folder.parent}."
            )
        if mode not in ("min", "max"):
            raise ValueError(f'CheckpointFolder expected mode "min" or "max", got {mode!r}.')
        if keep_best is not None:
            keep_best = whole_number(keep_best, "CheckpointFolder: keep_best")
        keep_last = whole_number(keep_last, "CheckpointFolder: keep_last")
        self._kept = {"keep_last": keep_last, "keep_best": keep_best, "mode": mode}

    def __enter__(self) -> "CheckpointFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for checkpoints that are being written."""
        join_all()

    def save(
        self,
        step: int,
        state: PyTree,
        data: Any = None,
        *,
        score: float | None = None,
        beside: Mapping[str, PyTree] | None = None,
        background: bool = False,
        with_frozen: bool = True,
    ) -> Saving:
        """Writes a checkpoint. When the checkpoint is complete, deletes checkpoints that need not
        be kept.

        **Arguments:**

        - `step`: step of the checkpoint.
        - `state`, `data`, `background`, `with_frozen`: as in `train.save`.
        - `score`: score for `keep_best`. A score that is not finite is never among the best.
        - `beside`: other pytrees to save in the checkpoint, by name; see `restore_beside`.

        **Returns:** a `Saving`, as `train.save`.

        **Raises:** the errors of `train.save`. `ValueError` if the folder has a checkpoint of this
        step or a later step. If there is an error, no earlier checkpoint is deleted.
        """
        path = self.folder / _name_of(step)
        _check_json(data)
        arrays: dict[str, Any] = {}
        manifest = {
            "state": _take(state, "state", arrays, with_frozen),
            "beside": {
                name: _take(tree, name, arrays, with_frozen)
                for name, tree in (beside or {}).items()
            },
            "data": copy.deepcopy(data),
        }
        join_all(raises_in=self.folder)
        self.check_free(step)
        saving = write(path, step, manifest, arrays, score, **self._kept)
        if not background:
            saving.wait()
        return saving

    def check_free(self, step: int) -> None:
        """Checks that a checkpoint of this step would be the newest. Damaged checkpoints of later
        steps do not count and are renamed.

        **Raises:** `ValueError` if there is an undamaged checkpoint of a later step.
        """
        join_all()
        for later, path in _steps_in(self.folder).items():
            if later > step:
                try:
                    check_files(path, read_manifest(path))
                except CheckpointError:
                    if jax.process_index() == 0:
                        path.rename(f"{path}.damaged{time.time_ns()}")
                    continue
                raise ValueError(
                    f"{self.folder} already has a checkpoint of step {later}, so a checkpoint of "
                    f"step {step} would not be the newest. Resume from {path}, or pass another "
                    "folder."
                )

    def paths(self) -> list[pathlib.Path]:
        """All checkpoints, newest first, including damaged checkpoints."""
        return list(_steps_in(self.folder).values())

    def newest(self) -> pathlib.Path | None:
        """The newest checkpoint, even if it is damaged; `None` if there is no checkpoint."""
        join_all()
        return next(iter(self.paths()), None)

    def best(self) -> pathlib.Path | None:
        """The checkpoint with the best score, or `None` if no checkpoint has a score. If several
        checkpoints have the best score, this is the newest of them.

        >>> import tempfile, jax.numpy as jnp
        >>> from eqxlike import train
        >>> with CheckpointFolder(tempfile.mkdtemp(), keep_best=1, mode="max") as checkpoints:
        ...     for step, accuracy in ((10, 0.7), (20, 0.9), (30, 0.8)):
        ...         _ = checkpoints.save(step, {"weight": jnp.full(2, step)}, score=accuracy)
        >>> train.restore(checkpoints.best(), {"weight": jnp.zeros(2, int)}).state
        {'weight': Array([20, 20], dtype=int32)}
        """
        join_all()
        with open_manager(self.folder, writes=False, **self._kept) as manager:
            step = manager.best_step()
            if step is None or (manager.metrics(step) or {"score": None})["score"] is None:
                return None
        return self.folder / _name_of(step)

    def restore_newest(self, like: State, *, only: Only = None) -> Restored[State] | None:
        """Restores the newest checkpoint that is not damaged. Warns of each newer, damaged
        checkpoint.

        **Arguments:**

        - `like`, `only`: as in `train.restore`.

        **Returns:** a `Restored`, as `train.restore`; `None` if there is no checkpoint.

        **Raises:** `CheckpointError` if all checkpoints are damaged. A plain `ValueError` if the
        newest undamaged checkpoint does not fit `like`. Older checkpoints are not tried, because
        they would not fit either.
        """
        join_all()
        damages: list[str] = []
        for path in self.paths():
            try:
                restored = _read_one(path, like, only=only)
            except CheckpointError as error:
                damages.append(str(error))
                continue
            except FileNotFoundError:
                # Another process has deleted the checkpoint in the meantime.
                continue
            for damage in damages:
                warnings.warn(f"{damage} Restored the older {path} instead.", stacklevel=2)
            return restored
        if damages:
            raise CheckpointError(
                f"All {len(damages)} checkpoints in {self.folder} are damaged: {' '.join(damages)}"
            )
        return None

    def restore_beside(self, step: int, name: str, like: State) -> State:
        """Restores a pytree that was passed to `save` as `beside`.

        **Arguments:**

        - `step`: step of the checkpoint.
        - `name`: name in `beside`.
        - `like`: as in `train.restore`.

        **Raises:** the errors of `train.restore`. `KeyError` if `beside` had no such name.
        """
        join_all()
        return _read_one(self.folder / _name_of(step), like, name).state


def _steps_in(folder: pathlib.Path) -> dict[int, pathlib.Path]:
    """The checkpoints in a folder by step, newest first, including damaged checkpoints."""
    found = [path for path in folder.glob("step_*") if path.name[5:].isdigit() and path.is_dir()]
    return {int(path.name[5:]): path for path in sorted(found, reverse=True)}


def _newest_at(path: str | os.PathLike[str]) -> pathlib.Path:
    """The newest checkpoint in a folder. Returns the folder itself if it is a checkpoint, or if it
    contains no checkpoint.
    """
    folder = pathlib.Path(os.path.realpath(path))
    steps = {} if (folder / MANIFEST).exists() else _steps_in(folder)
    return next(iter(steps.values()), folder)


# --- Writing ---


_WIDENED = ("int2", "int4", "uint2", "uint4")
"""Integer dtypes whose numbers are written as bytes, because tensorstore does not support all of
these dtypes.
"""


def _name_of(step: int) -> str:
    return f"step_{whole_number(step, 'CheckpointFolder: step', 0):09d}"


def _take(tree: PyTree, name: str, arrays: dict[str, Any], with_frozen: bool) -> list[Saved]:
    """Describes a pytree for the manifest, and adds its arrays to `arrays`."""
    check_not_deleted(tree, name, "train.save")
    are_frozen = iter(flag_frozen(tree))
    described = []
    for path, text, value in describe(tree)[0]:
        stored = impl = None
        is_array = value is not NODE and is_array_or_struct(value)
        is_frozen = value is not NODE and next(are_frozen) and not is_key(value)
        if is_array and is_key(value):
            impl, value = str(jax.random.key_impl(value)), jax.random.key_data(value)
        if is_array and value.size and (with_frozen or not is_frozen):
            # The number makes the name unique. The path makes the name readable. Some characters of
            # the path are replaced, because names of files may not contain them.
            readable = re.sub(r"[^A-Za-z0-9_]+", ".", path).rstrip(".")[:80]
            stored = f"{len(arrays):05d}{readable}"
            if str(value.dtype) in _WIDENED:
                value = value.astype(np.uint8)
            elif not isinstance(value, jax.Array):
                value = np.asarray(value, value.dtype.newbyteorder("="))
            arrays[stored] = value
        described.append(Saved(path, text, stored, impl))
    return described


def _check_json(data: Any) -> None:
    """Raises `TypeError`, with the path, if a value cannot be represented exactly in JSON."""
    is_leaf = lambda value: not isinstance(value, dict | list)  # noqa: E731
    for path, value in jtu.tree_leaves_with_path(data, is_leaf=is_leaf):
        keys = [each.key for each in path if isinstance(each, jtu.DictKey)]
        is_json = value is None or isinstance(value, bool | int | float | str)
        if not is_json or not all(isinstance(key, str) for key in keys):
            raise TypeError(
                "train.save expected JSON values as `data` (None, bool, int, float, str, list, and "
                f"dict with strings as keys), got {type(value).__name__} at "
                f"data{jtu.keystr(path)}. Pass arrays in `state`."
            )


# --- Reading ---


def _read_one(
    folder: pathlib.Path, like: State, tree: str | None = None, only: Only = None
) -> Restored[State]:
    """Reads one checkpoint. If `tree` is given, reads `beside[tree]` instead of the state."""
    wanted, treedef = describe(like)
    manifest = read_manifest(folder)
    if tree is not None and tree not in manifest["beside"]:
        raise KeyError(
            f"{folder} has no pytree named {tree!r} in `beside`; its names are "
            f"{', '.join(map(repr, manifest['beside'])) or 'none'}."
        )
    stored = [Saved(*each) for each in (manifest["beside"][tree] if tree else manifest["state"])]
    # If the state of the checkpoint is a `TrainState` and `like` is a model, read the model.
    is_state, is_like_state = (
        entries[0].text.partition("(")[0] == "TrainState" for entries in (stored, wanted)
    )
    is_model = tree is None and is_state and not is_like_state and only in (None, "model")
    root = ".model" if is_model else ""
    wanted = [each._replace(path=root + each.path) for each in wanted]
    names = ["model"] if root else [only] if isinstance(only, str) else only
    is_read: Callable[[Any], bool] = lambda each: names is None or _part(each) in names  # noqa: E731
    if names is not None:
        _check_parts(folder, names, stored, wanted)
    left_out = dict.fromkeys(_part(each) for each in stored if each.name and not is_read(each))
    stored = [*filter(is_read, stored)]
    _check_fits(folder, stored, [*filter(is_read, wanted)])
    check_files(folder, manifest)
    # The user's `jax.transfer_guard` should stop accidental transfers. The transfers here are
    # intended, so allow them.
    with jax.transfer_guard("allow"):
        values = _read(folder, stored, [*filter(is_read, wanted)])
        leaves = [
            next(values) if is_read(each) else each.value
            for each in wanted
            if each.value is not NODE
        ]
    restored = Restored(treedef.unflatten(leaves), manifest["data"])
    restored.left_out = tuple(left_out)
    return restored


# --- A part of a checkpoint ---


def _check_parts(
    folder: pathlib.Path, names: Sequence[str], stored: list[Saved], wanted: list[Entry]
) -> None:
    """Raises `ValueError` if the checkpoint or `like` lacks a part. Warns if a model is restored
    without its `model_state`.
    """
    there, here = ([*dict.fromkeys(map(_part, entries))] for entries in (stored, wanted))
    for owner, parts in ((f"the checkpoint {folder}", there), ("`like`", here)):
        if unknown := [name for name in names if name not in parts]:
            raise ValueError(
                f"restore: {owner} has no part named {', '.join(map(repr, unknown))}; its parts "
                f"are {', '.join(map(repr, filter(None, parts))) or 'none'}."
            )
    has_state = any(each.name for each in stored if _part(each) == "model_state")
    if has_state and "model" in names and "model_state" not in names:
        warnings.warn(
            f"The model of {folder} is restored without its saved model_state, such as the "
            "statistics of BatchNorm. To restore both, pass a TrainState as `like` and "
            '`only=("model", "model_state")`.',
            stacklevel=stacklevel_of_user(),
        )


def _part(entry: Entry | Saved) -> str:
    """The first name in a path, such as `model` in `.model.weight` and in `['model'].weight`."""
    found = re.match(r"\.(\w+)|\[(.*?)\]", entry.path)
    return "" if found is None else found[1] or found[2].strip("'")


# --- Comparison of a checkpoint and `like` ---


_MAX_LISTED = 8
"""Maximum number of differences that an error lists."""


def _check_fits(folder: pathlib.Path, stored: list[Saved], wanted: list[Entry]) -> None:
    """Raises `ValueError` if the checkpoint and `like` differ in structure, shapes or dtypes."""
    found = list(_differences(stored, wanted))
    if found:
        more = f"; and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
        in_model = re.compile(r"(like|the checkpoint has state)\.model\b")
        model_fits = stored[0].text.startswith("TrainState") and not any(map(in_model.match, found))
        hint = ' To restore the model alone: `train.restore(..., only="model")`.' * model_fits
        raise ValueError(
            f"The checkpoint {folder} does not fit `like`: {'; '.join(found[:_MAX_LISTED])}{more}. "
            "Create `like` in the same way as the saved state, or pass the folder of another "
            f"checkpoint.{hint}"
        )


def _differences(stored: list[Saved], wanted: list[Entry]) -> Iterator[str]:
    there, here = (
        collections.Counter(each.path for each in each_of) for each_of in (stored, wanted)
    )
    if [*there.elements()] != [*here.elements()]:
        missing, additional = here - there, there - here
        yield from (f"like{path} is missing in the checkpoint" for path in missing)
        yield from (
            f"the checkpoint has state{path}, which is missing in `like`" for path in additional
        )
        if not missing and not additional:
            yield "its leaves are in another order"
        return
    for found, (path, text, leaf) in zip(stored, wanted, strict=True):
        is_struct = isinstance(leaf, jax.ShapeDtypeStruct) and not is_key(leaf)
        if found.text != text:
            yield f"like{path} is {text}, but was saved as {found.text}"
        elif is_struct and found.name is None and leaf.size:
            yield (
                f"like{path} must be an array with its values, not a jax.ShapeDtypeStruct: the "
                "checkpoint was saved without frozen arrays"
            )
        elif is_struct and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            yield (
                f"like{path} is of dtype {leaf.dtype}, which JAX supports only with "
                "`jax.config.update('jax_enable_x64', True)`"
            )


# --- Arrays ---


def _read(folder: pathlib.Path, stored: list[Saved], wanted: list[Entry]) -> Iterator[Any]:
    """The value of each leaf, from the files or from `like`."""
    pairs = [(each, like.value) for each, like in zip(stored, wanted, strict=True)]
    shardings = {
        each.name: None if is_key(like) else committed_sharding(like)
        for each, like in pairs
        if each.name is not None
    }
    arrays = read_arrays(folder, shardings)
    for each, like in pairs:
        if each.name is not None:
            # Remove the array from the dict, so that the memory of the read array is freed after it
            # is placed.
            yield _placed(arrays.pop(each.name), like, each.key_impl)
        elif like is NODE:
            continue
        elif not is_array_or_struct(like):
            yield like
        elif not like.size:
            data = jax.eval_shape(without_key_dtype, jax.ShapeDtypeStruct(like.shape, like.dtype))
            yield _placed(np.zeros(data.shape, data.dtype), like, each.key_impl)
        else:
            # This is a frozen array. Copy it, because a step that donates the restored state would
            # delete the array of `like`.
            yield like.copy()


def _placed(value: Any, like: Any, key_impl: str | None) -> Any:
    """Converts a value to the type, device and sharding of `like`."""
    if key_impl is not None:
        # JAX can place the data of a key on devices of other processes, but not the key itself.
        numbers = jax.device_put(value, committed_sharding(like))
        return jax.random.wrap_key_data(numbers, impl=key_impl)
    return place_like(value.astype(like.dtype) if str(like.dtype) in _WIDENED else value, like)


def place_like(value: Any, like: Any) -> Any:
    """Converts `value`, a JAX or NumPy array, to the type and the sharding of `like`.

    The caller must not use `value` again, because the result may share its memory. On a CPU, JAX
    uses the memory of a NumPy array without a copy.
    """
    if isinstance(like, np.ndarray | np.generic):
        array = np.asarray(value).astype(like.dtype, copy=False)
        return array if isinstance(like, np.ndarray) else array[()]
    return jax.device_put(value, committed_sharding(like))
