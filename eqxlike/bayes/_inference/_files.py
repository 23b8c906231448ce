"""Files of runs: one line of JSON that identifies the run, then arrays. The files hold no code."""

import contextlib
import dataclasses
import json
import numbers
import pathlib
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PRNGKeyArray

from ... import is_inexact_array, tree_deserialise_leaves, tree_serialise_leaves
from ..._check_numbers import integer
from ..._dtypes import is_key
from ...extend import fingerprint, open_to_replace, split
from ._method import Chains, Method, Problem

_FORMAT = "eqxlike.bayes run 1"

# Header fields that must be equal in the file and the run. The text of a field is the part of the
# error message after "differs". If the text is empty, the error message shows both values. Settings
# of the method are compared separately.
_DIFFERENCES = {
    "method": "",
    "unknowns": "",
    "target": " in its prior, its likelihood, or a part of the model that is not inferred",
    "data": " in a value or a shape",
    "key": " from the key that was passed",
    "start": ": the model has other initial parameters",
}


def write_chains(
    path: pathlib.Path, problem: Problem, method: Method, chains: Chains, key: PRNGKeyArray
) -> None:
    """Writes the state of a run to a file, replacing the file atomically."""
    header = _header(problem, method, key) | {
        "step": chains.step,
        "kept": {name: list(each.shape) for name, each in chains.records.items()},
    }
    with open_to_replace(path) as file:
        file.write(json.dumps(header).encode() + b"\n")
        tree_serialise_leaves(file, (chains.states, chains.records))


def read_chains(
    path: pathlib.Path, problem: Problem, method: Method, started: Chains, key: PRNGKeyArray | None
) -> Chains:
    """Reads the state of a run from a file.

    **Arguments:**

    - `started`: the run before its first step.
    - `key`: the key of the run; `None` to accept any key.

    **Raises:** `ValueError` if the file is damaged, is not a run, or belongs to another run.
    """
    with open(path, "rb") as file:
        header = _read_header(path, file)
        _check_header(path, header, _header(problem, method, key))
        records = {
            name: np.zeros(header["kept"][name], each.dtype)
            for name, each in started.records.items()
        }
        try:
            states, records = tree_deserialise_leaves(file, (started.states, records))
        except RuntimeError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
    return Chains(header["step"], states, jtu.tree_map(np.asarray, records))


def read_key(path: pathlib.Path) -> PRNGKeyArray:
    """Reads the key of a run from a file."""
    with open(path, "rb") as file:
        header = _read_header(path, file)
    data, name = header["key"]
    return jr.wrap_key_data(jnp.asarray(data, jnp.uint32), impl=name)


def _header(problem: Problem, method: Method, key: PRNGKeyArray | None) -> dict[str, Any]:
    """The fields that identify a run.

    **Arguments:**

    - `key`: the key of the run. Without a key, neither the key nor the initial parameters are
      included.
    """
    target = problem.target
    leaves = jtu.tree_leaves_with_path(problem.unflatten(jnp.zeros(problem.size, problem.dtype)))
    arrays, rest = split(target.network, is_inexact_array)
    network = rest.merge([jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arrays])
    header = {
        "format": _FORMAT,
        "method": type(method).__name__,
        "settings": _settings(method),
        "unknowns": {
            jtu.keystr(path): [list(leaf.shape), str(leaf.dtype)] for path, leaf in leaves
        },
        "target": fingerprint((network, target.prior, target.likelihood)),
        "data": fingerprint(target.data),
    }
    if key is not None:
        header["start"] = fingerprint((arrays, target.initial_scales))
        typed = key if is_key(key) else jr.wrap_key_data(key)
        header["key"] = [jr.key_data(typed).tolist(), str(jr.key_impl(typed))]
    return header


def _settings(value: Any) -> Any:
    """The fields of a method as JSON values."""
    if isinstance(value, Method):
        return {
            each.name: _settings(getattr(value, each.name)) for each in dataclasses.fields(value)
        }
    if value is None or isinstance(value, bool | str):
        return value
    number = integer(value)
    if number is not None:
        return number
    if isinstance(value, numbers.Real):
        return float(value)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return f"{name} {fingerprint(value)[:8]}"


def _read_header(path: pathlib.Path, file: BinaryIO) -> dict[str, Any]:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        header = json.loads(file.readline())
        if header["format"] == _FORMAT:
            return header
    raise ValueError(
        f"{path} is not a run of `bayes.infer`, or was written by an incompatible version."
    )


def _check_header(path: pathlib.Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, hint in _DIFFERENCES.items():
        there = found.get(name)
        if name in wanted and there != wanted[name]:
            detail = hint or f": {there}, not {wanted[name]}"
            raise ValueError(
                f"{path} contains another run: its {name} differs{detail}. Pass the target, method "
                "and key that the run began with, or another file."
            )
    there, here = found["settings"], wanted["settings"]
    # num_samples may be larger than in the file, because the first steps of both runs are the same.
    others = [name for name in here if name != "num_samples" and there.get(name) != here[name]]
    if others:
        listed = ", ".join(f"{name} {there.get(name)!r}, not {here[name]!r}" for name in others)
        raise ValueError(
            f"{path} contains a run of {found['method']} with other settings: {listed}."
        )
    if "num_samples" in here and there["num_samples"] > here["num_samples"]:
        many, few = there["num_samples"], here["num_samples"]
        raise ValueError(
            f"{path} contains a run with num_samples = {many}, and num_samples = {few} was "
            f"requested. Pass at least {many} to continue the run. To use only {few} of its draws, "
            f"read it by `bayes.load` with num_samples = {many}, and call "
            f"`samples({few}, key=key)`."
        )
