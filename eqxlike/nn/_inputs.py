"""Checks of layers and their inputs, and helpers for sliding windows, stacked layers and keys."""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PRNGKeyArray

from .._check_numbers import hint_to_call, integer
from .._dtypes import is_key
from .._module import BoundMethod, Module
from .._pytree import (
    combine,
    describe_node,
    is_array,
    is_array_like,
    is_array_or_struct,
    is_placeholder,
    partition,
)
from .._transforms._signatures import hint_of_forward

Shape = tuple[int | str | None, ...]
"""The size of each axis, which may be a symbolic size of `jax.export`. A string names an axis of
any size, and `"..."` stands for any number of axes.
"""


def check_instance(model: Any, what: str) -> None:
    """Raises `TypeError` if `model` is a class; `what` is the caller's name in the error."""
    if isinstance(model, type):
        raise TypeError(
            f"{what} expected an instance, got the class {model.__name__}{hint_to_call(model)}."
        )


def check_layer(layer: Any, what: str) -> None:
    """Raises `TypeError` if `layer` is a class, or cannot be called.

    Trees and Modules that cannot be called are allowed, but not Modules with a method `forward`.
    """
    check_instance(layer, what)
    hint = hint_of_forward(layer)
    if not callable(layer) and (hint or jtu.all_leaves([layer])):
        raise TypeError(
            f"{what} expected a layer, or a function such as `jax.nn.relu`; got {layer!r}.{hint}"
        )


def as_layers(layers: Sequence[Any], what: str, name: str) -> tuple[Any, ...]:
    """Returns `layers` as a tuple. Raises `TypeError` if `layers` is not a sequence of layers."""
    is_sequence = hasattr(layers, "__iter__") or hasattr(layers, "__getitem__")
    if not is_sequence and callable(layers):
        raise TypeError(
            f"{what} expected a list of layers, `nn.{what}([a, b])`; got {type(layers).__name__}."
        )
    layers = tuple(layers)
    for index, layer in enumerate(layers):
        check_layer(layer, f"{what}: {name}[{index}]")
    return layers


def check_input(caller: Module | str, x: Any, expected: Shape, name: str = "x") -> None:
    """Checks that `x` is one unbatched input of the shape that a layer or a function expects.

    Raises `ValueError` for another shape, and `TypeError` if `x` is not an array. The message
    contains the name of the function, or the path of the layer in the user's model.
    """
    if not is_array_like(x):
        way_out = ": write `jnp.array(x)`" if isinstance(x, list | tuple) else ""
        raise TypeError(
            f"{describe(caller)} expected {name} to be an array, got {describe_node(x)}{way_out}."
        )
    shape = jnp.shape(x)
    if _fits(shape, expected):
        return
    wanted = ", ".join(map(str, expected)) + "," * (len(expected) == 1)
    message = f"{describe(caller)} expected {name} of shape ({wanted}), got shape {shape}."
    if len(shape) > len(expected) and _fits(shape[len(shape) - len(expected) :], expected):
        is_layer = isinstance(caller, Module)
        single = "The layer takes a single example: for a batch write `jax.vmap(layer)(x)`."
        message += f" {single}" if is_layer else " For a batch, use `jax.vmap`."
    raise ValueError(message)


def check_not_stacked(layer: Module, weight: Any, num_axes: int) -> None:
    """Raises `ValueError` if `weight` has more than the `num_axes` axes of a single layer."""
    if getattr(weight, "ndim", num_axes) > num_axes:
        raise ValueError(
            f"{describe(layer)} has a weight of shape {weight.shape}, with {weight.ndim} axes; a "
            f"single layer has {num_axes}. Call an ensemble or stacked layers with "
            "`eqx.filter_vmap(lambda model, x: model(x), in_axes=(eqx.if_array(0), None))(model, "
            "x)`."
        )


def missing_state(model: Module, name: str, layer: Any) -> TypeError:
    """The error for a model that was called without the state that its `layer` needs."""
    return TypeError(
        f"{describe(model)} needs the state, since {name}, of type {type(layer).__name__}, is "
        "stateful: write `x, state = model(x, state)`."
    )


def _fits(shape: tuple[int, ...], expected: Shape) -> bool:
    if "..." in expected:
        at, num_any = expected.index("..."), len(shape) - len(expected) + 1
        expected = (*expected[:at], *(None,) * num_any, *expected[at + 1 :])
    return len(shape) == len(expected) and all(
        wanted is None or isinstance(wanted, str) or size == wanted
        for size, wanted in zip(shape, expected, strict=True)
    )


def describe(caller: Module | str) -> str:
    """The type of a layer that is being called, and its path in the outermost Module being called.

    The name of a function is returned unchanged.

    Call this function only for errors, because it searches all frames on the stack.
    """
    if isinstance(caller, str):
        return caller
    name = type(caller).__name__
    for module in _callers():
        if module is not caller and (path := _path_to(caller, module)) is not None:
            name = f"{type(caller).__name__} at {type(module).__name__}{path}"
    return name


def _callers() -> Iterator[Module]:
    """The Modules whose methods are running, innermost first."""
    frame = sys._getframe(2)
    while frame is not None:
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        first = frame.f_locals.get(names[0]) if names else None
        # Skips a `BoundMethod`, because the frame of its method also has the Module as first
        # argument.
        if isinstance(first, Module) and not isinstance(first, BoundMethod):
            yield first
        frame = frame.f_back


def _path_to(layer: Module, module: Module) -> str | None:
    try:
        # Compared by identity: an equal layer elsewhere in the model is a different layer.
        leaves = jtu.tree_leaves_with_path(module, is_leaf=lambda node: node is layer)
    except ValueError:
        return None  # A `State` that is out of date cannot be flattened.
    for path, node in leaves:
        if node is layer:
            return jtu.keystr(path)
    return None


# --- Numbers of features, or the word "scalar" ---


Features = int | Literal["scalar"]
"""A number of features, or `"scalar"` for arrays of shape `()`."""


def number_of_features(value: Any, name: str) -> Features:
    """Returns `value` as an `int` of at least 0, or `"scalar"`. Raises `ValueError` otherwise."""
    if isinstance(value, str) and value == "scalar":
        return "scalar"
    number = integer(value)
    if number is None or number < 0:
        raise ValueError(f"{name} must be an integer of at least 0 or 'scalar', got {value!r}.")
    return number


def feature_count(features: Features) -> int:
    """The length of the vector that represents `features`: 1 for `"scalar"`."""
    return 1 if features == "scalar" else features


def feature_shape(features: Features) -> tuple[int, ...]:
    """The shape of one input or output with these features: `()` for `"scalar"`."""
    return () if features == "scalar" else (features,)


# --- Stacked layers: one layer whose arrays have a leading axis ---


def stack_layers(
    layers: Sequence[Any], stack: Callable[..., Any] = lambda *each: jnp.stack(each)
) -> Any:
    """Stacks the arrays of layers; everything else is taken from the first layer."""

    def stack_leaves(first: Any, *others: Any) -> Any:
        if isinstance(first, jax.ShapeDtypeStruct):
            return _with_shape(first, (1 + len(others), *first.shape))
        return stack(first, *others)

    parts = (partition(layer, is_array_or_struct) for layer in layers)
    arrays, statics = zip(*parts, strict=True)
    return combine(jtu.tree_map(stack_leaves, *arrays), statics[0])


class Rows:
    """Stand-in for a stacked array or for one of its rows. A stand-in supports only indexing.

    - `numbers`: a NumPy array with one number for each row, or a single number for one row. A
      stand-in for one row cannot be indexed again: that raises `IndexError`.
    """

    def __init__(self, numbers: Any):
        self.numbers = numbers

    def __getitem__(self, index: Any) -> "Rows":
        return Rows(self.numbers[index])


def layer_at(stacked: Any, index: int | slice) -> Any:
    """Indexes all arrays of stacked layers, or of their stacked outputs.

    Raises `TypeError` inside the `where` of a `tree_at`, because `tree_at` cannot replace part of
    an array.
    """

    def at(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return _with_shape(leaf, np.broadcast_to(0, leaf.shape)[index].shape)
        if is_placeholder(leaf) and is_array_or_struct(leaf.value):
            raise TypeError(
                "`where` selects one of several stacked layers, which is not a node of the tree. "
                "Change the layers from `unstack()` and stack them again, or replace an array of "
                "all layers, such as `stack.layers.weight`."
            )
        return leaf[index] if is_array(leaf) or isinstance(leaf, Rows) else leaf

    return jtu.tree_map(at, stacked)


def _with_shape(struct: jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """`struct` with a new shape. The leading axis may be added, removed or resized."""
    sharding, added = struct.sharding, len(shape) - struct.ndim
    if isinstance(sharding, NamedSharding):
        spec = [None] * added + list(sharding.spec)[max(-added, 0) :]
        sharding = sharding.update(spec=PartitionSpec(*spec))
    return struct.update(shape=shape, sharding=sharding)


# --- Random keys for layers, and for `jax.lax.scan` ---


def key_for(layer: Callable[..., Any], key: PRNGKeyArray | None) -> dict[str, Any]:
    """Returns `{"key": key}`; returns `{}` if `key` is `None` and the layer takes no key."""
    return {"key": key} if key is not None or takes_key(layer) else {}


def takes_key(layer: Callable[..., Any]) -> bool:
    """Returns `True` if `layer` accepts `key=`, or if Python cannot find its signature."""
    try:
        parameters = inspect.signature(layer).parameters
    except (TypeError, ValueError):
        return True
    return "key" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def as_data(keys: PRNGKeyArray | None) -> tuple[Any, Callable[[Any], Any]]:
    """Returns the raw data of keys, as an input of a `scan`, and a function that restores the keys.

    JAX's key reuse checker counts a use of typed keys if a `vmap` moves their axis. The checker
    ignores raw data.
    """
    if keys is None or not is_key(keys):
        return keys, lambda data: data
    implementation = jr.key_impl(keys)
    return jr.key_data(keys), lambda data: jr.wrap_key_data(data, impl=implementation)


# --- Sliding windows of convolutions and pools: sizes and padding for each axis ---


Sizes = int | Sequence[int]
"""One size for all spatial axes, or one for each axis."""

Pads = tuple[tuple[int, int], ...]
"""For each axis, the number of entries to add before and after; negative numbers remove entries."""

Padding = str | int | Sequence[int] | Sequence[tuple[int, int]]
"""One number for all sides, one number or pair for each axis, or one of `PADDING_WORDS`."""

PADDING_WORDS = ("VALID", "SAME", "SAME_LOWER")


class OverAxes:
    """Base of layers whose class header sets the number of spatial axes.

    In `class Conv2d(_ConvNd, num_axes=2, init=False)`, `init=False` makes type checkers use the
    `__init__` of `_ConvNd`. At run time `Conv2d` gets a copy of that function, named
    `Conv2d.__init__`, whose defaults have one value for each axis.
    """

    _num_axes: ClassVar[int]
    _by_axis: ClassVar[tuple[str, ...]] = ()
    """Parameters whose default is repeated for each axis."""

    def __init_subclass__(
        cls, num_axes: int | None = None, init: bool | None = None, **kwargs: Any
    ) -> None:
        if num_axes is None or hasattr(cls, "_num_axes"):
            given = {"num_axes": num_axes, "init": init}
            kwargs |= {name: value for name, value in given.items() if value is not None}
            return super().__init_subclass__(**kwargs)
        super().__init_subclass__(**kwargs)
        cls._num_axes = num_axes
        shared, has_many_axes = inspect.unwrap(cls.__init__), num_axes > 1
        defaults = [
            (each.default,) * num_axes
            if has_many_axes and each.name in cls._by_axis
            else each.default
            for each in inspect.signature(shared).parameters.values()
            if each.kind is each.POSITIONAL_OR_KEYWORD and each.default is not each.empty
        ]
        copied = types.FunctionType(
            shared.__code__, shared.__globals__, "__init__", tuple(defaults), shared.__closure__
        )
        copied.__kwdefaults__ = shared.__kwdefaults__
        functools.update_wrapper(copied, shared, updated=())
        del copied.__wrapped__
        copied.__qualname__ = f"{cls.__qualname__}.__init__"
        type.__setattr__(cls, "__init__", copied)


def sizes_by_axis(value: Any, num_axes: int, name: str, least: int = 1) -> tuple[int, ...]:
    """Returns `value` as a tuple with one size for each spatial axis.

    Raises `ValueError` unless `value` is an integer >= `least`, or a sequence of
    `num_axes` such integers.
    """
    numbers = [integer(each) for each in _per_axis(value, num_axes)]
    sizes = tuple(number for number in numbers if number is not None and number >= least)
    if len(numbers) != num_axes or len(sizes) != num_axes:
        raise ValueError(
            f"{name} must be an integer of at least {least}, or a sequence of {num_axes} such "
            f"integers, one for each spatial axis; got {value!r}."
        )
    return sizes


def _per_axis(value: Any, num_axes: int) -> list[Any]:
    # Arrays of shape `()` are instances of `Iterable`, but count as integers.
    is_one = integer(value) is not None or not isinstance(value, Iterable) or isinstance(value, str)
    return [value] * num_axes if is_one else list(value)


def padding_by_axis(padding: Padding, num_axes: int) -> str | Pads:
    """Converts `padding` to one pair for each spatial axis, or to one of `PADDING_WORDS`."""
    if isinstance(padding, str) and padding.upper() in PADDING_WORDS:
        return padding.upper()
    entries = _per_axis(padding, num_axes)
    pairs = tuple(pair for pair in map(_pair, entries) if pair is not None)
    if len(entries) != num_axes or len(pairs) != num_axes:
        raise ValueError(
            f"padding must be an integer, a sequence of {num_axes} integers or pairs of integers, "
            f"one for each spatial axis, or one of {', '.join(map(repr, PADDING_WORDS))}; got "
            f"{padding!r}."
        )
    return pairs


def _pair(entry: Any) -> tuple[int, int] | None:
    sides = [integer(side) for side in _per_axis(entry, 2)]
    if len(sides) != 2 or sides[0] is None or sides[1] is None:
        return None
    return sides[0], sides[1]


def pads_for(
    padding: str | Pads, sizes: Sequence[int], extents: Sequence[int], stride: Sequence[int]
) -> Pads:
    """The padding of an input with these spatial sizes, as pairs."""
    if not isinstance(padding, str):
        return padding
    return tuple(jax.lax.padtype_to_pads(sizes, extents, stride, padding))


def check_window_fits(layer: Module, x: Any, pads: Pads, extents: tuple[int, ...]) -> None:
    """Raises `ValueError` if the window is larger than the padded input along any axis."""
    shape = jnp.shape(x)
    padded = tuple(size + sum(pad) for size, pad in zip(shape[1:], pads, strict=True))
    if any(size < extent for size, extent in zip(padded, extents, strict=True)):
        raise ValueError(
            f"{describe(layer)} expected padded spatial axes at least as large as its window, "
            f"{extents}; got x of shape {shape}, whose spatial axes have sizes {padded} after "
            "padding."
        )


def axis_names(num_spatial_dims: int) -> tuple[str, ...]:
    """The names of the spatial axes in error messages."""
    if num_spatial_dims == 1:
        return ("length",)
    if num_spatial_dims <= 3:
        return ("depth", "height", "width")[3 - num_spatial_dims :]
    return tuple(f"dim_{axis}" for axis in range(1, num_spatial_dims + 1))
