"""Replacing the layers of a model."""

from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu
from jaxtyping import PRNGKeyArray, PyTree

from ..._module import Module
from .._common import check_instance
from ._match import Match, node_predicate
from ._paths import key_at


def replace_layers(
    model: PyTree,
    match: Match,
    make: Callable[..., Any],
    *,
    key: PRNGKeyArray | None = None,
) -> PyTree:
    """A copy of a model in which every layer of some type is replaced.

    **Arguments:**

    - `model`: a Module, or any pytree. Layers in containers are found, in static fields not: those
      are part of the structure of the tree, not of what stands in it.
    - `match`: a type, several, or a function from a node of the tree to `bool`. It is asked from
      the root down, of every node outside those that it chose.
    - `make`: called as `make(node)`, returns what takes its place. A node that stands at several
      places is replaced by one and the same: it stays shared.
    - `key`: if given, `make` is called as `make(node, key=part)`, each time with another part of
      it, which depends on the path of the node alone: with one key for all, layers of the same
      size would be initialised alike.

    A layer that is stored stacked, as in `nn.ScanStack` or an ensemble made by `filter_vmap`, is
    one node, whose arrays have a leading axis.

    **Returns:** the new model. What was not replaced is shared with `model`.

    **Raises:** `ValueError` if nothing matches, `TypeError` if `match` is neither type nor
    function, or `model` is a class.

    !!! example

        >>> import jax
        >>> from eqxlike import nn
        >>> model = nn.MLP(2, 1, width_size=8, depth=1, key=jax.random.key(0))
        >>> def adapt(layer, *, key):
        ...     return nn.LoRALinear(layer, rank=4, key=key)
        >>> adapted = nn.replace_layers(model, nn.Linear, adapt, key=jax.random.key(1))
        >>> [type(layer).__name__ for layer in adapted.layers]
        ['LoRALinear', 'LoRALinear']
    """
    check_instance(model, "replace_layers")
    is_chosen = node_predicate(match, "match")
    seen: dict[type, None] = {}
    chosen: set[int] = set()

    def is_match(node: Any) -> bool:
        seen[type(node)] = None
        if is_chosen(node):
            chosen.add(id(node))
            return True
        return False

    nodes, treedef = jtu.tree_flatten_with_path(model, is_leaf=is_match)
    if not chosen:
        raise ValueError(_nothing_matches(match, seen))
    made: dict[int, Any] = {}
    for path, node in nodes:
        if id(node) in chosen and id(node) not in made:
            options = {} if key is None else {"key": key_at(key, jtu.keystr(path))}
            made[id(node)] = make(node, **options)
    return treedef.unflatten([made[id(node)] if id(node) in chosen else node for _, node in nodes])


def _nothing_matches(match: Match, seen: dict[type, None]) -> str:
    names = [cls.__name__ for cls in seen if issubclass(cls, Module)]
    what = "Modules of type" if names else "no Module, but nodes of type"
    names = names or [cls.__name__ for cls in seen]
    return (
        f"No node of the model matches {getattr(match, '__name__', repr(match))}. It has "
        f"{what} {', '.join(dict.fromkeys(names))}. Static fields are not searched."
    )
