"""Multi-layer perceptrons, sequences and branches of layers, and functions as layers."""

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
    as_layers,
    check_input,
    check_instance,
    check_layer,
    describe,
    feature_shape,
    key_for,
    layer_at,
    missing_state,
    number_of_features,
)
from ._linear import Linear
from ._parameters import Initializer, split_key
from ._stateful import NO_STATE, State, StatefulLayer, is_stateful


def _identity(x: Any) -> Any:
    return x


def _one_per_unit(activation: Callable, shape: tuple[int, ...]) -> Callable:
    """`activation` with its arrays repeated, so that each unit has its own copy."""

    def repeat(leaf: Any) -> Any:
        return jnp.broadcast_to(leaf, shape + jnp.shape(leaf)) if is_array(leaf) else leaf

    return jax.tree_util.tree_map(repeat, activation)


def _call_on_unit(name: str, activation: Callable, value: Shaped[Array, ""]) -> Array:
    try:
        return activation(value)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
        raise  # The activation needs concrete values: the shape is not the cause of this error.
    except (IndexError, TypeError, ValueError) as error:
        raise ValueError(
            f"MLP: {name} is called on one unit at a time, on an array of shape (), and failed: "
            f"{error}\nIf it needs all units, like a softmax or a norm, apply it to the output: "
            "`jax.nn.softmax(mlp(x))`; or use `nn.Sequential` with `nn.Lambda`."
        ) from error


def _apply_per_unit(
    name: str, activation: Callable, x: Shaped[Array, " units"]
) -> Shaped[Array, " units"]:
    return filter_vmap(functools.partial(_call_on_unit, name))(activation, x)


class MLP(Module):
    """A multi-layer perceptron, also called a feed-forward network.

    Activations are called on one unit at a time, on an array of shape `()`. A function of all
    units, such as a softmax, does not work as an activation: apply it to the output instead. A
    softmax as activation raises an error, and `lambda x: x / x.sum()` returns ones. If the
    activation is a Module with arrays, each unit of each layer has its own copy of these arrays:
    one learnt slope becomes `depth * width_size` slopes.

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
        - `depth`: number of hidden layers. With 0, the model is one `Linear(in_size, out_size)`.
        - `activation`: function that is applied to each unit after each hidden layer.
        - `final_activation`: function that is applied to each unit after the last layer.
        - `use_bias`: whether the hidden layers add a bias.
        - `use_final_bias`: whether the last layer adds a bias.
        - `dtype`: dtype of all weights and biases; JAX's default float if `None`.
        - `scan`: whether to store the `depth - 1` layers from hidden to hidden units as one
          `Linear`, whose arrays have a leading axis. `jax.lax.scan` applies these layers. Compile
          time then does not grow with depth.
        - `weight_init`, `bias_init`: initializers of each layer, as for `Linear`.
        - `key`: random key for the initial weights. The weights do not depend on `scan`.

        **Raises:** `ValueError` for a negative or non-integer size or depth; `TypeError` for an
        activation that is not a function.
        """
        self.in_size = in_size = number_of_features(in_size, "in_size")
        self.out_size = out_size = number_of_features(out_size, "out_size")
        self.width_size = width_size = whole_number(width_size, "width_size", least=0)
        self.depth = depth = whole_number(depth, "depth", least=0)
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
        self.final_activation = _one_per_unit(final_activation, feature_shape(out_size))
        self.use_bias = use_bias
        self.use_final_bias = use_final_bias
        self.scan = scan

    def __call__(
        self, x: Shaped[Array, " in_size"], *, key: PRNGKeyArray | None = None
    ) -> Shaped[Array, " out_size"]:
        """**Arguments:**

        - `x`: shape `(in_size,)`, or `()` if `in_size="scalar"`.
        - `key`: random key, split into one key for each layer. `Linear` ignores its key, but a
          layer that replaces a `Linear`, such as a `BayesianLinear`, may need a key.

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
        activations = layer_at(self.activation, slice(1, None))
        arrays, static = partition((self.layers[1], activations), is_array)
        key_data, key_of = as_data(keys)

        def body(x: Array, xs: Any) -> tuple[Array, None]:
            arrays, data = xs
            layer, activation = combine(arrays, static)
            x = layer(x, **key_for(layer, key_of(data)))
            return _apply_per_unit("activation", activation, x), None

        return jax.lax.scan(body, x, (arrays, key_data))[0]


class GatedMLP(Module):
    """A gated feed-forward network: `down(activation(gate(x)) * up(x))`.

    With `jax.nn.silu`, the default, the layer is SwiGLU, as in LLaMA. With `jax.nn.gelu` it is
    GeGLU. Shazeer (2020), "GLU Variants Improve Transformer".

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
        - `hidden_size`: number of hidden units.
        - `out_size`: length of the output; `in_size` if `None`.
        - `activation`: function that is applied to the gate, an array of shape `(hidden_size,)`.
        - `use_bias`: whether the three layers have biases.
        - `dtype`: dtype of all weights and biases; JAX's default float if `None`.
        - `weight_init`, `bias_init`: initializers of each layer, as for `Linear`.
        - `key`: random key for the initial weights.

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
        - `key`: random key, split into one key for each of the three layers; `Linear` ignores its
          key.

        **Returns:** shape `(out_size,)`.

        **Raises:** `ValueError` if `x` has another shape.
        """
        layers = self.gate_proj, self.up_proj, self.down_proj
        keys = [None] * 3 if key is None else jr.split(key, 3)
        options = [key_for(layer, each) for layer, each in zip(layers, keys, strict=True)]
        gate = self.activation(self.gate_proj(x, **options[0]))
        return self.down_proj(gate * self.up_proj(x, **options[1]), **options[2])


# --- Sequences of layers, and functions as layers ---


class Sequential(StatefulLayer):
    """Applies layers one after another. Supports indexing, slicing, iteration and `len`.

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

        - `layers`: callables `layer(x, *, key)`; stateful layers are called as `layer(x,
          state=state, key=key)`. Wrap plain functions in `Lambda` if you call the `Sequential` with
          a key.

        **Raises:** `TypeError` if `layers` is a single layer, or contains something that is not a
        layer.
        """
        self.layers = as_layers(layers, "Sequential", "layers")

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
        - `state`: the `State` of the model, which is passed to every stateful layer. The state is
          required if a layer is stateful.
        - `key`: random key, split into one key for each layer. If `key` is `None`, layers that take
          a key get `None`.

        **Returns:** the output of the last layer; `(output, state)` if `state` is passed.

        **Raises:** `TypeError` if a layer is stateful and `state` is missing.
        """
        keys = [None] * len(self.layers) if key is None else jr.split(key, len(self.layers))
        for index, (layer, layer_key) in enumerate(zip(self.layers, keys, strict=True)):
            if not is_stateful(layer):
                x = layer(x, **key_for(layer, layer_key))
            elif state is NO_STATE:
                raise missing_state(self, f"layers[{index}]", layer)
            else:
                x, state = layer(x, state=state, **key_for(layer, layer_key))
        return x if state is NO_STATE else (x, state)

    @overload
    def __getitem__(self, index: int) -> Callable: ...

    @overload
    def __getitem__(self, index: slice) -> "Sequential": ...

    def __getitem__(self, index: int | slice) -> "Callable | Sequential":
        """The layer at an integer index, or a `Sequential` of the layers in a slice."""
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
    """Wraps a function as a layer: `Lambda(fn)(x, key=key)` returns `fn(x)`.

    `fn` is part of the model's tree, so if `fn` is a Module, its arrays are trained.

    >>> Lambda(abs)(-3, key=None)
    3
    """

    fn: Callable[[Any], Any]

    def __check_init__(self) -> None:
        if isinstance(self.fn, str):
            check_layer(self.fn, "Lambda")

    def __call__(self, x: Any, *, key: PRNGKeyArray | None = None) -> Array:
        """**Returns:** `fn(x)`. `key` is ignored."""
        return self.fn(x)


# --- An activation with a learnt slope ---


class PReLU(Module):
    """The parametric ReLU: `x` where `x >= 0`, otherwise `negative_slope * x`.

    He, Zhang, Ren & Sun (2015), "Delving Deep into Rectifiers: Surpassing Human-Level Performance
    on ImageNet Classification".

    >>> import jax.numpy as jnp
    >>> PReLU(0.25)(jnp.array([-4.0, 2.0])).tolist()
    [-1.0, 2.0]
    """

    negative_slope: Shaped[Array, "*channels"]

    def __init__(self, init_alpha: float | Shaped[Array, "*channels"] | None = 0.25):
        """**Arguments:**

        - `init_alpha`: initial slope; a number, or an array that broadcasts along the last axes of
          the input.

        **Raises:** `ValueError` if `init_alpha` is `None`.
        """
        if init_alpha is None:
            raise ValueError("PReLU expected a number or an array for `init_alpha`, got None.")
        self.negative_slope = jnp.asarray(init_alpha)

    def __call__(
        self, x: Shaped[Array, "*shape"], *, key: PRNGKeyArray | None = None
    ) -> Shaped[Array, "*shape"]:
        """**Arguments:**

        - `x`: shape `(..., *negative_slope.shape)`.
        - `key`: ignored; accepted so that all layers have the same signature.

        **Returns:** an array with the shape and dtype of `x`; if `x` has integers, an array of
        floats.

        **Raises:** `ValueError` if `x` has another shape.
        """
        check_input(self, x, ("...", *self.negative_slope.shape))
        x = jnp.asarray(x)
        x = x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(float)
        slope = jnp.broadcast_to(self.negative_slope, x.shape).astype(x.dtype)
        return jnp.where(x >= 0, x, slope * x)


# --- Parallel branches ---


class Parallel(StatefulLayer):
    """Applies several branches to the same input and joins their outputs. Supports indexing and
    `len`.

    One example is a residual block, in which one branch is an `Identity`. Another example is the
    block of Szegedy et al. (2015), "Going Deeper with Convolutions". The branches are called one
    after another. To compute branches of equal structure in one batch, use `filter_vmap` over
    stacked layers. To compute `Linear` branches as one matrix product, use `FusedLinear`.

    >>> import jax, jax.numpy as jnp
    >>> from eqxlike import nn
    >>> keys = jax.random.split(jax.random.key(0))
    >>> first, second = nn.Linear(8, 2, key=keys[0]), nn.Linear(8, 8, key=keys[1])
    >>> x = jnp.ones(8)
    >>> nn.Parallel([first, second], "concatenate")(x).shape
    (10,)
    >>> nn.Parallel([nn.Identity(), second])(x).shape
    (8,)
    >>> nn.Parallel([nn.Identity(), second], jnp.stack)(x).shape
    (2, 8)
    """

    branches: tuple[Callable, ...]
    join: Callable[[tuple[Any, ...]], Any]

    def __init__(
        self, branches: Sequence[Callable], join: str | Callable[[tuple[Any, ...]], Any] = "sum"
    ):
        """**Arguments:**

        - `branches`: callables `branch(x, *, key)`; stateful branches are called as `branch(x,
          state=state, key=key)`. Wrap plain functions in `Lambda` if you call the `Parallel` with a
          key.
        - `join`: `"sum"`, `"concatenate"` (along the first axis: features of vectors, channels of
          images), or a function of the tuple of outputs. If outputs are pytrees, `"sum"` and
          `"concatenate"` join them leaf by leaf. If `join` is a Module, its arrays are trained.

        **Raises:**

        - `ValueError` if `branches` is empty.
        - `ValueError` if `join` is unknown.
        - `TypeError` if a branch cannot be called.
        """
        self.branches = as_layers(branches, "Parallel", "branches")
        if not self.branches:
            raise ValueError("Parallel needs at least one branch.")
        if isinstance(join, type) and issubclass(join, Module):
            check_instance(join, "Parallel: join")
        words = {"sum": _sum, "concatenate": _concatenate}
        known: Any = words.get(join) if isinstance(join, str) else join
        if not callable(known):
            raise ValueError(
                f"join must be 'sum', 'concatenate' or a function of the tuple of the branches' "
                f"outputs, got {join!r}."
            )
        self.join = known

    def is_stateful(self) -> bool:
        """**Returns:** whether one of the branches is stateful."""
        return any(map(is_stateful, self.branches))

    def __call__(
        self, x: Any, *args: Any, state: Any = NO_STATE, key: PRNGKeyArray | None = None
    ) -> Any:
        """**Arguments:**

        - `x`: the input of every branch.
        - `*args`: further arguments for every branch, such as a mask.
        - `state`: the `State` of the model, which is passed to every stateful branch. The state is
          required if a branch is stateful, and may also be passed as the first of `args`.
        - `key`: random key, split into one key for each branch. If `key` is `None`, branches that
          take a key get `None`.

        **Returns:** the joined outputs; `(outputs, state)` if `state` is passed.

        **Raises:** `TypeError` if a branch is stateful and `state` is missing. Errors that `join`
        raises get a note that names this layer.
        """
        if state is NO_STATE and args and isinstance(args[0], State):
            state, args = args[0], args[1:]
        keys = [None] * len(self) if key is None else jr.split(key, len(self))
        outputs = []
        for index, (branch, branch_key) in enumerate(zip(self.branches, keys, strict=True)):
            options = key_for(branch, branch_key)
            if not is_stateful(branch):
                outputs.append(branch(x, *args, **options))
            elif isinstance(state, State):
                output, state = branch(x, *args, state=state, **options)
                outputs.append(output)
            else:
                raise missing_state(self, f"branches[{index}]", branch)
        try:
            joined = self.join(tuple(outputs))
        except Exception as error:
            error.add_note(f"Raised while joining the outputs of {describe(self)}.")
            raise
        return joined if state is NO_STATE else (joined, state)

    def __getitem__(self, index: int) -> Callable:
        return self.branches[index]

    def __len__(self) -> int:
        return len(self.branches)


def _sum(outputs: tuple[Any, ...]) -> Any:
    return functools.reduce(functools.partial(jax.tree.map, _add), outputs)


def _add(left: Any, right: Any) -> Any:
    if jnp.shape(left) != jnp.shape(right):
        raise ValueError(
            f"join='sum' expected outputs of one shape, got {jnp.shape(left)} and "
            f"{jnp.shape(right)}."
        )
    return left + right


def _concatenate(outputs: tuple[Any, ...]) -> Any:
    return jax.tree.map(lambda *each: jnp.concatenate(each), *outputs)
