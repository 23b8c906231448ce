"""Saving a state, and the checkpoints of one run: the newest, the best, and what to go on from."""

import math
import os
import pathlib
import re
import time
import warnings
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ..._check_numbers import whole_number
from ..._dtypes import is_key
from ..._pytree import flag_frozen
from .._checks import check_folder, check_not_deleted
from ._manifest import (
    ARRAYS,
    MANIFEST,
    NODE,
    CheckpointError,
    check_files,
    describe,
    is_stored,
    read_manifest,
)
from ._orbax import Saving, join_all, join_at_exit, naming, open_manager, orbax, under_way
from ._restore import WIDENED, Only, Restored, Stored, read_one, steps_in

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
    step = max(steps_in(folder.folder), default=-1) + 1
    return folder.save(step, state, data, background=background, with_frozen=with_frozen)


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
        self.keep_last = whole_number(keep_last, "CheckpointFolder: keep_last")
        self.keep_best = keep_best
        if keep_best is not None:
            whole_number(keep_best, "CheckpointFolder: keep_best")
        if mode not in ("min", "max"):
            raise ValueError(f'CheckpointFolder expected mode "min" or "max", and got {mode!r}.')
        self.mode = mode

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
        ocp = orbax()
        path = self.folder / _name_of(step)
        _check_json(data)
        arrays: dict[str, Any] = {}
        manifest = {
            "state": _take(state, "state", arrays, with_frozen),
            "beside": {
                name: _take(tree, name, arrays, with_frozen)
                for name, tree in (beside or {}).items()
            },
            "data": data,
        }
        for earlier in list(under_way):
            # Its error is that of whoever saves there.
            if earlier.join() is None or os.path.dirname(earlier.path) == str(self.folder):
                earlier.wait()
        self.check_free(step)
        join_at_exit()
        items = {
            MANIFEST: ocp.args.JsonSave(manifest),
            # Orbax refuses to write no arrays.
            ARRAYS: ocp.args.PyTreeSave(arrays or {"none": np.zeros(1)}),
        }
        is_scored = score is not None and math.isfinite(score)
        # `jax.transfer_guard` is for accidental transfers; this one is asked for.
        with naming(path), jax.transfer_guard("allow"):
            self.folder.mkdir(parents=True, exist_ok=True)
            manager = self._open(writes=True)
            manager.save(
                step,
                args=ocp.args.Composite(**items),
                metrics={"score": float(score) if is_scored else None},
                force=True,
            )
        saving = Saving(path, manager)
        if not background:
            saving.wait()
        return saving

    def check_free(self, step: int) -> None:
        """Sees that a checkpoint of this step would be the newest. Later ones that are damaged are
        kept under another name.

        **Raises:** `ValueError` if there is a later one.
        """
        join_all()
        for later, path in steps_in(self.folder).items():
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

    def _open(self, *, writes: bool) -> Any:
        managers, sign = orbax().checkpoint_managers, 1 if self.mode == "max" else -1

        def quality(metrics: dict[str, Any]) -> float:
            return -math.inf if metrics["score"] is None else sign * metrics["score"]

        kept = [
            managers.LatestN(self.keep_last),
            managers.BestN(get_metric_fn=quality, n=self.keep_best or 0),
        ]
        policy = managers.AnyPreservationPolicy(kept)
        return open_manager(self.folder, writes=writes, best_fn=quality, preservation_policy=policy)

    def paths(self) -> list[pathlib.Path]:
        """The checkpoints, newest first, whole or damaged."""
        return list(steps_in(self.folder).values())

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
        with self._open(writes=False) as manager:
            step = manager.best_step()
            is_scored = step is not None and manager.metrics(step)["score"] is not None
        return self.folder / _name_of(step) if is_scored else None

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
                restored = read_one(path, like, only=only)
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
        return read_one(self.folder / _name_of(step), like, name).state


def _name_of(step: int) -> str:
    return f"step_{whole_number(step, 'CheckpointFolder: step', 0):09d}"


def _take(tree: PyTree, name: str, arrays: dict[str, Any], with_frozen: bool) -> list[Stored]:
    """Describes a pytree for the manifest, and adds its arrays to `arrays`."""
    check_not_deleted(tree, name, "train.save")
    are_frozen = iter(flag_frozen(tree))
    described = []
    for path, text, value in describe(tree)[0]:
        stored = impl = None
        is_array = value is not NODE and is_stored(value)
        is_left_out = value is not NODE and next(are_frozen) and not with_frozen
        if is_array and is_key(value):
            impl, value = str(jax.random.key_impl(value)), jax.random.key_data(value)
        if is_array and value.size and not is_left_out:
            # The number makes the name unique; the path, in characters of all systems, readable.
            readable = re.sub(r"[^A-Za-z0-9_]+", ".", path).rstrip(".")[:80]
            stored = f"{len(arrays):05d}{readable}"
            if str(value.dtype) in WIDENED:
                value = value.astype(np.uint8)
            elif not isinstance(value, jax.Array):
                value = np.asarray(value, value.dtype.newbyteorder("="))
            arrays[stored] = value
        described.append(Stored(path, text, stored, impl))
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
