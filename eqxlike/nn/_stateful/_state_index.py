"""The places in the state of a model where layers find what is their own."""

from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from ..._module import Module, field
from .._common import check_instance

Value = TypeVar("Value")
Model = TypeVar("Model")


class _Marker:
    """Stands for an index that has no path yet. One is equal to itself alone."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Marker":
        # A copy of a model goes with the State of the model.
        return self

    def __repr__(self) -> str:
        return "<unnamed>"


class DeletedValue(Module):
    """Stands where an initial value was, and has no leaves, so that nothing is trained or saved."""


class StateIndex(Module, Generic[Value]):
    """The place in a `State` of what is a layer's own, and the value that stands there at first.

    >>> import jax.numpy as jnp
    >>> from eqxlike import nn
    >>> class Counter(nn.StatefulLayer):
    ...     index: nn.StateIndex
    ...     def __init__(self):
    ...         self.index = nn.StateIndex(jnp.array(0))
    ...     def __call__(self, x, state, *, key=None):
    ...         count = state.get(self.index) + 1
    ...         return x + count, state.set(self.index, count)
    >>> counter, state = nn.make_with_state(Counter)()
    >>> for _ in range(3):
    ...     y, state = counter(10, state)
    >>> print(y, state.get(counter.index))
    13 3
    """

    keeps_precision: ClassVar[bool] = True
    marker: Any = field(static=True)
    init: Value | DeletedValue

    def __init__(self, init: Value, *, marker: Any = None):
        """**Arguments:**

        - `init`: the initial value, a pytree of arrays. Shapes and dtypes stay what they are.
        - `marker`: hashable, the name under which a `State` has the value. Unique if left out,
          until `make_with_state` puts the path of the index in the model in its place.
        """
        self.marker = _Marker() if marker is None else marker
        self.init = init


def is_index(node: Any) -> bool:
    return isinstance(node, StateIndex)


def is_named(index: StateIndex) -> bool:
    """Whether an index has a path, or a marker that somebody gave it."""
    return not isinstance(index.marker, _Marker)


def find_indices(model: PyTree) -> list[tuple[Any, StateIndex]]:
    """The indices in a tree, each with its path."""
    nodes = jtu.tree_leaves_with_path(model, is_leaf=is_index)
    return [(path, node) for path, node in nodes if is_index(node)]


def map_indices(function: Callable[[str, StateIndex], StateIndex], model: PyTree) -> PyTree:
    """`model` with `function(path, index)` in the place of each index."""

    def visit(path: tuple[Any, ...], node: Any) -> Any:
        return function(jtu.keystr(path), node) if is_index(node) else node

    return jtu.tree_map_with_path(visit, model, is_leaf=is_index)


def has_place_in_a_state(model: PyTree) -> bool:
    """Whether an index in `model` is named, or has its value in a `State` alone."""
    indices = [index for _, index in find_indices(model)]
    return any(is_named(index) or isinstance(index.init, DeletedValue) for index in indices)


def with_array_states(layer: Model, like: PyTree = None) -> Model:
    """`layer` with an array for each number that a state begins with, so that it can be stacked.

    An index that has no name yet gets the marker that stands in its place in `like`, if one does.
    """
    markers = {jtu.keystr(path): index.marker for path, index in find_indices(like)}

    def visit(path: str, index: StateIndex) -> StateIndex:
        marker = index.marker if is_named(index) else markers.get(path, index.marker)
        return StateIndex(jtu.tree_map(jnp.asarray, index.init), marker=marker)

    return map_indices(visit, layer)


def delete_init_state(model: Model) -> Model:
    """Takes the initial values out of a model, of which a `State` has been made.

    `make_with_state` does it by itself.

    **Arguments:**

    - `model`: any pytree.

    **Returns:** a copy without initial values, whose indices are those of `model`.

    >>> import jax.numpy as jnp
    >>> from eqxlike import nn
    >>> index = nn.StateIndex(jnp.zeros(3), marker="mean")
    >>> state = nn.State(index)
    >>> delete_init_state(index)
    StateIndex(marker='mean', init=DeletedValue())
    """
    check_instance(model, "delete_init_state")
    return map_indices(lambda _, index: StateIndex(DeletedValue(), marker=index.marker), model)
