"""Mapping over a prefix and the trees it is a prefix of, with errors that say where it is not."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.tree_util as jtu
from jaxtyping import PyTree

from ._levels import children_with_keys


def map_prefix(
    function: Callable[..., Any],
    *pytrees: PyTree,
    names: Sequence[str],
    advice: str,
    is_leaf: Callable[[Any], bool] | None = None,
) -> PyTree:
    """`jax.tree_util.tree_map`, but its error tells the trees apart.

    JAX's own calls all of them `tree_map tree`. `names` are those that the user knows them by, and
    `advice` ends the message.
    """
    try:
        return jtu.tree_map(function, *pytrees, is_leaf=is_leaf)
    except ValueError:
        prefix, *others = pytrees
        for name, full in zip(names[1:], others, strict=True):
            if message := explain_mismatch(prefix, full, (names[0], name), is_leaf):
                raise ValueError(f"pytree structure error: {message} {advice}") from None
        raise


def explain_mismatch(
    prefix: PyTree,
    full: PyTree,
    names: tuple[str, str],
    is_leaf: Callable[[Any], bool] | None = None,
    path: tuple[Any, ...] = (),
) -> str | None:
    """Says at which node `prefix` is no prefix of `full`; `None` if it is one."""
    if jtu.all_leaves([prefix]) or (is_leaf is not None and is_leaf(prefix)):
        return None
    children, others = children_with_keys(prefix), children_with_keys(full)
    if type(prefix) is not type(full) or len(children) != len(others):
        came, expected = _describe(prefix), _describe(full)
    elif (metadata := _metadata(prefix)) != (other_metadata := _metadata(full)):
        came = _describe_metadata(prefix, metadata, other_metadata)
        expected = _describe_metadata(full, other_metadata, metadata)
    else:
        messages = (
            explain_mismatch(child, other, names, is_leaf, (*path, key))
            for (key, child), (_, other) in zip(children, others, strict=True)
        )
        return next((message for message in messages if message), None)
    place = jtu.keystr(path)
    return f"{names[0]}{place} is {came}, and {names[1]}{place} is {expected}."


def _describe(node: Any) -> str:
    if node is None:
        return "None"
    if jtu.all_leaves([node]):
        return f"a leaf of type {type(node).__name__}"
    children = children_with_keys(node)
    if isinstance(node, dict):
        holds = f"the keys {[key.key for key, _ in children]}"
    else:
        holds = f"{len(children)} {'child' if len(children) == 1 else 'children'}"
    return f"a node of type {type(node).__name__} with {holds}"


def _metadata(node: Any) -> dict[str, Any]:
    """What is compared of two nodes of one type beside their children, by name."""
    if dataclasses.is_dataclass(node):
        names = [field.name for field in dataclasses.fields(node) if field.metadata.get("static")]
        return {name: getattr(node, name, None) for name in names}
    return {"metadata": jtu.flatten_one_level(node)[1]}


def _describe_metadata(node: Any, metadata: dict[str, Any], other: dict[str, Any]) -> str:
    if isinstance(node, dict):
        return _describe(node)
    differing = [name for name in metadata if metadata[name] != other.get(name)]
    values = ", ".join(f"{name}={metadata[name]!r}" for name in differing)
    return f"a node of type {type(node).__name__} with {values}"
