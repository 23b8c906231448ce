"""Whether a checkpoint fits what it is to be restored into."""

import collections
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
from jaxtyping import PyTree

from ._leaves import Leaf, describe_nodes
from ._manifest import Manifest

_MOST_LISTED = 8
"""At most this many differences are listed."""


def check_fits(
    folder: pathlib.Path, manifest: Manifest, like: PyTree, leaves: list[tuple[Leaf, Any]]
) -> None:
    """Raises `ValueError` with all differences if a checkpoint is of another structure than `like`.

    **Arguments:**

    - `leaves`: those of `like`.
    """
    found = list(_differences(manifest, like, leaves))
    if not found:
        return
    listed = "; ".join(found[:_MOST_LISTED])
    more = f"; and {len(found) - _MOST_LISTED} more" if len(found) > _MOST_LISTED else ""
    raise ValueError(
        f"The checkpoint {folder} is whole, and does not fit `like`: {listed}{more}. Build `like` "
        "as the state was built that was saved, or give the folder of another checkpoint."
    )


def _differences(manifest: Manifest, like: PyTree, leaves: list[tuple[Leaf, Any]]) -> Iterator[str]:
    stored = [each.leaf for each in manifest.leaves]
    expected = [leaf for leaf, _ in leaves]
    there = collections.Counter(leaf.path for leaf in stored)
    here = collections.Counter(leaf.path for leaf in expected)
    if there != here:
        for path in (here - there).elements():
            yield f"like{path} is missing in the checkpoint"
        for path in (there - here).elements():
            yield f"the checkpoint has {_root(path)}, which `like` has not"
        return
    yield from _nodes_that_differ(manifest.nodes, describe_nodes(like))
    for found, (wanted, leaf) in zip(stored, leaves, strict=True):
        # Of what has no stable text, such as functions, nothing is compared.
        if found.path != wanted.path:
            yield f"{_root(found.path)} comes where `like` has like{wanted.path}"
        elif found.kind == wanted.kind == "static" and None in (found.text, wanted.text):
            continue
        elif found != wanted:
            yield f"like{wanted.path} is {wanted.describe()}, and was {found.describe()}"
        elif wanted.kind != "static" and isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            yield from _narrowed(wanted)


def _nodes_that_differ(stored: list[list[str]], expected: list[list[str]]) -> Iterator[str]:
    """The nodes of two trees whose leaves have the same paths."""
    there, here = dict(stored), dict(expected)
    for path in here.keys() | there.keys():
        found, wanted = there.get(path, "no node"), here.get(path, "no node")
        if found != wanted:
            yield f"like{path} is {wanted}, and was {found}"


def _narrowed(leaf: Leaf) -> Iterator[str]:
    if leaf.dtype in ("float64", "int64", "uint64", "complex128") and not jax.config.jax_enable_x64:  # pyright: ignore
        yield (
            f"like{leaf.path} is of dtype {leaf.dtype}, which JAX has only with "
            "`jax.config.update('jax_enable_x64', True)`"
        )


def _root(path: str) -> str:
    return f"state{path}"
