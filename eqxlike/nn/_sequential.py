"""Layers one after another, and functions as layers."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import jax.random as jr
from jaxtyping import Array, PRNGKeyArray

from .._module import Module
from .._numbers import integer
from ._common import check_instance, describe, key_for
from ._stateful import NO_STATE, State, StatefulLayer, is_stateful


class Sequential(StatefulLayer):
    """Layers applied in order; indexes, slices, iterates and measures like a tuple of them.

    >>> import jax, jax.numpy as jnp
    >>> from eqxlike import nn
    >>> key1, key2 = jax.random.split(jax.random.key(0))
    >>> model = nn.Sequential(
    ...     [nn.Linear(3, 8, key=key1), nn.Lambda(jax.nn.relu), nn.Linear(8, 2, key=key2)]
    ... )
    >>> model(jnp.ones(3)).shape, model[:1](jnp.ones(3)).shape, len(model)
    ((2,), (8,), 3)
    """

    layers: tuple[Callable, ...]

    def __init__(self, layers: Sequence[Callable]):
        """**Arguments:**

        - `layers`: callables `layer(x, *, key)`, or `layer(x, state, *, key)` for those that are
          stateful; wrap a plain function in `Lambda` if the whole is called with a key.
        """
        self.layers = tuple(layers)
        for index, layer in enumerate(self.layers):
            check_instance(layer, f"Sequential: layers[{index}]")

    def is_stateful(self) -> bool:
        """**Returns:** whether one of the layers is stateful."""
        return any(map(is_stateful, self.layers))

    @overload
    def __call__(self, x: Any, *, key: PRNGKeyArray | None = None) -> Array: ...
    @overload
    def __call__(
        self, x: Any, state: State, *, key: PRNGKeyArray | None = None
    ) -> tuple[Array, State]: ...
    def __call__(self, x: Any, state: Any = NO_STATE, *, key: PRNGKeyArray | None = None) -> Any:
        """**Arguments:**

        - `x`: the input of the first layer.
        - `state`: passed through every layer that is a `StatefulLayer` and says that it is
          stateful; needed if there is one.
        - `key`: split into one key a layer. Without it a layer that takes a key gets `None`.

        **Returns:** the output of the last layer; the pair of that and the state if there is a
        `state`.

        **Raises:** `TypeError` if a layer needs the state and there is none.
        """
        keys = [None] * len(self.layers) if key is None else jr.split(key, len(self.layers))
        for index, (layer, layer_key) in enumerate(zip(self.layers, keys, strict=True)):
            if not is_stateful(layer):
                x = layer(x, **key_for(layer, layer_key))
            elif state is NO_STATE:
                raise TypeError(
                    f"{describe(self)} needs the state, since layers[{index}], of type "
                    f"{type(layer).__name__}, is stateful: write `x, state = model(x, state)`."
                )
            else:
                x, state = layer(x, state=state, **key_for(layer, layer_key))
        return x if state is NO_STATE else (x, state)

    @overload
    def __getitem__(self, index: int) -> Callable: ...

    @overload
    def __getitem__(self, index: slice) -> "Sequential": ...

    def __getitem__(self, index: int | slice) -> "Callable | Sequential":
        """The layer at an integer, a `Sequential` of the layers in a slice."""
        if isinstance(index, slice):
            return Sequential(self.layers[index])
        if (number := integer(index)) is not None:
            return self.layers[number]
        raise TypeError(
            f"Sequential is indexed by an integer or a slice, got {type(index).__name__}."
        )

    def __iter__(self) -> Iterator[Callable]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)


class Lambda(Module):
    """A function as a layer: `fn(x)`, with the `key` that layers take and functions do not.

    `fn` is a leaf or a subtree of the model, so that a Module with arrays of its own is trained.

    >>> Lambda(abs)(-3, key=None)
    3
    """

    fn: Callable[[Any], Any]

    def __call__(self, x: Any, *, key: PRNGKeyArray | None = None) -> Array:
        """**Returns:** `fn(x)`. `key` is ignored."""
        del key
        return self.fn(x)
