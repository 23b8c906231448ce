"""Freezing part of a model, so that it is not trained, and switching it to inference."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ..._module import freeze_where
from ..._pytree import flag_frozen, tree_at
from ..._transforms import is_array_or_struct
from .._inputs import Rows, check_instance
from .._scan_stack import ScanStack

Tree = TypeVar("Tree", bound=Any)
Where = Callable[[Any], Any | Sequence[Any]]


def freeze(model: Tree, where: Callable[[Tree], Any | Sequence[Any]] | None = None) -> Tree:
    """Marks arrays of a model as not to be trained.

    What is frozen gets no gradient from `filter_grad` and its kin. `filter` and `partition` leave
    it out by any function that chooses floating-point arrays and no integers, `is_inexact_array`
    or one of your own, so that an optimiser keeps no moments for it; `apply_updates` leaves it as
    it is whatever the update. It is still an array among the others: `is_array` takes it in,
    `filter_jit` traces it, methods compute with it, files hold it; `jax.grad` of the whole model
    and `optax.apply_updates` know nothing of it. It is part of the structure of the tree: a frozen
    Module is of a subclass of its class, of the same name.

    **Arguments:**

    - `model`: a Module, or a pytree of Modules. What is frozen belongs to a Module.
    - `where`: a function from a model to the node to freeze, or to a tuple or list of nodes, as in
      `tree_at`: arrays, or subtrees of which all arrays are frozen. All of `model` if left out.
      It may choose layers of an `nn.ScanStack`: `model.blocks[:2]`. This splits the arrays of the
      stack, so load a file of the whole stack before you freeze part of it.

    **Returns:** the model with these arrays frozen, besides those that were.

    **Raises:** `TypeError` if `model` is a class; `ValueError` if there is no array there, or one
    that belongs to no Module; and what `tree_at` raises for its `where`.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp
        >>> from eqxlike import nn
        >>> model = nn.MLP(2, 1, width_size=8, depth=2, key=jax.random.key(0))
        >>> model = nn.freeze(model, lambda model: model.layers[:-1])
        >>> gradient_of = eqx.filter_jit(eqx.filter_grad(lambda model, x: model(x)[0]))
        >>> gradient = gradient_of(model, jnp.ones(2))
        >>> gradient.layers[0].weight is None, gradient.layers[-1].weight.shape
        (True, (1, 8))
    """
    check_instance(model, "freeze")
    return _set_frozen(model, where, True)


def unfreeze(model: Tree, where: Callable[[Tree], Any | Sequence[Any]] | None = None) -> Tree:
    """The inverse of `freeze`: the arrays there, or all of them, are trained again.

    Arguments and errors are those of `freeze`.

    >>> import jax
    >>> from eqxlike import nn
    >>> layer = nn.Linear(2, 2, key=jax.random.key(0))
    >>> nn.unfreeze(nn.freeze(layer)) == layer
    True
    """
    check_instance(model, "unfreeze")
    return _set_frozen(model, where, False)


def _set_frozen(model: PyTree, where: Where | None, value: bool) -> PyTree:
    where = (lambda model: model) if where is None else where
    nodes, treedef = jtu.tree_flatten(model, is_leaf=_is_stack)
    rows = _choose_rows(where, nodes, treedef)
    if rows is None:
        tree_at(where, model, replace_fn=lambda node: node)  # It says what is wrong.
        rows = []
    if not any(map(np.any, rows)):
        raise ValueError("There is no array where `where` points to.")
    are_chosen: list[bool] = []
    layers: dict[int, list[Any]] = {}
    for place, (node, table) in enumerate(zip(nodes, rows, strict=True)):
        is_whole = (table.all(1) == table.any(1)).all()
        if is_whole and (not _is_stack(node) or len(node.runs()) == 1):
            are_chosen += [bool(row.all()) for row in table]
        else:
            are_chosen += [False] * len(jtu.tree_leaves(node))
            layers[place] = [
                _with_flags(layer, flags, value)
                for layer, flags in zip(node.unstack(), table.T, strict=True)
            ]
    nodes, treedef = jtu.tree_flatten(_with_flags(model, are_chosen, value), is_leaf=_is_stack)
    for place, each in layers.items():
        nodes[place] = nodes[place].with_layers(each)
    return treedef.unflatten(nodes)


def _with_flags(model: PyTree, are_chosen: Sequence[bool], value: bool) -> PyTree:
    """`model` with the chosen leaves frozen, or trained again if `value` is `False`."""
    flags = [
        value if is_chosen else flag
        for is_chosen, flag in zip(are_chosen, flag_frozen(model), strict=True)
    ]
    new = freeze_where(model, jtu.tree_structure(model).unflatten(flags))
    for (path, _), flag, is_now in zip(
        jtu.tree_leaves_with_path(model), flags, flag_frozen(new), strict=True
    ):
        if flag != is_now:
            raise ValueError(
                f"The array at model{jtu.keystr(path)} belongs to no Module, and so cannot be "
                "frozen: make it a field of one."
            )
    return new


def _is_stack(node: Any) -> bool:
    return isinstance(node, ScanStack)


def _choose_rows(where: Where, nodes: list[Any], treedef: Any) -> list[np.ndarray] | None:
    """For each node, a leaf or a `ScanStack`, a table of the arrays that `where` chooses: a row for
    each leaf, a column for each layer. `None` if `where` fails or returns something else.

    `where` sees a number for each leaf and layer. So it may choose layers of a stack, and rows of
    the arrays of a stack.
    """
    tables, shown, count = [], [], 0
    for node in nodes:
        layers, depth = (node.runs()[0][0].layers, node.depth) if _is_stack(node) else (node, 1)
        leaves, structure = jtu.tree_flatten(layers)
        table = count + np.arange(len(leaves) * depth).reshape(len(leaves), depth)
        count += table.size
        tables.append((table, np.array(list(map(is_array_or_struct, leaves)), bool)[:, None]))
        view = structure.unflatten(map(Rows, table))
        shown.append(node._storing(view, depth) if _is_stack(node) else Rows(table[0, 0]))
    try:
        chosen = jtu.tree_leaves(where(treedef.unflatten(shown)))
        numbers = np.concatenate([np.ravel(leaf.numbers) for leaf in chosen])
    except Exception:
        return None
    return [np.isin(table, numbers) & is_array for table, is_array in tables]


# --- Switching a whole model between training and inference ---


Model = TypeVar("Model")


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


def inference_mode(pytree: Model, value: bool = True) -> Model:
    """Sets every `inference` attribute in a pytree, those of your own Modules included.

    **Arguments:**

    - `pytree`: a model, or any pytree with Modules in it.
    - `value`: `True` for inference, `False` for training.

    **Returns:** a copy with the flags set.

    **Raises:** `TypeError` for a class; and what `tree_at` does if an `inference` is not a field
    that it could replace: a property, a method, a class attribute or a static field.

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
