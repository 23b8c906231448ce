"""The multi-layer perceptron, sequences of layers, and an activation with a parameter."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, PRNGKeyArray, Shaped

from .._check_numbers import integer, whole_number
from .._module import Module, field
from .._pytree import combine, is_array, partition
from .._transforms import filter_vmap
from ._inputs import (
    as_data,
    check_input,
    check_layer,
    check_layer_list,
    describe,
    key_for,
    layer_at,
    number_of_features,
)
from ._linear import Linear
from ._parameters import Initializer
from ._stateful import NO_STATE, State, StatefulLayer, is_stateful
from ._threefry import split_key


def _identity(x: Any) -> Any:
    return x


def _one_per_unit(activation: Callable, shape: tuple[int, ...]) -> Callable:
    """`activation` with its arrays, if it has any, repeated so that each unit owns a copy."""

    def repeat(leaf: Any) -> Any:
        return jnp.broadcast_to(leaf, shape + jnp.shape(leaf)) if is_array(leaf) else leaf

    return jax.tree_util.tree_map(repeat, activation)


def _call_on_unit(name: str, activation: Callable, value: Shaped[Array, ""]) -> Array:
    try:
        return activation(value)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
        raise  # The activation needs a concrete number, for one unit or all units.
    except (IndexError, TypeError, ValueError) as error:
        raise ValueError(
            f"MLP: {name} is called on one unit at a time, on an array of shape (), and failed: "
            f"{error}\nIf it needs all units, as a softmax or a norm does, call it on the output "
            "instead: `jax.nn.softmax(mlp(x))`; or put layers and `nn.Lambda` in an "
            "`nn.Sequential`."
        ) from error


def _apply_per_unit(
    name: str, activation: Callable, x: Shaped[Array, " units"]
) -> Shaped[Array, " units"]:
    return filter_vmap(functools.partial(_call_on_unit, name))(activation, x)


class MLP(Module):
    """A multi-layer perceptron, also called a feed-forward network.

    An activation acts on each unit separately, on an array of shape `()`. Apply a function of all
    units, such as a softmax, to the output: as an activation a softmax raises an error, and
    `lambda x: x / x.sum()` returns ones. If the activation is a Module with arrays, every unit of
    every layer has its own copy of them: one learnt slope becomes `depth * width_size` slopes.

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

        **Raises:** `ValueError` for a negative or non-integer size or depth; `TypeError` for an
        activation that is not a function.
        """
        in_size = number_of_features(in_size, "in_size")
        out_size = number_of_features(out_size, "out_size")
        width_size = whole_number(width_size, "width_size", least=0)
        depth = whole_number(depth, "depth", least=0)
        make = functools.partial(Linear, dtype=dtype, weight_init=weight_init, bias_init=bias_init)
        keys: Any = jr.split(key, depth + 1) if scan else split_key(key, depth + 1)
        first, between, last = keys[0], keys[1:-1], keys[-1]
        if depth == 0:
            layers = [make(in_size, out_size, use_final_bias, key=first)]
        else:

            def hidden(key: PRNGKeyArray) -> Linear:
                return make(width_size, width_size, use_bias, key=key)

            layers = [make(in_size, width_size, use_bias, key=first)]
            layers += [filter_vmap(hidden)(between)] if scan else map(hidden, between)
            layers += [make(width_size, out_size, use_final_bias, key=last)]
        self.layers = tuple(layers)
        check_layer(activation, "MLP: activation")
        check_layer(final_activation, "MLP: final_activation")
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

        **Raises:** `ValueError` if `x` has another shape, or an activation fails on a single unit.
        """
        num_keys = self.depth + 1
        keys: Any = [None] * num_keys if key is None else jr.split(key, num_keys)
        if self.depth > 0:
            x = self._apply_hidden(0, x, keys[0])
        if self.scan and self.depth > 1:
            x = self._scan_hidden(x, None if key is None else keys[1:-1])
        else:
            for index in range(1, self.depth):
                x = self._apply_hidden(index, x, keys[index])
        x = self.layers[-1](x, **key_for(self.layers[-1], keys[-1]))
        if self.out_size == "scalar":
            return _call_on_unit("final_activation", self.final_activation, x)
        return _apply_per_unit("final_activation", self.final_activation, x)

    def _apply_hidden(self, index: int, x: Array, key: PRNGKeyArray | None) -> Array:
        x = self.layers[index](x, **key_for(self.layers[index], key))
        return _apply_per_unit("activation", layer_at(self.activation, index), x)

    def _scan_hidden(
        self, x: Shaped[Array, " width"], keys: PRNGKeyArray | None
    ) -> Shaped[Array, " width"]:
        later = layer_at(self.activation, slice(1, None))
        arrays, static = partition((self.layers[1], later), is_array)
        key_data, key_of = as_data(keys)

        def body(x: Array, turn: Any) -> tuple[Array, None]:
            arrays, data = turn
            layer, activation = combine(arrays, static)
            x = layer(x, **key_for(layer, key_of(data)))
            return _apply_per_unit("activation", activation, x), None

        return jax.lax.scan(body, x, (arrays, key_data))[0]


class GatedMLP(Module):
    """A feed-forward network with a gate: `down(activation(gate(x)) * up(x))`.

    Shazeer (2020), "GLU Variants Improve Transformer": SwiGLU with `jax.nn.silu`, the default, as
    in LLaMA; GeGLU with `jax.nn.gelu`.

    >>> import jax, jax.numpy as jnp
    >>> model = GatedMLP(in_size=4, hidden_size=8, key=jax.random.key(0))
    >>> model.gate_proj.weight.shape, model.down_proj.weight.shape
    ((8, 4), (4, 8))
    >>> model(jnp.ones(4)).shape
    (4,)
    """

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear
    activation: Callable

    def __init__(
        self,
        in_size: int,
        hidden_size: int,
        out_size: int | None = None,
        activation: Callable = jax.nn.silu,
        use_bias: bool = False,
        dtype: Any = None,
        *,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `in_size`: length of the input.
        - `hidden_size`: length of the gate.
        - `out_size`: length of the output; `in_size` if `None`.
        - `activation`: of the gate, called on its array of shape `(hidden_size,)`.
        - `use_bias`: whether the three layers have biases.
        - `dtype`: of all weights and biases; JAX's default float if `None`.
        - `weight_init`, `bias_init`: as for `Linear`, for each layer.
        - `key`: for the initial weights.

        **Raises:** `ValueError` for a negative or non-integer size; `TypeError` for an activation
        that is not a function.
        """
        in_size = whole_number(in_size, "in_size", least=0)
        hidden_size = whole_number(hidden_size, "hidden_size", least=0)
        out_size = in_size if out_size is None else whole_number(out_size, "out_size", least=0)
        check_layer(activation, "GatedMLP: activation")
        make = functools.partial(Linear, dtype=dtype, weight_init=weight_init, bias_init=bias_init)
        keys = split_key(key, 3)
        self.gate_proj = make(in_size, hidden_size, use_bias, key=keys[0])
        self.up_proj = make(in_size, hidden_size, use_bias, key=keys[1])
        self.down_proj = make(hidden_size, out_size, use_bias, key=keys[2])
        self.activation = activation

    def __call__(
        self, x: Shaped[Array, " in_size"], *, key: PRNGKeyArray | None = None
    ) -> Shaped[Array, " out_size"]:
        """**Arguments:**

        - `x`: shape `(in_size,)`.
        - `key`: split into one key for each of the three layers, which a `Linear` ignores.

        **Returns:** shape `(out_size,)`.

        **Raises:** `ValueError` if `x` has another shape.
        """
        layers = self.gate_proj, self.up_proj, self.down_proj
        keys = [None] * 3 if key is None else jr.split(key, 3)
        options = [key_for(layer, each) for layer, each in zip(layers, keys, strict=True)]
        gate = self.activation(self.gate_proj(x, **options[0]))
        return self.down_proj(gate * self.up_proj(x, **options[1]), **options[2])


# --- Layers one after another, and functions as layers ---


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

        **Raises:** `TypeError` for a layer in the place of the list, and for what is not a layer.
        """
        check_layer_list("Sequential", layers)
        self.layers = tuple(layers)
        for index, layer in enumerate(self.layers):
            check_layer(layer, f"Sequential: layers[{index}]")

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

    def __check_init__(self) -> None:
        if isinstance(self.fn, str):
            check_layer(self.fn, "Lambda")

    def __call__(self, x: Any, *, key: PRNGKeyArray | None = None) -> Array:
        """**Returns:** `fn(x)`. `key` is ignored."""
        del key
        return self.fn(x)


# --- An activation with a learnt slope ---


class PReLU(Module):
    """The parametric rectifier: `x` where positive, `negative_slope * x` elsewhere.

    He, Zhang, Ren & Sun (2015), "Delving Deep into Rectifiers: Surpassing Human-Level Performance
    on ImageNet Classification".

    >>> import jax.numpy as jnp
    >>> PReLU(0.25)(jnp.array([-4.0, 2.0])).tolist()
    [-1.0, 2.0]
    """

    negative_slope: Shaped[Array, "*channels"]

    def __init__(self, init_alpha: float | Shaped[Array, "*channels"] | None = 0.25):
        """**Arguments:**

        - `init_alpha`: the initial slope: a number for one slope, an array for one along each of
          the last axes.

        **Raises:** `ValueError` if it is neither.
        """
        if init_alpha is None:
            raise ValueError("PReLU expected a number or an array for `init_alpha`, got None.")
        self.negative_slope = jnp.asarray(init_alpha)

    def __call__(
        self, x: Shaped[Array, "*shape"], *, key: PRNGKeyArray | None = None
    ) -> Shaped[Array, "*shape"]:
        """**Arguments:**

        - `x`: any shape that ends in that of `negative_slope`.
        - `key`: ignored; layers share one signature.

        **Returns:** the shape and dtype of `x`; floats if `x` holds integers.

        **Raises:** `ValueError` if `x` ends in another shape.
        """
        del key
        check_input(self, x, ("...", *self.negative_slope.shape))
        x = jnp.asarray(x)
        x = x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(float)
        slope = jnp.broadcast_to(self.negative_slope, x.shape).astype(x.dtype)
        return jnp.where(x >= 0, x, slope * x)
