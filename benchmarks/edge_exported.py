"""Warm calls of exported programs, compared with the original function.

The floor is `jax.jit` of a program that `jax.export` writes and reads without eqxlike, called with
flat arrays. A dictionary replaces a Module if the class is not available.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.export

import eqxlike
from benchmarks import columns, networks
from benchmarks.cases import Case, check_agreement
from benchmarks.columns import Work
from benchmarks.layer_rows import Row, Table
from benchmarks.timing import Call

TABLE = Table("Exported programs", ("completion", "dispatch"), unit="microseconds")

JAX_EXPORT = "jax.export, flat list"
EXPORTED = "Exported.call"


def by_jax(work: Work) -> Call:
    """The program of `jax.export`, called with all arrays in one list."""
    leaves, treedef = jax.tree_util.tree_flatten(eqxlike.filter(work.state, eqxlike.is_array))
    static = eqxlike.filter(work.state, eqxlike.is_array, inverse=True)

    def function(leaves: list[jax.Array], *data: jax.Array) -> Any:
        state = eqxlike.combine(jax.tree_util.tree_unflatten(treedef, leaves), static)
        return work.function(*state, *data)

    written = jax.export.export(jax.jit(function))(leaves, *work.data).serialize()
    read = jax.export.deserialize(bytearray(written))
    return functools.partial(jax.jit(read.call), leaves, *work.data)


def exported(work: Work, as_given: Callable[[Any], Any] = lambda state: state) -> Call:
    """The program of `eqxlike.export`."""
    program = eqxlike.export(work.function, *work.state, *work.data, dynamic=())
    return functools.partial(program.call, *map(as_given, work.state), *work.data)


def as_dictionaries(model: Any) -> dict[str, Any]:
    """The weights of an MLP as dictionaries, for a process without the classes."""
    layers = ({"weight": layer.weight, "bias": layer.bias} for layer in model.layers)
    return {"layers": tuple(layers)}


def rows() -> list[Row]:
    """MLPs as part of the program, as arguments, and as dictionaries."""

    def mlp(depth: int, width: int, is_passed: bool) -> Work:
        model, x = networks.mlp(eqxlike, width, depth), networks.normal(width, seed=1)
        if is_passed:
            return Work(eqxlike, networks.forward, (model,), (x,))
        return Work(eqxlike, functools.partial(networks.forward, model), (), (x,))

    def row(name: str, make: Callable[[], Work], as_given: Any = lambda state: state) -> Row:
        builders: dict[str, Callable[[], Call]] = {
            JAX_EXPORT: lambda: by_jax(make()),
            columns.OURS: lambda: columns.filtered(make()),
            EXPORTED: lambda: exported(make(), as_given),
        }
        return Row(TABLE, Case(name, builders, JAX_EXPORT), check_agreement)

    return [
        row("MLP, 2 layers of 32, in the program", lambda: mlp(1, 32, False)),
        row("MLP, 2 layers of 32, passed", lambda: mlp(1, 32, True)),
        row("MLP, 64 layers of 8, passed", lambda: mlp(63, 8, True)),
        row(
            "MLP, 64 layers of 8, passed as dictionaries", lambda: mlp(63, 8, True), as_dictionaries
        ),
    ]
