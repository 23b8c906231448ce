"""Restoring a state, or a part of it."""

import collections
import functools
import os
import pathlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np

from ..._dtypes import is_key, without_key_dtype
from ..._pytree import committed_sharding
from ..._traceback import stacklevel_of_user
from ._manifest import MANIFEST, NODE, Entry, check_files, describe, is_stored, read_manifest
from ._orbax import join_all, orbax, read_arrays

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


class Stored(NamedTuple):
    """A node or a leaf in a manifest.

    - `path`, `text`: as of an `Entry`.
    - `name`: the name of the array; `None` for what is not stored: a node, a leaf that is no array,
      an array without elements, and a frozen one that was left out.
    - `key_impl`: the implementation of a PRNG key.
    """

    path: str
    text: str
    name: str | None
    key_impl: str | None


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
    folder = pathlib.Path(os.path.realpath(path))
    if not (folder / MANIFEST).exists():
        folder = next(iter(steps_in(folder).values()), folder)
    return read_one(folder, like, only=only)


def steps_in(folder: pathlib.Path) -> dict[int, pathlib.Path]:
    """The checkpoints in a folder by their steps, newest first, whole or not."""
    found = [path for path in folder.glob("step_*") if path.name[5:].isdigit() and path.is_dir()]
    return {int(path.name[5:]): path for path in sorted(found, reverse=True)}


def read_one(
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
    stored = [Stored(*each) for each in (manifest["beside"][tree] if tree else manifest["state"])]
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


def _root_of_model(stored: list[Stored], wanted: list[Entry], only: Only) -> str:
    """Where `like` is in the checkpoint: `.model` if it is the model of the `TrainState` there."""
    roots = [entries[0].text.partition("(")[0] for entries in (stored, wanted)]
    return ".model" if only in (None, "model") and roots[0] == "TrainState" != roots[1] else ""


def _check_parts(
    folder: pathlib.Path, names: Sequence[str], stored: list[Stored], wanted: list[Entry]
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


def _part(entry: Entry | Stored) -> str:
    """The first name in a path, such as `model` in `.model.weight` and in `['model'].weight`."""
    found = re.match(r"\.(\w+)|\[(.*?)\]", entry.path)
    return "" if found is None else found[1] or found[2].strip("'")


# --- Whether a checkpoint fits what it is to be restored into ---


_MAX_LISTED = 8
"""At most this many differences are listed."""


def _check_fits(folder: pathlib.Path, stored: list[Stored], wanted: list[Entry]) -> None:
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


def _differences(stored: list[Stored], wanted: list[Entry]) -> Iterator[str]:
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


WIDENED = ("int2", "int4", "uint2", "uint4")
"""The integers that are written as a byte each: tensorstore does not know all of them."""


def _read(folder: pathlib.Path, stored: list[Stored], wanted: list[Entry]) -> Iterator[Any]:
    """The value of each leaf: from the files, or of `like` itself."""
    ocp = orbax()
    pairs = [(each, like.value) for each, like in zip(stored, wanted, strict=True)]
    arguments = {}
    for each, like in pairs:
        if each.name is not None:
            # With a sharding each device reads only its part.
            sharding = None if is_key(like) else committed_sharding(like)
            arguments[each.name] = (
                ocp.RestoreArgs(restore_type=np.ndarray)
                if sharding is None
                else ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding)
            )
    arrays = read_arrays(folder, arguments)
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
        return place_like(value.astype(like.dtype) if str(like.dtype) in WIDENED else value, like)
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
