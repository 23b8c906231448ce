"""A call as a traced function sees it, in text: a change in it has the function traced anew."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.tree_util as jtu

from .._module import BoundMethod, Module
from .._pytree import flatten_one_level_with_keys, is_array, tree_pformat

Call = dict[str, str]
"""A text for the path of each node, leaf and static field in the arguments."""

_LONGEST = 200
"""At most this many characters of a value are shown."""

_TOLD_BY_CHILDREN = (Module, dict, list, tuple, type(None))
"""Nodes of these types hold nothing that is not told by their children and static fields."""


def describe_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The arguments under the names of their parameters, and what `fn` itself holds as `self`."""
    own = fn.__self__ if isinstance(fn, BoundMethod) else fn
    described = {} if jtu.all_leaves([own]) else dict(_describe("self", own))
    for name, value in _named(fn, args, kwargs).items():
        described.update(_describe(name, value))
    return described


def describe_changes(before: Call, after: Call) -> list[str]:
    """A line for each path where the two differ."""
    return [
        f"{path}: {before.get(path, 'absent')} then {after.get(path, 'absent')}"
        for path in {**before, **after}
        if before.get(path) != after.get(path)
    ]


def _named(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    try:
        return inspect.signature(fn).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        # No signature, or a call that does not fit it, of which Python will say so.
        return {"args": args, "kwargs": kwargs}


def _describe(path: str, node: Any) -> Iterator[tuple[str, str]]:
    if jtu.all_leaves([node]):
        yield path, _describe_leaf(node)
        return
    children, treedef = flatten_one_level_with_keys(node)
    yield path, _describe_node(node, treedef)
    if isinstance(node, Module):
        for each in dataclasses.fields(node):
            if each.metadata.get("static", False):
                yield f"{path}.{each.name}", _shorten(repr(getattr(node, each.name)))
    for key, child in children:
        yield from _describe(path + jtu.keystr((key,)), child)


def _describe_node(node: Any, treedef: Any) -> str:
    type_name = "None" if node is None else type(node).__name__
    if isinstance(node, _TOLD_BY_CHILDREN):
        return type_name
    _, static = treedef.node_data()
    return f"{type_name} with {_shorten(repr(static))}"


def _describe_leaf(leaf: Any) -> str:
    if not is_array(leaf):
        return _shorten(repr(leaf))
    text = tree_pformat(leaf)
    partitioned = [axis for axis in jax.typeof(leaf).sharding.spec if axis is not None]
    return f"{text} sharded over {', '.join(map(str, partitioned))}" if partitioned else text


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
