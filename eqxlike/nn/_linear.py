"""Linear layers, fused linear layers, the identity and dropout."""

import itertools
import warnings
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, PRNGKeyArray, Shaped

from .._dtypes import explain_key
from .._module import Module, field, stored_fields
from .._pytree import is_array
from .._traceback import stacklevel_of_user
from ._inputs import (
    check_input,
    check_not_stacked,
    describe,
    feature_count,
    feature_shape,
    number_of_features,
)
from ._parameters import Initializer, draw_linear

T = TypeVar("T")


class Linear(Module):
    """A linear layer: `weight @ x + bias`.

    Weight and bias are initialised from the uniform distribution on `(-1/sqrt(in_features),
    1/sqrt(in_features))`, as in PyTorch. LeCun, Bottou, Orr & Müller (1998), "Efficient BackProp".

    >>> import jax, jax.numpy as jnp
    >>> layer = Linear(3, 4, key=jax.random.key(0))
    >>> layer(jnp.ones(3)).shape
    (4,)
    >>> jax.vmap(layer)(jnp.ones((5, 3))).shape
    (5, 4)
    """

    weight: Shaped[Array, "out_size in_size"]
    bias: Shaped[Array, " out_size"] | None
    in_features: int | Literal["scalar"] = field(static=True)
    out_features: int | Literal["scalar"] = field(static=True)
    use_bias: bool = field(static=True)

    def __init__(
        self,
        in_features: int | Literal["scalar"],
        out_features: int | Literal["scalar"],
        use_bias: bool = True,
        dtype: Any = None,
        *,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `in_features`: length of the input; `"scalar"` for an input of shape `()`.
        - `out_features`: length of the output; `"scalar"` for an output of shape `()`.
        - `use_bias`: whether to add a bias.
        - `dtype`: dtype of weight and bias, floating or complex; JAX's default float if `None`.
        - `weight_init`, `bias_init`: initializers that replace the uniform distribution, from
          `jax.nn.initializers` or any function `init(key, shape, dtype)`. `weight_init` is called
          with the shape `(in_size, out_size)`, because JAX's initializers compute the fan-in from
          this shape.
        - `key`: random key for the initial weight and bias.

        **Raises:** `ValueError` for a negative or non-integer size; `TypeError` for an integer
        dtype.
        """
        self.in_features = number_of_features(in_features, "in_features")
        self.out_features = number_of_features(out_features, "out_features")
        self.use_bias = use_bias
        shape = feature_count(self.out_features), feature_count(self.in_features)
        self.weight, self.bias = draw_linear(key, shape, dtype, use_bias, weight_init, bias_init)

    def __call__(
        self, x: Shaped[Array, " in_features"], *, key: PRNGKeyArray | None = None
    ) -> Shaped[Array, " out_features"]:
        """**Arguments:**

        - `x`: shape `(in_features,)`, or `()` if `in_features="scalar"`.
        - `key`: ignored; accepted so that all layers have the same signature.

        **Returns:** shape `(out_features,)`, or `()` if `out_features="scalar"`.

        **Raises:** `ValueError` if `x` has another shape.
        """
        check_input(self, x, feature_shape(self.in_features))
        check_not_stacked(self, self.weight, 2)
        if self.in_features == "scalar":
            x = jnp.reshape(x, (1,))
        y = apply_weight(self.weight, x)
        if self.bias is not None:
            y = y + self.bias
        return jnp.squeeze(y) if self.out_features == "scalar" else y


def apply_weight(weight: Array, x: Array) -> Array:
    """`weight @ x`, written so that under `vmap` the features of an example are contiguous.

    Under `vmap`, a plain `weight @ x` makes the examples contiguous, and XLA transposes the result
    and its gradient. These transposes made the training step of a transformer (6 blocks of 256
    features) and an LSTM loop (batch of 16, 64 hidden units) 1.2 times as slow.
    """
    # Two cases use `@`. Sparse and quantised matrices are not arrays and define their own `@`. With
    # a single output feature, contiguity does not matter, and `tensordot` can be slower. In Markov
    # chains, where the weights are batched too, `tensordot` made a logistic regression take twice
    # the time.
    is_plain = isinstance(weight, jax.Array | np.ndarray) and weight.shape[0] > 1
    return jnp.tensordot(x, weight, axes=(0, 1)) if is_plain else weight @ x


class FusedLinear(Module):
    """Several linear layers that get the same input, computed as one matrix product.

    The weights are concatenated along the output axis. A layer with gates can use a `FusedLinear`
    directly: `gate, value = self.fused(x)`. `nn.fuse` replaces layers of an existing model by
    `FusedLinear`s.

    >>> import jax, jax.numpy as jnp
    >>> keys = jax.random.split(jax.random.key(0))
    >>> gate, value = (Linear(3, size, key=key) for size, key in zip((4, 5), keys))
    >>> fused = FusedLinear([gate, value])
    >>> [y.shape for y in fused(jnp.ones(3))], fused.weight.shape
    ([(4,), (5,)], (9, 3))
    >>> fused.unfuse() == (gate, value)
    True
    """

    weight: Shaped[Array, "sum_of_out in_size"]
    bias: Shaped[Array, " sum_of_out"] | None
    in_features: int = field(static=True)
    out_features: tuple[int, ...] = field(static=True)
    use_bias: bool = field(static=True)

    def __init__(self, layers: Sequence[Linear]):
        """**Arguments:**

        - `layers`: `Linear` layers with the same `in_features` and dtype, all with a bias or all
          without a bias. The arrays of stacked layers must have the same leading axes.

        **Raises:**

        - `ValueError` if `layers` is empty.
        - `ValueError` if a layer does not match the first layer.
        - `TypeError` if a layer is not a `Linear`.
        """
        sizes: list[int] = []
        if not layers:
            raise ValueError("FusedLinear needs at least one layer.")
        for index, layer in enumerate(layers):
            if not isinstance(layer, Linear):
                raise TypeError(
                    f"FusedLinear takes nn.Linear layers; layers[{index}] is a "
                    f"{type(layer).__name__}."
                )
            first, other = _shared_properties(layers[0]), _shared_properties(layer)
            if first != other:
                raise ValueError(
                    f"FusedLinear: layers[0] has {first}, and layers[{index}] has {other}. Fused "
                    "layers need the same input size, dtype and leading axes, and either all or "
                    "none have a bias."
                )
            if not isinstance(layer.in_features, int) or not isinstance(layer.out_features, int):
                raise ValueError(
                    f"FusedLinear: layers[{index}] takes or returns a scalar; expected vectors."
                )
            sizes.append(layer.out_features)
        self.weight = jnp.concatenate([layer.weight for layer in layers], axis=-2)
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self.bias = jnp.concatenate(biases, axis=-1) if biases else None
        self.in_features = self.weight.shape[-1]
        self.out_features = tuple(sizes)
        self.use_bias = layers[0].use_bias

    def __call__(
        self, x: Shaped[Array, " in_features"], *, key: PRNGKeyArray | None = None
    ) -> tuple[Array, ...]:
        """**Arguments:** as for `Linear`.

        **Returns:** a tuple with the output of each layer, shape `(out_features[i],)`.

        **Raises:** `ValueError` if `x` has another shape.
        """
        check_input(self, x, feature_shape(self.in_features))
        check_not_stacked(self, self.weight, 2)
        y = apply_weight(self.weight, x)
        if self.bias is not None:
            y = y + self.bias
        return tuple(jnp.split(y, self._starts[1:-1]))

    @property
    def _starts(self) -> list[int]:
        return [0, *itertools.accumulate(self.out_features)]

    def between(self, start: int, stop: int) -> "FusedLinear":
        """**Returns:** a `FusedLinear` of the layers `start` to `stop - 1`."""
        return self._rows(FusedLinear, start, stop, out_features=self.out_features[start:stop])

    def unfuse(self) -> tuple[Linear, ...]:
        """**Returns:** the separate layers, with bitwise equal weights."""
        return tuple(
            self._rows(Linear, index, index + 1, out_features=out_features)
            for index, out_features in enumerate(self.out_features)
        )

    def _rows(self, cls: type, start: int, stop: int, **fields: Any) -> Any:
        rows = slice(self._starts[start], self._starts[stop])
        # `Linear.__init__` is not called: it needs a key to draw weights, and cannot make stacked
        # weights.
        new: Any = object.__new__(cls)
        stored_fields(new).update(
            weight=self.weight[..., rows, :],
            bias=None if self.bias is None else self.bias[..., rows],
            in_features=self.in_features,
            use_bias=self.use_bias,
            **fields,
        )
        return new


def _shared_properties(layer: Linear) -> str:
    """The properties that fused layers must share."""
    bias, axes = "a bias" if layer.use_bias else "no bias", layer.weight.shape[:-2]
    stacked = f", leading axes {axes}" if axes else ""
    return f"{layer.in_features} inputs, {bias}{stacked} and a weight of {layer.weight.dtype}"


class Identity(Module):
    """Returns its input unchanged.

    >>> Identity(64, use_bias=False)("anything")
    'anything'
    """

    def __init__(self, *args: Any, **kwargs: Any):
        """Accepts and ignores any arguments, so that `Identity` can replace any layer."""

    def __call__(self, x: T, *, key: PRNGKeyArray | None = None) -> T:
        """**Returns:** `x`, of any type, unchanged. `key` is ignored."""
        return x


# --- Dropout ---


class Dropout(Module):
    """Sets each entry to zero with probability `p` and divides the other entries by `1 - p`.

    In inference mode the layer returns its input; `nn.inference_mode` switches a whole model.
    Srivastava, Hinton, Krizhevsky, Sutskever & Salakhutdinov (2014), "Dropout: A simple way to
    prevent neural networks from overfitting".

    >>> import jax, jax.numpy as jnp
    >>> layer = Dropout(p=0.5)
    >>> kept = layer(jnp.ones(1000), key=jax.random.key(0)) > 0
    >>> bool(400 < kept.sum() < 600)
    True
    >>> layer(jnp.ones(2), inference=True).tolist()
    [1.0, 1.0]
    """

    p: float
    inference: bool

    def __init__(
        self, p: float = 0.5, inference: bool = False, *, deterministic: bool | None = None
    ):
        """**Arguments:**

        - `p`: probability of dropping an entry, in [0, 1]; a number, or a floating-point array of
          shape `()`.
        - `inference`: whether to return inputs unchanged.
        - `deterministic`: deprecated name of `inference`.

        **Raises:** `ValueError` if `p` is outside [0, 1]; `TypeError` if `p` is not a number.
        """
        if deterministic is not None:
            inference = warn_deterministic("Dropout", deterministic)
        _check_probability(p)
        self.p = p
        self.inference = inference

    def __call__(
        self,
        x: Shaped[Array, "*shape"],
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
    ) -> Shaped[Array, "*shape"]:
        """**Arguments:**

        - `x`: any shape.
        - `key`: random key that determines the dropped entries. It is required unless the layer is
          in inference mode or `p == 0`.
        - `inference`: overrides `self.inference` for this call.
        - `deterministic`: deprecated name of `inference`.

        **Returns:** an array with the shape of `x`. The array has the dtype of `x` if this dtype is
        floating or complex.

        **Raises:** `RuntimeError` if a key is required and `key` is `None`.
        """
        if deterministic is not None:
            inference = warn_deterministic("Dropout", deterministic)
        if inference is None:
            inference = self.inference
        p, is_number = self.p, isinstance(self.p, (int, float))
        if inference or (is_number and p == 0):
            return x
        if key is None:
            raise RuntimeError(
                f"{describe(self)} needs a key outside inference mode: write `layer(x, key=key)`, "
                "or switch the model with `nn.inference_mode(model)`."
            )
        if is_number and p == 1:
            # For `p == 1`, `x / (1 - p)` would divide by zero, and the gradient would be NaN.
            return jnp.zeros_like(x)
        keep: Any = 1 - p if is_number else 1 - jax.lax.stop_gradient(p)
        try:
            mask = jr.bernoulli(key, keep, jnp.shape(x))
        except (TypeError, ValueError) as error:
            explain_key(error, key, "Dropout")
            raise
        if not is_number and jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            keep = jnp.asarray(keep, jnp.result_type(x))
        return jnp.where(mask, x / keep, 0)


def warn_deterministic(layer_name: str, deterministic: bool) -> bool:
    """Warns that `deterministic` is deprecated, and returns its value for use as `inference`."""
    warnings.warn(
        f"{layer_name}'s `deterministic=` is deprecated: use `inference=`.",
        DeprecationWarning,
        stacklevel=stacklevel_of_user(),
    )
    return deterministic


def _check_probability(p: Any) -> None:
    is_floating = is_array(p) and jnp.issubdtype(p.dtype, jnp.floating)
    is_number = isinstance(p, (int, float)) and not isinstance(p, bool)
    if not (is_floating or is_number):
        raise TypeError(
            "Dropout expects a probability p in [0, 1], as a number or a floating-point array; got "
            f"{p!r}, of type {type(p).__name__}."
        )
    # A JAX array is not checked, because it may be traced or on another device.
    if isinstance(p, (int, float, np.floating)) and not 0 <= p <= 1:
        raise ValueError(f"Dropout expects a probability p in [0, 1], got {p!r}.")
