"""The multi-layer perceptron."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, PRNGKeyArray, Shaped

from .._module import Module, field
from .._numbers import whole_number
from .._pytree import combine, is_array, partition
from .._transforms import filter_vmap
from ._common import Initializer, as_data, key_for, number_of_features, split_key
from ._linear import Linear


def _identity(x: Any) -> Any:
    return x


def _one_per_unit(activation: Callable, shape: tuple[int, ...]) -> Callable:
    """`activation` with its arrays, if it has any, repeated so that each unit owns a copy."""

    def repeat(leaf: Any) -> Any:
        return jnp.broadcast_to(leaf, shape + jnp.shape(leaf)) if is_array(leaf) else leaf

    return jax.tree_util.tree_map(repeat, activation)


def _at_layer(activation: Callable, index: Any) -> Callable:
    return jax.tree_util.tree_map(lambda leaf: leaf[index] if is_array(leaf) else leaf, activation)


def _apply_per_unit(activation: Callable, x: Shaped[Array, " units"]) -> Shaped[Array, " units"]:
    return filter_vmap(lambda unit, value: unit(value))(activation, x)


class MLP(Module):
    """A multi-layer perceptron, also called a feed-forward network.

    An activation acts on each unit by itself. If it is a Module with arrays, every unit of every
    layer owns a copy of them: an activation with one learnt slope gets `depth * width_size` slopes.

    >>> import jax, jax.numpy as jnp
    >>> model = MLP(in_size=2, out_size="scalar", width_size=8, depth=2, key=jax.random.key(0))
    >>> [layer.weight.shape for layer in model.layers]
    [(8, 2), (8, 8), (1, 8)]
    >>> model(jnp.ones(2)).shape
    ()
    """

    layers: tuple[Linear, ...]
    activation: Callable
    final_activation: Callable
    use_bias: bool = field(static=True)
    use_final_bias: bool = field(static=True)
    in_size: int | Literal["scalar"] = field(static=True)
    out_size: int | Literal["scalar"] = field(static=True)
    width_size: int = field(static=True)
    depth: int = field(static=True)
    scan: bool = field(static=True, default=False)

    def __init__(
        self,
        in_size: int | Literal["scalar"],
        out_size: int | Literal["scalar"],
        width_size: int,
        depth: int,
        activation: Callable = jax.nn.relu,
        final_activation: Callable = _identity,
        use_bias: bool = True,
        use_final_bias: bool = True,
        dtype: Any = None,
        *,
        scan: bool = False,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `in_size`: length of the input; `"scalar"` for an input of shape `()`.
        - `out_size`: length of the output; `"scalar"` for an output of shape `()`.
        - `width_size`: units in each hidden layer.
        - `depth`: number of hidden layers; 0 leaves one `Linear(in_size, out_size)`.
        - `activation`: after each hidden layer, unit by unit.
        - `final_activation`: after the last layer, unit by unit.
        - `use_bias`, `use_final_bias`: whether hidden layers, and the last one, add a bias.
        - `dtype`: of all weights and biases; JAX's default float if `None`.
        - `scan`: store the `depth - 1` layers between hidden ones stacked, as one `Linear` whose
          arrays have a leading axis, and apply them by `jax.lax.scan`: compile time does not grow
          with depth.
        - `weight_init`, `bias_init`: as for `Linear`, for each layer.
        - `key`: for the initial weights; the same key gives the same network with `scan` as
          without.

        **Raises:** `ValueError` for a negative or non-integer size or depth.
        """
        in_size = number_of_features(in_size, "in_size")
        out_size = number_of_features(out_size, "out_size")
        width_size = whole_number(width_size, "width_size", least=0)
        depth = whole_number(depth, "depth", least=0)

        def make(in_size: Any, out_size: Any, use_bias: bool, key: PRNGKeyArray) -> Linear:
            options = {"weight_init": weight_init, "bias_init": bias_init, "key": key}
            return Linear(in_size, out_size, use_bias, dtype, **options)

        keys = jr.split(key, depth + 1) if scan else split_key(key, depth + 1)
        first, between, last = keys[0], keys[1:-1], keys[-1]
        if depth == 0:
            layers = [make(in_size, out_size, use_final_bias, first)]
        else:
            hidden = functools.partial(make, width_size, width_size, use_bias)
            layers = [make(in_size, width_size, use_bias, first)]
            if scan:
                layers.append(filter_vmap(hidden)(between))
            else:
                layers += map(hidden, between)
            layers += [make(width_size, out_size, use_final_bias, last)]
        self.layers = tuple(layers)
        self.activation = _one_per_unit(activation, (depth, width_size))
        self.final_activation = (
            final_activation
            if out_size == "scalar"
            else _one_per_unit(final_activation, (out_size,))
        )
        self.use_bias = use_bias
        self.use_final_bias = use_final_bias
        self.in_size = in_size
        self.out_size = out_size
        self.width_size = width_size
        self.depth = depth
        self.scan = scan

    def __call__(
        self, x: Shaped[Array, " in_size"], *, key: PRNGKeyArray | None = None
    ) -> Shaped[Array, " out_size"]:
        """**Arguments:**

        - `x`: shape `(in_size,)`, or `()` if `in_size="scalar"`.
        - `key`: split into one key a layer. A `Linear` ignores its own; a layer that was put in the
          place of one, by `to_bayesian` say, may need it.

        **Returns:** shape `(out_size,)`, or `()` if `out_size="scalar"`.

        **Raises:** `ValueError` if `x` has another shape.
        """
        keys = None if key is None else jr.split(key, self.depth + 1)
        if self.depth > 0:
            x = self._apply_hidden(0, x, keys)
        if self.scan and self.depth > 1:
            x = self._scan_hidden(x, None if keys is None else keys[1:-1])
        else:
            for index in range(1, self.depth):
                x = self._apply_hidden(index, x, keys)
        x = self.layers[-1](x, **key_for(self.layers[-1], None if keys is None else keys[-1]))
        if self.out_size == "scalar":
            return self.final_activation(x)
        return _apply_per_unit(self.final_activation, x)

    def _apply_hidden(self, index: int, x: Array, keys: PRNGKeyArray | None) -> Array:
        layer = self.layers[index]
        x = layer(x, **key_for(layer, None if keys is None else keys[index]))
        return _apply_per_unit(_at_layer(self.activation, index), x)

    def _scan_hidden(
        self, x: Shaped[Array, " width"], keys: PRNGKeyArray | None
    ) -> Shaped[Array, " width"]:
        later = jax.tree_util.tree_map(
            lambda leaf: leaf[1:] if is_array(leaf) else leaf, self.activation
        )
        arrays, static = partition((self.layers[1], later), is_array)
        key_data, key_of = as_data(keys)

        def body(x: Array, turn: Any) -> tuple[Array, None]:
            arrays, data = turn
            layer, activation = combine(arrays, static)
            return _apply_per_unit(activation, layer(x, **key_for(layer, key_of(data)))), None

        return jax.lax.scan(body, x, (arrays, key_data))[0]
