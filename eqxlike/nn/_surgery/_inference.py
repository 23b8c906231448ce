"""Switching a whole model between training and inference."""

from typing import Any, TypeVar

import jax
from jaxtyping import PyTree

from ..._pytree import tree_at
from .._common import check_instance

Tree = TypeVar("Tree")


def _has_flag(node: Any) -> bool:
    # A leaf that happens to have the attribute (a class, a foreign object) is not ours to change.
    return hasattr(node, "inference") and not jax.tree_util.all_leaves([node])


def _flagged(pytree: PyTree, *, below: bool = False) -> list[Any]:
    """The outermost nodes with a flag; with `below` those inside `pytree` itself."""

    def is_leaf(node: Any) -> bool:
        return _has_flag(node) and not (below and node is pytree)

    return list(filter(_has_flag, jax.tree_util.tree_leaves(pytree, is_leaf=is_leaf)))


def _flags(pytree: PyTree) -> list[Any]:
    """Every `inference` attribute in the tree."""
    flags, nodes = [], _flagged(pytree)
    while nodes:
        node = nodes.pop()
        flags.append(node.inference)
        nodes += _flagged(node, below=True)
    return flags


def inference_mode(pytree: Tree, value: bool = True) -> Tree:
    """Sets every `inference` attribute in a pytree, those of your own Modules included.

    **Arguments:**

    - `pytree`: a model, or any pytree with Modules in it.
    - `value`: `True` for inference, `False` for training.

    **Returns:** a copy with the flags set.

    **Raises:** `TypeError` for a class; and what `tree_at` does if an `inference` is no field that
    it could replace: a property, a method, a class attribute or a static field.

    >>> from eqxlike import nn
    >>> model = nn.Sequential([nn.Dropout(), nn.Identity()])
    >>> inference_mode(model)[0].inference
    True
    >>> inference_mode(inference_mode(model), value=False)[0].inference
    False
    """
    check_instance(pytree, "inference_mode")
    count = len(_flags(pytree))
    if count == 0:
        return pytree
    try:
        return tree_at(_flags, pytree, [value] * count, is_leaf=lambda x: x is None)
    except (TypeError, ValueError) as error:
        error.add_note(
            "`inference_mode` replaces what stands under the name `inference` in every node that "
            "has one: it must be an ordinary field, neither static nor a method."
        )
        raise


tree_inference = inference_mode
