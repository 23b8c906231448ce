"""Frozen parameters, and the switch between training and inference."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ..._module import freeze_where
from ..._pytree import flag_frozen, tree_at, tree_pformat
from ..._transforms import is_array_or_struct
from .._inputs import Rows, check_instance
from .._scan_stack import ScanStack

Tree = TypeVar("Tree", bound=Any)
Where = Callable[[Any], Any | Sequence[Any]]


def freeze(model: Tree, where: Callable[[Tree], Any | Sequence[Any]] | None = None) -> Tree:
    """Freezes arrays of a model, so that they are not trained.

    - `filter_grad` and similar transformations return no gradients for frozen arrays.
    - `filter` and `partition` skip frozen arrays if the filter function selects floating-point
      arrays but no integers, as `is_inexact_array` does. An optimiser then has no moments for
      frozen arrays.
    - `apply_updates` does not change frozen arrays.

    In all other respects frozen arrays are ordinary arrays: `is_array` returns `True` for them,
    `filter_jit` traces them, methods use them, and files contain them. `jax.grad` of the whole
    model and `optax.apply_updates` ignore that an array is frozen. Freezing changes the structure
    of the tree: a Module with frozen arrays gets a new class, which is a subclass of its original
    class and has the same name.

    **Arguments:**

    - `model`: a Module, or a pytree of Modules. Only arrays in Modules can be frozen.
    - `where`: a function from the model to a node, or to a tuple or list of nodes, as in `tree_at`.
      All arrays in these nodes are frozen; by default all arrays of `model`. `where` may select
      layers of an `nn.ScanStack`, such as `model.blocks[:2]`. The stacked arrays are then split, so
      load a file of the whole stack before you freeze a part of the stack.

    **Returns:** a copy of the model with these arrays frozen. Arrays that are already frozen stay
    frozen.

    **Raises:**

    - `TypeError` if `model` is a class.
    - `ValueError` if the nodes have no array, or have an array that is not in a Module.
    - Any exception of `tree_at` for `where`.

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
    """The inverse of `freeze`: makes the arrays of the selected nodes trainable again.

    Arguments and exceptions are as for `freeze`.

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
    nodes = jtu.tree_leaves(model, is_leaf=lambda node: node is where)
    if not callable(where) or isinstance(where, type) or any(node is where for node in nodes):
        raise TypeError(
            "`where` must be a function from the model to the nodes to freeze or unfreeze, such as "
            f"`lambda model: model.layers[0]`; got {tree_pformat(where)}."
        )
    nodes, treedef = jtu.tree_flatten(model, is_leaf=_is_stack)
    rows = _choose_rows(where, nodes, treedef)
    if rows is None:
        tree_at(where, model, replace_fn=lambda node: node)  # Raises the error for `where`.
        rows = []
    if not any(map(np.any, rows)):
        raise ValueError("The nodes that `where` selects have no arrays.")
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
    """`model` with the chosen leaves frozen, or unfrozen if `value` is `False`."""
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
                f"The array at model{jtu.keystr(path)} is not in a Module, so it cannot be "
                "frozen: make it a field of a Module."
            )
    return new


def _is_stack(node: Any) -> bool:
    return isinstance(node, ScanStack)


def _choose_rows(where: Where, nodes: list[Any], treedef: Any) -> list[np.ndarray] | None:
    """Returns a boolean table for each node. An entry is `True` if `where` chooses it.

    A node is a leaf or a `ScanStack`. The table of a node has one row for each leaf and one column
    for each layer. `where` is called on a tree with a number for each leaf and layer, so that
    `where` can choose layers of a stack, or rows of its arrays. The result is `None` if `where`
    fails, or returns anything but these numbers.
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


# --- Training and inference mode ---


Model = TypeVar("Model")


def _flags(pytree: PyTree) -> list[Any]:
    """Every `inference` attribute in the tree."""
    flags = []

    def visit(node: Any) -> bool:
        # Skips leaves with an attribute `inference`, such as a class or an object of another
        # library.
        if hasattr(node, "inference") and not jtu.all_leaves([node]):
            flags.append(node.inference)
        return False

    jtu.tree_leaves(pytree, is_leaf=visit)
    return flags


def inference_mode(pytree: Model, value: bool = True) -> Model:
    """Sets every `inference` attribute in a pytree, including the attributes of your own Modules.

    **Arguments:**

    - `pytree`: a model, or any pytree with Modules in it.
    - `value`: `True` for inference, `False` for training.

    **Returns:** a copy with the flags set.

    **Raises:** `TypeError` if `pytree` is a class; any exception of `tree_at` if an `inference`
    attribute is not an ordinary field, but a property, method, class attribute or static field.

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
            "`inference_mode` replaces the attribute `inference` of every node that has one: it "
            "must be an ordinary field, neither static nor a method."
        )
        raise


tree_inference = inference_mode
