"""Stateful layers: `State`, the values stored outside the model, and `StateIndex`, their keys."""

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
from .._transforms._stacked import StatePlace, StateValues
from ._inputs import check_instance

if TYPE_CHECKING:
    from typing import ClassVar as AbstractClassVar
else:
    from .._module import AbstractClassVar

# --- Indices: the keys of a layer's values in a `State` ---


Value = TypeVar("Value")
Model = TypeVar("Model")


class _Marker:
    """The marker of an index that has no path yet. A marker is equal only to itself."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Marker":
        # A copy keeps the marker, so that a copied model matches the State of the original model.
        return self

    def __repr__(self) -> str:
        return "<unnamed>"


class DeletedValue(Module):
    """Replaces a deleted initial value. Has no leaves, so there is nothing to train or save."""


class StateIndex(StatePlace, Generic[Value]):
    """The key of a layer's value in a `State`, together with the initial value.

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

        - `init`: the initial value, a pytree of arrays. Later values must have the same shapes and
          dtypes.
        - `marker`: a hashable name of the value. By default a unique object, which
          `make_with_state` replaces by the path of the index in the model.
        """
        self.marker = _Marker() if marker is None else marker
        self.init = init


def is_index(node: Any) -> bool:
    return isinstance(node, StateIndex)


def find_indices(model: PyTree) -> list[tuple[Any, StateIndex]]:
    """The indices in a pytree, with their paths."""
    nodes = jtu.tree_leaves_with_path(model, is_leaf=is_index)
    return [(path, node) for path, node in nodes if is_index(node)]


def map_indices(function: Callable[[str, StateIndex], StateIndex], model: PyTree) -> PyTree:
    """Replaces each index in `model` by `function(path, index)`."""

    def visit(path: tuple[Any, ...], node: Any) -> Any:
        return function(jtu.keystr(path), node) if is_index(node) else node

    return jtu.tree_map_with_path(visit, model, is_leaf=is_index)


def with_array_states(layer: Model, like: PyTree = None) -> Model:
    """Converts the initial values of a layer's states to arrays, so that layers can be stacked.

    An index whose marker is not from the user gets the marker at the same path in `like`, if any.
    """
    markers = {jtu.keystr(path): index.marker for path, index in find_indices(like)}

    def visit(path: str, index: StateIndex) -> StateIndex:
        is_unnamed = isinstance(index.marker, _Marker)
        marker = markers.get(path, index.marker) if is_unnamed else index.marker
        return StateIndex(jtu.tree_map(as_array, index.init), marker=marker)

    def as_array(leaf: Any) -> Any:
        return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf)

    return map_indices(visit, layer)


def delete_init_state(model: Model) -> Model:
    """Removes the initial values from a model, after a `State` was made from it.

    `make_with_state` calls this function.

    **Arguments:**

    - `model`: any pytree.

    **Returns:** a copy of `model` whose indices have no initial values.

    >>> import jax.numpy as jnp
    >>> from eqxlike import nn
    >>> index = nn.StateIndex(jnp.zeros(3), marker="mean")
    >>> state = nn.State(index)
    >>> delete_init_state(index)
    StateIndex(marker='mean', init=DeletedValue())
    """
    check_instance(model, "delete_init_state")
    return map_indices(lambda _, index: StateIndex(DeletedValue(), marker=index.marker), model)


# --- The state of a model ---


Params = ParamSpec("Params")

_OUT_OF_DATE = (
    "This State is out of date: `set` or `update` replaced it by a newer one. Usually a state was "
    "used twice:\n"
    "    x, state2 = layer1(x, state1)\n"
    "    x, state3 = layer2(x, state1)  # should be state2\n"
    "Use the state that was returned last. To keep an old state, copy it first with "
    "`copy.copy(state)`."
)


class State(StateValues, _traits=Traits(is_immutable=False)):
    """The values of all `StateIndex`es of a model, such as the running statistics of `BatchNorm`.

    `make_with_state` returns a model and its State. A stateful layer takes the State as an argument
    and returns the new State. A State is a pytree of arrays, in the order of the indices in the
    model, and works with transformations, loops and serialisation.

    `set` and `update` return a new State and invalidate the old one, so that an old State cannot be
    used by mistake.

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

        - `model`: any pytree. `model` keeps its initial values; `delete_init_state` removes these
          values.

        **Raises:** `ValueError` if an initial value was removed; `TypeError` for an initial value
        that is not a pytree of arrays.
        """
        check_instance(model, "State")
        values: dict[Any, PyTree[Array]] = {}
        for path, index in find_indices(model):
            where = f"{type(model).__name__}{jtu.keystr(path)}"
            if isinstance(index.init, DeletedValue):
                raise ValueError(
                    f"The StateIndex at {where} has no initial value: `make_with_state` or "
                    "`delete_init_state` removed it. Use the State that was made with the model. "
                    "For a model with several parts call `make_with_state` once, on the function "
                    "that makes the whole model."
                )
            values[index.marker] = jtu.tree_map(functools.partial(_initial, where), index.init)
        self._markers = tuple(values)
        self._values = tuple(values.values())

    def get(self, item: StateIndex[Value]) -> Value:
        """**Arguments:**

        - `item`: a `StateIndex` of the model.

        **Returns:** the current value of the index.

        **Raises:**

        - `KeyError` if `item` is not in this State.
        - `ValueError` if `item` is not a `StateIndex`.
        - `ValueError` if this State is out of date.
        """
        return self._values[self._position(item)]

    def set(self, item: StateIndex[Value], value: Value) -> "State":
        """**Arguments:**

        - `item`: a `StateIndex` of the model.
        - `value`: the new value, with the structure, shapes and dtypes of the current one. Python
          numbers and weakly typed arrays are converted to the dtype of the current value.

        **Returns:** a new State. This State is then out of date.

        **Raises:** `ValueError` if `value` has another structure, shape or dtype; also the errors
        of `get`.
        """
        position = self._position(item)
        new = _convert(self._values[position], value, item.marker)
        values = (*self._values[:position], new, *self._values[position + 1 :])
        return self._replaced_by(_state(self._markers, values))

    def substate(self, pytree: PyTree) -> "State":
        """**Arguments:**

        - `pytree`: part of the model.

        **Returns:** a State with only the indices in `pytree`. This State stays valid.

        **Raises:** `KeyError` for an index in `pytree` that is not in this State.
        """
        indices = {index.marker: index for _, index in find_indices(pytree)}
        positions = map(self._position, indices.values())
        return _state(tuple(indices), tuple(self._values[position] for position in positions))

    def update(self, substate: "State") -> "State":
        """**Arguments:**

        - `substate`: a State with some of the indices of this State, as returned by `substate`.

        **Returns:** a new State with the values of `substate`. This State is then out of date.

        **Raises:**

        - `ValueError` if `substate` is not a State.
        - `ValueError` if `substate` has an index that is not in this State.
        - `ValueError` if a value has another structure, shape or dtype.
        """
        if not isinstance(substate, State):
            raise ValueError(
                "State.update expected a State, as returned by `state.substate(layer)`; got "
                f"{type(substate).__name__}."
            )
        changed = substate._values_by_marker()
        unknown = [marker for marker in changed if marker not in self._markers]
        if unknown:
            raise ValueError(
                f"State.update expected a substate of this State, which has {_names(self)}; "
                f"got a State that also has {', '.join(map(str, unknown))}."
            )
        values = tuple(
            _convert(value, changed[marker], marker) if marker in changed else value
            for marker, value in zip(self._markers, self._values, strict=True)
        )
        return self._replaced_by(_state(self._markers, values))

    def _values_by_marker(self) -> dict[Any, PyTree[Array]]:
        """A dictionary from markers to values."""
        return dict(zip(self._markers, self._values, strict=True))

    def _position(self, item: Any) -> int:
        markers = self._markers
        if not isinstance(item, StateIndex):
            raise ValueError(f"A State is indexed by a StateIndex, got {type(item).__name__}.")
        try:
            return markers.index(item.marker)
        except ValueError:
            raise KeyError(
                f"The StateIndex {item.marker} is not in this State, which has {_names(self)}. "
                "The State and the model must come from the same call of `make_with_state`; a "
                "substate must be made for the part of the model that is called."
            ) from None

    def _replaced_by(self, new: "State") -> "State":
        # After this line, each access to a field, also by flattening, calls `__getattr__`, which
        # raises an error.
        stored_fields(self).clear()
        return new

    # Hides `__getattr__` from type checkers, which would otherwise accept any attribute.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name in ("_markers", "_values"):
                raise ValueError(_OUT_OF_DATE)
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
            f"The StateIndex at {where} expected its initial value to be a pytree of arrays, got a "
            f"leaf of type {type(leaf).__name__}: {leaf!r}."
        )
    return _without_weak_type(jnp.asarray(leaf))


def _without_weak_type(array: Array) -> Array:
    # If a state changed from weak to strong type, JAX would retrace functions of the state, and the
    # state could not be the carry of a loop.
    is_weak = getattr(jax.typeof(array), "weak_type", False)
    return jax.lax.convert_element_type(array, array.dtype) if is_weak else array


def _convert(old: PyTree[Array], new: PyTree, marker: Any) -> PyTree[Array]:
    """`new` as arrays, checked to have the structure, shapes and dtypes of `old`."""
    if difference := find_difference(old, new, _is_convertible):
        raise ValueError(
            f"The value at {marker} must keep its structure, shapes and dtypes: "
            f"{difference.explain('the old value', 'the new value')}."
        )
    return jtu.tree_map(_convert_leaf, old, new)


def _is_convertible(old: Any, new: Any) -> bool | None:
    return _convert_leaf(old, new) is not None if jtu.all_leaves([old]) else None


def _convert_leaf(old: Any, new: Any) -> Array | None:
    """`new` as an array of the shape and dtype of `old`, or `None` if it cannot be converted."""
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
    """Wraps a model's constructor so that it returns the model and its `State`.

    **Arguments:**

    - `make_model`: a class, or a function that returns any pytree.

    **Returns:** a function with the arguments of `make_model` that returns `(model, state)`: the
    model without initial values, and the State that has these values. Each index is named after its
    path in the model, so that models of equal structure share compiled functions. A layer that
    occurs at several paths has a separate value at each path.

    **Raises:** the errors of `State`.

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
"""The default of an optional parameter `state`."""


class StatefulLayer(Module):
    """Base of layers that `Sequential` calls as `x, state = layer(x, state=state, key=key)`."""

    __call__: AbstractClassVar[Callable[..., Any]]

    def is_stateful(self) -> bool:
        """Whether the layer takes and returns the state: `True` unless a subclass overrides this.

        If the result is `False`, `Sequential` calls the layer as `x = layer(x, key=key)`.
        """
        return True


def is_stateful(layer: Any) -> bool:
    """Whether a layer takes and returns the state."""
    return isinstance(layer, StatefulLayer) and layer.is_stateful()
