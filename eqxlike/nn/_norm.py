"""Normalisation of single examples: `LayerNorm`, `RMSNorm`, `GroupNorm`."""

import abc
import functools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from .._check_numbers import integer, real_number, whole_number
from .._dtypes import at_least_float32, parameter_dtype
from .._module import Module, field
from .._traceback import stacklevel_of_user
from ._inputs import check_input, check_not_stacked
from ._parameters import Initializer, draw_affine
from ._stateful import NO_STATE


class _Norm(Module):
    """The base of `LayerNorm` and `RMSNorm`."""

    # `nn.Policy` does not cast the layer's parameters.
    keeps_precision: ClassVar[bool] = True
    shape: tuple[int, ...] = field(static=True)
    eps: float = field(static=True)
    use_weight: bool = field(static=True)
    use_bias: bool = field(static=True)
    weight: Float[Array, "*shape"] | None
    bias: Float[Array, "*shape"] | None

    @overload
    def __call__(
        self, x: Float[Array, "*shape"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "*shape"]: ...
    @overload
    def __call__(
        self, x: Float[Array, "*shape"], state: Any, *, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, "*shape"], Any]: ...
    def __call__(
        self, x: Float[Array, "*shape"], state: Any = NO_STATE, *, key: PRNGKeyArray | None = None
    ) -> Any:
        """**Arguments:**

        - `x`: shape `self.shape`.
        - `state`: returned unchanged, so that the layer can replace a `BatchNorm`.
        - `key`: ignored; accepted so that all layers have the same signature.

        **Returns:** an array with the shape and dtype of `x`; `(array, state)` if `state` is
        passed.

        **Raises:** `ValueError` if `x` has another shape.
        """
        del key
        check_input(self, x, self.shape)
        check_not_stacked(self, self.weight, len(self.shape))
        normalised = self._normalise(x.astype(at_least_float32(x.dtype)))
        out = _affine(normalised, self.weight, self.bias).astype(x.dtype)
        return out if state is NO_STATE else (out, state)

    @abc.abstractmethod
    def _normalise(self, x: Array) -> Array: ...


class LayerNorm(_Norm):
    """Normalises one example to mean 0 and variance 1, then scales and shifts each entry.

        (x - mean) / sqrt(variance + eps) * weight + bias

    Mean and variance are over all axes, and are computed in at least float32. For a batch use
    `jax.vmap(layer)`. Ba, Kiros & Hinton (2016), "Layer Normalization".

    >>> import jax.numpy as jnp
    >>> print(LayerNorm(4)(jnp.array([1.0, 1.0, 3.0, 3.0])).round(2))
    [-1. -1.  1.  1.]
    """

    def __init__(
        self,
        shape: int | Sequence[int],
        eps: float = 1e-5,
        use_weight: bool = True,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        elementwise_affine: bool | None = None,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        key: PRNGKeyArray | None = None,
    ):
        """**Arguments:**

        - `shape`: shape of the input; an integer means one axis.
        - `eps`: added to the variance to avoid division by zero.
        - `use_weight`: whether to scale each entry.
        - `use_bias`: whether to shift each entry.
        - `dtype`: dtype of weight and bias; JAX's default float if `None`.
        - `elementwise_affine`: deprecated; sets both `use_weight` and `use_bias`.
        - `weight_init`, `bias_init`: initializers, for example from `jax.nn.initializers`; ones and
          zeros by default.
        - `key`: random key for `weight_init` and `bias_init`.

        **Raises:** `ValueError` if a size in `shape` is not an integer of at least 0.
        """
        if elementwise_affine is not None:
            warnings.warn(
                "LayerNorm's `elementwise_affine=` is deprecated: use `use_weight=` and "
                "`use_bias=`.",
                stacklevel=stacklevel_of_user(),
            )
            use_weight = use_bias = elementwise_affine
        self.shape = _sizes(shape)
        self.eps = real_number(eps, "eps")
        self.use_weight = use_weight
        self.use_bias = use_bias
        self.weight, self.bias = draw_affine(
            self.shape, parameter_dtype(dtype), use_weight, use_bias, weight_init, bias_init, key
        )

    def _normalise(self, x: Array) -> Array:
        return _standardise(x, self.eps)


class RMSNorm(_Norm):
    """Scales one example to a mean square of 1, then scales and shifts each entry.

        x / sqrt(mean(x**2) + eps) * weight + bias

    The mean is over all axes, and is computed in at least float32. Zhang & Sennrich (2019), "Root
    Mean Square Layer Normalization".

    >>> import jax.numpy as jnp
    >>> print(RMSNorm(2)(jnp.array([3.0, 3.0])).round(2))
    [1. 1.]
    """

    def __init__(
        self,
        shape: int | Sequence[int],
        eps: float = 1e-5,
        use_weight: bool = True,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        key: PRNGKeyArray | None = None,
    ):
        """The arguments and errors are as for `LayerNorm`."""
        self.shape = _sizes(shape)
        self.eps = real_number(eps, "eps")
        self.use_weight = use_weight
        self.use_bias = use_bias
        self.weight, self.bias = draw_affine(
            self.shape, parameter_dtype(dtype), use_weight, use_bias, weight_init, bias_init, key
        )

    def _normalise(self, x: Array) -> Array:
        return x * jax.lax.rsqrt(jnp.mean(x**2) + self.eps)


class GroupNorm(Module):
    """Normalises each group of channels separately, then scales and shifts each channel.

    `groups=channels` is instance normalisation; `groups=1` is layer normalisation with one scale
    for each channel. The layer computes in at least float32. Wu & He (2018), "Group Normalization".

    >>> import jax.numpy as jnp
    >>> layer = GroupNorm(groups=2, channels=4)
    >>> layer(jnp.ones((4, 8, 8))).shape
    (4, 8, 8)
    """

    keeps_precision: ClassVar[bool] = True
    groups: int = field(static=True)
    channels: int | None = field(static=True)
    eps: float = field(static=True)
    channelwise_affine: bool = field(static=True)
    weight: Float[Array, " channels"] | None
    bias: Float[Array, " channels"] | None

    def __init__(
        self,
        groups: int,
        channels: int | None = None,
        eps: float = 1e-5,
        channelwise_affine: bool = True,
        dtype: Any = None,
        *,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        key: PRNGKeyArray | None = None,
    ):
        """**Arguments:**

        - `groups`: number of groups; must divide the number of channels.
        - `channels`: length of the first axis of the input; may be `None` if
          `channelwise_affine=False`.
        - `eps`: added to the variance to avoid division by zero.
        - `channelwise_affine`: whether to scale and shift each channel.
        - `dtype`: dtype of weight and bias; JAX's default float if `None`.
        - `weight_init`, `bias_init`: initializers, for example from `jax.nn.initializers`; ones and
          zeros by default.
        - `key`: random key for `weight_init` and `bias_init`.

        **Raises:** `ValueError` if `channels` is missing, or if `groups` does not divide
        `channels`.
        """
        groups = whole_number(groups, "groups")
        channels = None if channels is None else whole_number(channels, "channels", least=0)
        if channels is not None and channels % groups != 0:
            raise ValueError(
                f"The number of groups must divide the number of channels: got groups={groups} and "
                f"channels={channels}."
            )
        if channels is None and channelwise_affine:
            raise ValueError("GroupNorm needs `channels` unless `channelwise_affine=False`.")
        self.groups = groups
        self.channels = channels
        self.eps = real_number(eps, "eps")
        self.channelwise_affine = channelwise_affine
        use = channelwise_affine
        self.weight, self.bias = draw_affine(
            (channels or 0,), parameter_dtype(dtype), use, use, weight_init, bias_init, key
        )

    @overload
    def __call__(
        self, x: Float[Array, "channels *space"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "channels *space"]: ...
    @overload
    def __call__(
        self, x: Float[Array, "channels *space"], state: Any, *, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, "channels *space"], Any]: ...
    def __call__(
        self,
        x: Float[Array, "channels *space"],
        state: Any = NO_STATE,
        *,
        key: PRNGKeyArray | None = None,
    ) -> Any:
        """**Arguments:**

        - `x`: shape `(channels, ...)`.
        - `state`: returned unchanged, so that the layer can replace a `BatchNorm`.
        - `key`: ignored; accepted so that all layers have the same signature.

        **Returns:** an array with the shape and dtype of `x`; `(array, state)` if `state` is
        passed.

        **Raises:** `ValueError` if `x` does not have `channels` channels, or if its number of
        channels is not divisible by `groups`.
        """
        del key
        check_input(self, x, ("channels" if self.channels is None else self.channels, "..."))
        check_not_stacked(self, self.weight, 1)
        if x.shape[0] % self.groups != 0:
            raise ValueError(
                "GroupNorm expected x with a number of channels that is divisible by "
                f"groups={self.groups}, got shape {x.shape}."
            )
        # On a CPU, convolutions use the layout with channels last. This layer uses the same layout,
        # so that XLA inserts no transposes between the layer and a convolution.
        values = jnp.moveaxis(x.astype(at_least_float32(x.dtype)), 0, -1)
        centred = values - self._mean(values)
        normalised = centred * jax.lax.rsqrt(self._mean(centred**2) + self.eps)
        out = jnp.moveaxis(_affine(normalised, self.weight, self.bias), -1, 0).astype(x.dtype)
        return out if state is NO_STATE else (out, state)

    def _mean(self, x: Array) -> Array:
        """For each channel, the mean of its group; channels are the last axis."""
        of_channels = jnp.mean(x, tuple(range(x.ndim - 1)), keepdims=True)
        of_groups = jnp.mean(of_channels.reshape(self.groups, -1), 1)
        return jnp.repeat(of_groups, x.shape[-1] // self.groups).reshape(of_channels.shape)


def _sizes(shape: Any) -> tuple[int, ...]:
    """Converts `shape` to a tuple. An integer, or an integer array of shape `()`, is one size."""
    is_one = integer(shape) is not None or not isinstance(shape, Iterable)
    sizes = (shape,) if is_one else tuple(shape)
    return tuple(whole_number(size, "each size of shape", least=0) for size in sizes)


@functools.partial(jax.jit, static_argnums=1)
def _standardise(x: Array, eps: float) -> Array:
    """`x` with mean 0 and variance 1 over all axes.

    The gradient with respect to `x` has two parts: one through `x` itself and one through its mean.
    This function has its own `jax.jit`, so that the backward pass first adds these two parts, and
    then the gradient of a residual connection. In another order, XLA recomputes all earlier sums in
    each operation that reads the result: the training step of 12 transformer blocks (24 norms) took
    twice as long to compile.
    """
    centred = x - jnp.mean(x)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2) + eps)


def _affine(x: Array, weight: Array | None, bias: Array | None) -> Array:
    """`x * weight + bias`, broadcast over leading axes of `x`."""
    if weight is not None:
        x = x * jnp.broadcast_to(weight.astype(x.dtype), x.shape)
    if bias is not None:
        x = x + jnp.broadcast_to(bias.astype(x.dtype), x.shape)
    return x
