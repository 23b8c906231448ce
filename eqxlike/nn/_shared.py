"""One array, or one layer, at several places of a model."""

import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax.tree_util as jtu
from jaxtyping import PyTree

from .._module import Module
from .._pytree import find_difference, same_shape_and_dtype, tree_at
from .._transforms import filter_eval_shape
from ._inputs import check_instance


class _Placeholder(enum.Enum):
    """Stands where a shared node was: the same object after any copy, and no array to train."""

    SHARED = enum.auto()

    def __repr__(self) -> str:
        return "<shared>"


class Shared(Module):
    """Ties nodes of a pytree together: one is kept, and put in the place of others at each call.

    A Module is a tree. A layer that stands at two places of a model is two layers, which are equal
    at first and then go their own ways. `Shared` keeps one, so that the gradients of all its uses
    add up.

    Press & Wolf (2017), "Using the Output Embedding to Improve Language Models", share the weights
    of the first layer with the last:

    >>> import jax
    >>> from eqxlike import nn
    >>> key1, key2 = jax.random.split(jax.random.key(0))
    >>> pair = (nn.Embedding(5, 3, key=key1), nn.Linear(3, 5, key=key2))
    >>> shared = Shared(pair, where=lambda pair: pair[1].weight, get=lambda pair: pair[0].weight)
    >>> embedding, linear = shared()
    >>> embedding.weight is linear.weight
    True
    """

    pytree: PyTree
    where: Callable[[PyTree], Any | Sequence[Any]]
    get: Callable[[PyTree], Any | Sequence[Any]]

    def __init__(
        self,
        pytree: PyTree,
        where: Callable[[PyTree], Any | Sequence[Any]],
        get: Callable[[PyTree], Any | Sequence[Any]],
    ):
        """**Arguments:**

        - `pytree`: the tree with the nodes to tie together.
        - `where`: a function from the tree to a node of it, or to a sequence of nodes, as in
          `tree_at`. They are taken out.
        - `get`: a function from the tree to what is put there, a node or anything computed from
          one, such as a transpose; a sequence if `where` returns one.

        **Raises:** `ValueError` if what `get` returns is not of the structure, shapes and dtypes
        of what it stands for, or is itself taken out; and what `tree_at` does for its `where`.
        """
        check_instance(pytree, "Shared")
        self.pytree = tree_at(where, pytree, replace_fn=lambda _: _Placeholder.SHARED)
        self.where = where
        self.get = get
        taken = filter_eval_shape(where, pytree)
        given = filter_eval_shape(get, self.pytree)
        if _Placeholder.SHARED in jtu.tree_leaves(given):
            raise ValueError(
                "`get` returns a node that `where` takes out of the tree, so that nothing is left "
                "of it. It must return one that stays."
            )
        if difference := find_difference(taken, given, same_shape_and_dtype):
            raise ValueError(
                "Nodes that are shared must have the same structure, shapes and dtypes: "
                f"{difference.explain('where(pytree)', 'get(pytree)')}."
            )

    def __call__(self) -> PyTree:
        """**Returns:** the tree, with what `get` returns in each place that `where` points to."""
        return tree_at(self.where, self.pytree, self.get(self.pytree))
