"""Layers with state: the state next to the model, and the indices into it."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import wadler_lindig as wl
from jaxtyping import Array, PyTree

from .._module import Module, Traits, field, stored_fields
from .._pytree import find_difference, is_array_like
from .._transforms import StatePlace, StateValues
from ._inputs import check_instance

if TYPE_CHECKING:
    from typing import ClassVar as AbstractClassVar
else:
    from .._module import AbstractClassVar

# --- The places in the state of a model where layers find what is their own ---


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


class StateIndex(StatePlace, Generic[Value]):
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


def with_array_states(layer: Model, like: PyTree = None) -> Model:
    """`layer` with an array for each number that a state begins with, so that it can be stacked.

    An index that has no name yet gets the marker that stands in its place in `like`, if one does.
    """
    markers = {jtu.keystr(path): index.marker for path, index in find_indices(like)}

    def visit(path: str, index: StateIndex) -> StateIndex:
        marker = index.marker if is_named(index) else markers.get(path, index.marker)
        return StateIndex(jtu.tree_map(as_array, index.init), marker=marker)

    def as_array(leaf: Any) -> Any:
        return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf)

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


# The state of a model, which its layers take as they are called and return with the output.


Params = ParamSpec("Params")

_OLD = (
    "This State is out of date: `set` or `update` made a newer one of it. Most often a state was "
    "passed on twice:\n"
    "    x, state2 = layer1(x, state1)\n"
    "    x, state3 = layer2(x, state1)  # state2 was meant\n"
    "Use the state that came back last. To keep one on purpose, copy it beforehand, with "
    "`copy.copy(state)`."
)


class State(StateValues, _traits=Traits(is_immutable=False)):
    """The values of all the `StateIndex`es of a model, such as the running statistics of its
    `BatchNorm`s.

    A layer gets it as an argument, and returns it with what has changed. Made by `make_with_state`.
    It is a pytree of arrays, in the order of the indices in the model: it goes through
    transformations and loops, and into files, as any other.

    `set` and `update` return a new State and make the old one unusable, so that no change is lost
    by passing on the wrong one.

    >>> import eqxlike as eqx, jax, jax.numpy as jnp
    >>> from eqxlike import nn
    >>> norm, state = nn.make_with_state(nn.BatchNorm)(3, axis_name="batch", mode="batch")
    >>> state
    State(
      BatchNorm.batch_counter=i32[], BatchNorm.batch_state_index=(f32[3], f32[3])
    )
    >>> x = jnp.ones((8, 3))
    >>> batched = eqx.filter_vmap(norm, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
    >>> y, state = batched(x, state)
    >>> print(state.get(norm.batch_counter))
    1
    """

    keeps_precision: ClassVar[bool] = True
    _markers: tuple[Any, ...] = field(static=True)
    _values: tuple[PyTree[Array], ...]

    def __init__(self, model: PyTree):
        """**Arguments:**

        - `model`: any pytree. It keeps its initial values: `delete_init_state` takes them out.

        **Raises:** `ValueError` for a model whose initial values were taken out; `TypeError` for
        an initial value that is not made of arrays.
        """
        check_instance(model, "State")
        values: dict[Any, PyTree[Array]] = {}
        for path, index in find_indices(model):
            where = f"{type(model).__name__}{jtu.keystr(path)}"
            if isinstance(index.init, DeletedValue):
                raise ValueError(
                    f"The StateIndex at {where} has no initial value: `make_with_state` or "
                    "`delete_init_state` took it out. Use the State that came with the model. For "
                    "a model made of parts call `make_with_state` once, on what makes all of it."
                )
            values[index.marker] = jtu.tree_map(functools.partial(_initial, where), index.init)
        self._markers = tuple(values)
        self._values = tuple(values.values())

    def get(self, item: StateIndex[Value]) -> Value:
        """**Arguments:**

        - `item`: a `StateIndex` of the model.

        **Returns:** the value that the index has now.

        **Raises:** `KeyError` if this State does not have that index, `ValueError` for something
        else than a `StateIndex`, and if this State is out of date.
        """
        return self._values[self._position(item)]

    def set(self, item: StateIndex[Value], value: Value) -> "State":
        """**Arguments:**

        - `item`: a `StateIndex` of the model.
        - `value`: of the structure, shapes and dtypes of the value that the index has. Python
          numbers, and arrays weak in type, take on the dtype.

        **Returns:** a State with that value. This one is out of date then.

        **Raises:** `ValueError` for another structure, shape or dtype; and what `get` raises.
        """
        position = self._position(item)
        new = _like(self._values[position], value, item.marker)
        values = (*self._values[:position], new, *self._values[position + 1 :])
        return self._replaced_by(_state(self._markers, values))

    def substate(self, pytree: PyTree) -> "State":
        """**Arguments:**

        - `pytree`: part of the model.

        **Returns:** a State of the indices in `pytree` alone. This one stays in use.

        **Raises:** `KeyError` for an index in `pytree` that this State does not have.
        """
        indices = {index.marker: index for _, index in find_indices(pytree)}
        positions = map(self._position, indices.values())
        return _state(tuple(indices), tuple(self._values[position] for position in positions))

    def update(self, substate: "State") -> "State":
        """**Arguments:**

        - `substate`: a State of some of these indices, as `substate` makes.

        **Returns:** a State with the values of `substate` where it has one. This one is out of date
        then.

        **Raises:** `ValueError` if `substate` is not a State, or has an index that this one does
        not have, or a value of another structure, shape or dtype.
        """
        if not isinstance(substate, State):
            raise ValueError(
                f"State.update expected a State, as `state.substate(layer)` makes; got "
                f"{type(substate).__name__}."
            )
        changed = substate._values_by_marker()
        unknown = [marker for marker in changed if marker not in self._markers]
        if unknown:
            raise ValueError(
                f"State.update expected a substate of this State, which has {_names(self)}; "
                f"got one that has {', '.join(map(str, unknown))} too."
            )
        values = tuple(
            _like(value, changed[marker], marker) if marker in changed else value
            for marker, value in zip(self._markers, self._values, strict=True)
        )
        return self._replaced_by(_state(self._markers, values))

    def _values_by_marker(self) -> dict[Any, PyTree[Array]]:
        """**Returns:** the value of each index, by the marker of the index."""
        return dict(zip(self._markers, self._values, strict=True))

    def _position(self, item: Any) -> int:
        markers = self._markers
        if not isinstance(item, StateIndex):
            raise ValueError(
                f"A State is read and written by a StateIndex, got {type(item).__name__}."
            )
        try:
            return markers.index(item.marker)
        except ValueError:
            raise KeyError(
                f"The StateIndex {item.marker} is not in this State, which has {_names(self)}. "
                "Take the State and the model from the same call of `make_with_state`, and for a "
                "substate the part of the model that is called."
            ) from None

    def _replaced_by(self, new: "State") -> "State":
        # Whoever looks for a field that is gone, flattening included, comes to `__getattr__`.
        stored_fields(self).clear()
        return new

    # A type checker that saw this would let any name be read.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name in ("_markers", "_values"):
                raise ValueError(_OLD)
            raise AttributeError(f"'State' object has no attribute {name!r}", name=name, obj=self)

    def __pdoc__(self, **kwargs: Any) -> wl.AbstractDoc:
        try:
            pairs = list(zip(self._markers, self._values, strict=True))
        except ValueError:
            return wl.TextDoc("State(<out of date>)")
        return wl.bracketed(
            begin=wl.TextDoc("State("),
            docs=[wl.TextDoc(f"{marker}=") + wl.pdoc(value, **kwargs) for marker, value in pairs],
            sep=wl.comma,
            end=wl.TextDoc(")"),
            indent=kwargs["indent"],
        )


def _state(markers: tuple[Any, ...], values: tuple[Any, ...]) -> State:
    state = object.__new__(State)
    stored_fields(state).update(_markers=markers, _values=values)
    return state


def _names(state: State) -> str:
    return ", ".join(map(str, state._markers)) or "none"


def _initial(where: str, leaf: Any) -> Array:
    if not is_array_like(leaf):
        raise TypeError(
            f"The StateIndex at {where} expected a pytree of arrays as initial value, got a leaf "
            f"of type {type(leaf).__name__}: {leaf!r}."
        )
    return _without_weak_type(jnp.asarray(leaf))


def _without_weak_type(array: Array) -> Array:
    # A state that changes between weak and strong would be traced twice, and no carry of a loop.
    is_weak = getattr(jax.typeof(array), "weak_type", False)
    return jax.lax.convert_element_type(array, array.dtype) if is_weak else array


def _like(old: PyTree[Array], new: PyTree, marker: Any) -> PyTree[Array]:
    """`new` as arrays that can stand where `old` stands."""
    if difference := find_difference(old, new, _fits):
        raise ValueError(
            f"The value at {marker} keeps its structure, shapes and dtypes: "
            f"{difference.explain('the old value', 'the new value')}."
        )
    return jtu.tree_map(_fitted, old, new)


def _fits(old: Any, new: Any) -> bool | None:
    return _fitted(old, new) is not None if jtu.all_leaves([old]) else None


def _fitted(old: Any, new: Any) -> Array | None:
    """`new` as an array, or `None` if it has another shape or dtype than `old`."""
    if not is_array_like(new):
        return None
    array = jnp.asarray(new)
    if array.shape != old.shape:
        return None
    if array.dtype == old.dtype:
        return _without_weak_type(array)
    is_weak = getattr(jax.typeof(array), "weak_type", False)
    is_same_category = any(
        jnp.issubdtype(array.dtype, category) and jnp.issubdtype(old.dtype, category)
        for category in (jnp.integer, jnp.floating, jnp.complexfloating)
    )
    return jax.lax.convert_element_type(array, old.dtype) if is_weak and is_same_category else None


def make_with_state(make_model: Callable[Params, Model]) -> Callable[Params, tuple[Model, State]]:
    """Makes a model and its `State`.

    **Arguments:**

    - `make_model`: a class, or a function that returns any pytree.

    **Returns:** a function of the arguments of `make_model` that returns `(model, state)`: the
    model without its initial values, and the State that has them. Each index is named after its
    path in the model, so that models made alike share compiled functions, and each place in the
    model has a value of its own.

    **Raises:** what `State` does.

    !!! example

        >>> from eqxlike import nn
        >>> model, state = nn.make_with_state(nn.BatchNorm)(2, axis_name="batch", mode="ema")
        >>> model.ema_first_time_index
        StateIndex(marker='BatchNorm.ema_first_time_index', init=DeletedValue())
    """

    @functools.wraps(make_model)
    def make(*args: Params.args, **kwargs: Params.kwargs) -> tuple[Model, State]:
        model = make_model(*args, **kwargs)
        root = type(model).__name__
        model = map_indices(
            lambda path, index: StateIndex(index.init, marker=f"{root}{path}"), model
        )
        return delete_init_state(model), State(model)

    return make


# --- Layers that take and return the state of the model ---


NO_STATE: Any = object()
"""The default of a parameter `state` that may be left out."""


class StatefulLayer(Module):
    """Base of layers that `Sequential` calls as `x, state = layer(x, state=state, key=key)`."""

    __call__: AbstractClassVar[Callable[..., Any]]

    def is_stateful(self) -> bool:
        """Whether the layer takes and returns the state. `True`, unless a subclass knows better.

        **Returns:** `False` says that `Sequential` is to call it as `x = layer(x, key=)`.
        """
        return True


def is_stateful(layer: Any) -> bool:
    """Whether a layer takes and returns the state."""
    return isinstance(layer, StatefulLayer) and layer.is_stateful()
