"""Saving and restoring a state, and the checkpoints of one run: the newest and the best."""

import collections
import copy
import functools
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

from ..._check_numbers import whole_number
from ..._dtypes import is_key, without_key_dtype
from ..._traceback import stacklevel_of_user
from ...extend import committed_sharding, flag_frozen
from .._checks import check_folder, check_not_deleted
from ._manifest import (
    MANIFEST,
    NODE,
    CheckpointError,
    Entry,
    Saved,
    check_files,
    describe,
    is_stored,
    read_manifest,
)
from ._orbax import Saving, join_all, open_manager, read_arrays, write

State = TypeVar("State")


def save(
    path: str | os.PathLike[str],
    state: PyTree,
    data: Any = None,
    *,
    background: bool = False,
    with_frozen: bool = True,
) -> Saving:
    """Writes a state to a folder of files, from which `restore` reads it.

    A checkpoint is put in place by one rename, once all of it is written: whatever happens before,
    a kill or a full disk, what was at `path` stays. A checkpoint already there is replaced; at
    every moment one of the two is complete.

    **Arguments:**

    - `path`: the folder to make, or a checkpoint to replace. Folders above it are made.
    - `state`: a `TrainState`, or any pytree. JAX and NumPy arrays of numbers and bools, and PRNG
      keys, are written. Other leaves are not: `restore` takes them from `like`. Numbers, strings
      and bools are noted, so that `restore` refuses a `like` with others.
    - `data`: what is to be kept along, such as where a stream of batches stands: of `None`, bools,
      numbers, strings, lists and dicts, as in JSON.
    - `background`: copy the arrays to the host and return; a thread writes them. The state may be
      donated or changed at once. The interpreter waits for it as it exits, and the next save before
      it begins.
    - `with_frozen`: whether to write arrays that `nn.freeze` has marked. Without them a checkpoint
      of an adapted model is small, and `restore` takes them from `like`: load the pretrained
      weights into it first. Their shapes and dtypes are checked, their values are not.

    **Returns:** a `Saving`; its `wait()` returns when the checkpoint is in place, and raises what
    went wrong. An error for which nobody waits is printed, and raised by the next save there.

    **Raises:** `TypeError` for an array that does not hold numbers, for a `jax.Ref`, and for `data`
    that is not JSON; `RuntimeError` if an array was donated; `OSError` if it cannot be written, as
    where `path` is a file; `ImportError` without Orbax, which `pip install 'eqxlike[train]'`
    brings.

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

    - `state`: of the structure of `like`.
    - `data`: what was given to `save` along.
    - `left_out`: the names of the parts with arrays that were not restored.
    """

    left_out: tuple[str, ...] = ()


Only = str | Sequence[str] | None


def restore(path: str | os.PathLike[str], like: State, *, only: Only = None) -> Restored[State]:
    """Reads a state that `save` has written.

    Structure, shapes, dtypes and the checksums of all files are checked before any array is read. A
    checkpoint holds no code: it is JSON and numbers.

    **Arguments:**

    - `path`: the folder that was given to `save`, or one checkpoint of a `CheckpointFolder`; of a
      folder with several, the newest is read.
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

    **Raises:** `CheckpointError` if the checkpoint is damaged; it names the file and the leaf. A
    plain `ValueError`, with all differences, if it is whole and `like` has another structure, shape
    or dtype, or if it or `like` lacks a part that `only` names. `FileNotFoundError` if there is no
    checkpoint.

    >>> import pathlib, tempfile, jax.numpy as jnp
    >>> from eqxlike import train
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "checkpoint"
    >>> _ = train.save(path, {"weight": jnp.ones(2)}, {"epoch": 3})
    >>> restore(path, like={"weight": jnp.zeros(2)})
    Restored(state={'weight': Array([1., 1.], dtype=float32)}, data={'epoch': 3})
    """
    join_all()
    while True:
        folder = _newest_at(path)
        try:
            return _read_one(folder, like, only=only)
        except Exception:
            # Another process may have put a newer one in its place meanwhile.
            if folder == _newest_at(path):
                raise


class CheckpointFolder:
    """A folder with the checkpoints of one run, each named by its step.

    One run at a time may write there, in one process or in several; any number may read.

    **Arguments:**

    - `folder`: made at the first `save`, if it is not there.
    - `keep_last`: how many of the newest checkpoints stay, at least one.
    - `keep_best`: how many of those with the best scores stay too; `None` for none.
    - `mode`: whether the best score is the smallest, `"min"`, or the largest, `"max"`.

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
                f"CheckpointFolder expected a folder of checkpoints, and {self.folder} is one "
                f"itself: give {self.folder.parent}."
            )
        if mode not in ("min", "max"):
            raise ValueError(f'CheckpointFolder expected mode "min" or "max", and got {mode!r}.')
        if keep_best is not None:
            keep_best = whole_number(keep_best, "CheckpointFolder: keep_best")
        keep_last = whole_number(keep_last, "CheckpointFolder: keep_last")
        self._kept = {"keep_last": keep_last, "keep_best": keep_best, "mode": mode}

    def __enter__(self) -> "CheckpointFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for what is being written."""
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
        """Writes a checkpoint, and once it is in its place deletes those that need not stay.

        **Arguments:**

        - `step`: which it is of.
        - `state`, `data`, `background`, `with_frozen`: as of `train.save`.
        - `score`: for `keep_best`. One that is not finite is never among the best.
        - `beside`: other pytrees by name, kept along as `state` is; see `restore_beside`.

        **Returns:** as `train.save`.

        **Raises:** as `train.save`, and what is here stays; also `ValueError` if the folder has a
        checkpoint of this step or a later one.
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
        """Sees that a checkpoint of this step would be the newest. Later ones that are damaged are
        kept under another name.

        **Raises:** `ValueError` if there is a later one.
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
                    f"{self.folder} has a checkpoint of step {later}, and one of step {step} is "
                    f"to be saved, which would not be the newest. Go on from {path}, or give "
                    "another folder."
                )

    def paths(self) -> list[pathlib.Path]:
        """The checkpoints, newest first, whole or damaged."""
        return list(_steps_in(self.folder).values())

    def newest(self) -> pathlib.Path | None:
        """The newest checkpoint, whole or damaged; `None` if there is none."""
        join_all()
        return next(iter(self.paths()), None)

    def best(self) -> pathlib.Path | None:
        """The checkpoint with the best score, of equal ones the newest; `None` if none has one.

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
        """The newest checkpoint that is not damaged, with a warning for each that is.

        **Arguments:**

        - `like`, `only`: as in `train.restore`.

        **Returns:** as `train.restore`; `None` where there is no checkpoint.

        **Raises:** `CheckpointError` if all are damaged; another `ValueError` if the newest whole
        one does not fit `like`; older ones are not tried, since they would hardly fit.
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
                # The process that writes here has deleted it meanwhile.
                continue
            for damage in damages:
                warnings.warn(f"{damage} Going on from {path}, which is older.", stacklevel=2)
            return restored
        if damages:
            raise CheckpointError(
                f"None of the {len(damages)} checkpoints in {self.folder} is whole: "
                f"{' '.join(damages)}"
            )
        return None

    def restore_beside(self, step: int, name: str, like: State) -> State:
        """A pytree that was saved with the state of a step.

        **Arguments:**

        - `step`, `name`: which.
        - `like`: as of `train.restore`.

        **Raises:** as `train.restore`; `KeyError` if none of that name was saved along.
        """
        join_all()
        return _read_one(self.folder / _name_of(step), like, name).state


def _steps_in(folder: pathlib.Path) -> dict[int, pathlib.Path]:
    """The checkpoints in a folder by their steps, newest first, whole or not."""
    found = [path for path in folder.glob("step_*") if path.name[5:].isdigit() and path.is_dir()]
    return {int(path.name[5:]): path for path in sorted(found, reverse=True)}


def _newest_at(path: str | os.PathLike[str]) -> pathlib.Path:
    """The newest checkpoint in a folder, or the folder itself if it is one, or has none."""
    folder = pathlib.Path(os.path.realpath(path))
    steps = {} if (folder / MANIFEST).exists() else _steps_in(folder)
    return next(iter(steps.values()), folder)


# --- Writing ---


_WIDENED = ("int2", "int4", "uint2", "uint4")
"""The integers that are written as a byte each: tensorstore does not know all of them."""


def _name_of(step: int) -> str:
    return f"step_{whole_number(step, 'CheckpointFolder: step', 0):09d}"


def _take(tree: PyTree, name: str, arrays: dict[str, Any], with_frozen: bool) -> list[Saved]:
    """Describes a pytree for the manifest, and adds its arrays to `arrays`."""
    check_not_deleted(tree, name, "train.save")
    are_frozen = iter(flag_frozen(tree))
    described = []
    for path, text, value in describe(tree)[0]:
        stored = impl = None
        is_array = value is not NODE and is_stored(value)
        is_frozen = value is not NODE and next(are_frozen) and not is_key(value)
        if is_array and is_key(value):
            impl, value = str(jax.random.key_impl(value)), jax.random.key_data(value)
        if is_array and value.size and (with_frozen or not is_frozen):
            # The number makes the name unique; the path, in characters of all systems, readable.
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
    """Raises `TypeError`, with the path, for what JSON does not have or would change."""
    is_leaf = lambda value: not isinstance(value, dict | list)  # noqa: E731
    for path, value in jtu.tree_leaves_with_path(data, is_leaf=is_leaf):
        keys = [each.key for each in path if isinstance(each, jtu.DictKey)]
        is_json = value is None or isinstance(value, bool | int | float | str)
        if not is_json or not all(isinstance(key, str) for key in keys):
            raise TypeError(
                "train.save expected `data` of JSON (None, bool, int, float, str, list, and dict "
                f"with strings as keys), and got {type(value).__name__} at "
                f"data{jtu.keystr(path)}. Arrays belong in `state`."
            )


# --- Reading ---


def _read_one(
    folder: pathlib.Path, like: State, tree: str | None = None, only: Only = None
) -> Restored[State]:
    """Reads one checkpoint, and no other one where it is damaged.

    **Arguments:**

    - `tree`: the name of a tree that was saved with the state, to read instead of the state.
    """
    wanted, treedef = describe(like)
    manifest = read_manifest(folder)
    if tree is not None and tree not in manifest["beside"]:
        raise KeyError(
            f"{folder} has nothing named {tree!r} beside its state, but "
            f"{', '.join(map(repr, manifest['beside'])) or 'no other tree'}."
        )
    stored = [Saved(*each) for each in (manifest["beside"][tree] if tree else manifest["state"])]
    root = _root_of_model(stored, wanted, only) if tree is None else ""
    wanted = [each._replace(path=root + each.path) for each in wanted]
    names = ["model"] if root else [only] if isinstance(only, str) else only
    is_read: Callable[[Any], bool] = lambda each: names is None or _part(each) in names  # noqa: E731
    if names is not None:
        _check_parts(folder, names, stored, wanted)
    left_out = dict.fromkeys(_part(each) for each in stored if each.name and not is_read(each))
    stored = [*filter(is_read, stored)]
    _check_fits(folder, stored, [*filter(is_read, wanted)])
    check_files(folder, manifest)
    # `jax.transfer_guard` is for accidental transfers; this one is asked for.
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


def _root_of_model(stored: list[Saved], wanted: list[Entry], only: Only) -> str:
    """Where `like` is in the checkpoint: `.model` if it is the model of the `TrainState` there."""
    roots = [entries[0].text.partition("(")[0] for entries in (stored, wanted)]
    return ".model" if only in (None, "model") and roots[0] == "TrainState" != roots[1] else ""


def _check_parts(
    folder: pathlib.Path, names: Sequence[str], stored: list[Saved], wanted: list[Entry]
) -> None:
    """Raises `ValueError` if the checkpoint or `like` lacks a part. Warns of a model without its
    state.
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
            f"The model of {folder} is restored without the model_state that was saved with it, "
            "such as the statistics of BatchNorm. To restore both, pass a TrainState as `like` and "
            '`only=("model", "model_state")`.',
            stacklevel=stacklevel_of_user(),
        )


def _part(entry: Entry | Saved) -> str:
    """The first name in a path, such as `model` in `.model.weight` and in `['model'].weight`."""
    found = re.match(r"\.(\w+)|\[(.*?)\]", entry.path)
    return "" if found is None else found[1] or found[2].strip("'")


# --- Whether a checkpoint fits what it is to be restored into ---


_MAX_LISTED = 8
"""At most this many differences are listed."""


def _check_fits(folder: pathlib.Path, stored: list[Saved], wanted: list[Entry]) -> None:
    """Raises `ValueError` with all differences if a checkpoint is of another structure."""
    found = list(_differences(stored, wanted))
    if found:
        more = f"; and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
        is_state = stored[0].text.startswith("TrainState")
        hint = ' To restore the model alone: `train.restore(..., only="model")`.' * is_state
        raise ValueError(
            f"The checkpoint {folder} is whole, and does not fit `like`: "
            f"{'; '.join(found[:_MAX_LISTED])}{more}. Build `like` in the same way as the saved "
            f"state, or give the folder of another checkpoint.{hint}"
        )


def _differences(stored: list[Saved], wanted: list[Entry]) -> Iterator[str]:
    there, here = (
        collections.Counter(each.path for each in each_of) for each_of in (stored, wanted)
    )
    if [*there.elements()] != [*here.elements()]:
        missing, additional = here - there, there - here
        yield from (f"like{path} is missing in the checkpoint" for path in missing)
        yield from (f"the checkpoint has state{path}, which `like` has not" for path in additional)
        if not missing and not additional:
            yield "its leaves are in another order"
        return
    for found, (path, text, leaf) in zip(stored, wanted, strict=True):
        is_struct = isinstance(leaf, jax.ShapeDtypeStruct) and not is_key(leaf)
        if found.text != text:
            yield f"like{path} is {text}, and was {found.text}"
        elif is_struct and found.name is None and leaf.size:
            yield (
                f"like{path} must be an array with its values: the checkpoint was saved without "
                "frozen arrays"
            )
        elif is_struct and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            yield (
                f"like{path} is of dtype {leaf.dtype}, which JAX has only with "
                "`jax.config.update('jax_enable_x64', True)`"
            )


# --- The arrays: from the files, each of the type of a leaf, and where that is ---


def _read(folder: pathlib.Path, stored: list[Saved], wanted: list[Entry]) -> Iterator[Any]:
    """The value of each leaf: from the files, or of `like` itself."""
    pairs = [(each, like.value) for each, like in zip(stored, wanted, strict=True)]
    shardings = {
        each.name: None if is_key(like) else committed_sharding(like)
        for each, like in pairs
        if each.name is not None
    }
    arrays = read_arrays(folder, shardings)
    for each, like in pairs:
        if each.name is not None:
            # Popped, so that each array is freed once it is placed.
            yield _placed(arrays.pop(each.name), like, each.key_impl)
        elif like is NODE:
            continue
        elif not is_stored(like):
            yield like
        elif not like.size:
            data = jax.eval_shape(without_key_dtype, jax.ShapeDtypeStruct(like.shape, like.dtype))
            yield _placed(np.zeros(data.shape, data.dtype), like, each.key_impl)
        else:
            # Frozen: a step that donates the restored state must not delete the array of `like`.
            yield like.copy()


def _placed(value: Any, like: Any, key_impl: str | None) -> Any:
    """The value, with the type, device and sharding of `like`."""
    if key_impl is None:
        return place_like(value.astype(like.dtype) if str(like.dtype) in _WIDENED else value, like)
    sharding = committed_sharding(like)
    # Compiled, since `jax.device_put` of keys reaches no devices of other processes.
    wrap: Any = functools.partial(jax.random.wrap_key_data, impl=key_impl)
    return wrap(value) if sharding is None else jax.jit(wrap, out_shardings=sharding)(value)


def place_like(value: Any, like: Any) -> Any:
    """The numbers in `value`, a JAX or NumPy array, with the type and the sharding of `like`.

    Nobody else may use `value`: on a CPU JAX takes over the memory of NumPy's arrays.
    """
    if isinstance(like, np.ndarray | np.generic):
        array = np.asarray(value).astype(like.dtype, copy=False)
        return array if isinstance(like, np.ndarray) else array[()]
    return jax.device_put(value, committed_sharding(like))
