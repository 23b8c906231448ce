"""Normalisation of single examples and of batches."""

import abc
import functools
import warnings
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, ClassVar, Literal, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from .._check_numbers import integer, real_number, whole_number
from .._compat import mean_over_axes
from .._dtypes import at_least_float32, parameter_dtype
from .._module import Module, field
from .._traceback import stacklevel_of_user
from ._inputs import check_input, check_not_stacked, describe
from ._parameters import Initializer, draw_affine
from ._stateful import NO_STATE, State, StatefulLayer, StateIndex


class _StatelessNorm(Module):
    """The base of layers that normalise a single example, and return a state unchanged."""

    # `nn.Policy` does not cast the layer's parameters.
    keeps_precision: ClassVar[bool] = True

    @overload
    def __call__(
        self, x: Float[Array, "..."], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "..."]: ...
    @overload
    def __call__(
        self, x: Float[Array, "..."], state: Any, *, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, "..."], Any]: ...
    def __call__(
        self, x: Float[Array, "..."], state: Any = NO_STATE, *, key: PRNGKeyArray | None = None
    ) -> Any:
        """**Arguments:**

        - `x`: shape `self.shape` for `LayerNorm` and `RMSNorm`; shape `(channels, ...)` for
          `GroupNorm`.
        - `state`: returned unchanged, so that the layer can replace a `BatchNorm`.
        - `key`: ignored; accepted so that all layers have the same signature.

        **Returns:** an array with the shape and dtype of `x`; `(array, state)` if `state` is
        passed.

        **Raises:** `ValueError` if `x` has another shape, or if a `GroupNorm` gets a number of
        channels that is not divisible by `groups`.
        """
        out = self._apply(x)
        return out if state is NO_STATE else (out, state)

    @abc.abstractmethod
    def _apply(self, x: Array) -> Array: ...


class _Norm(_StatelessNorm):
    """The base of `LayerNorm` and `RMSNorm`."""

    shape: tuple[int, ...] = field(static=True)
    eps: float = field(static=True)
    use_weight: bool = field(static=True)
    use_bias: bool = field(static=True)
    weight: Float[Array, "*shape"] | None
    bias: Float[Array, "*shape"] | None

    def __init__(
        self,
        shape: Any,
        eps: float,
        use_weight: bool,
        use_bias: bool,
        dtype: Any,
        *initializers: Any,
    ):
        # An integer array of shape `()` is one size, although it is an instance of `Iterable`.
        is_one = integer(shape) is not None or not isinstance(shape, Iterable)
        sizes = (shape,) if is_one else tuple(shape)
        self.shape = tuple(whole_number(size, "each size of shape", least=0) for size in sizes)
        self.eps = real_number(eps, "eps")
        self.use_weight = use_weight
        self.use_bias = use_bias
        self.weight, self.bias = draw_affine(self.shape, dtype, use_weight, use_bias, *initializers)

    def _apply(self, x: Array) -> Array:
        check_input(self, x, self.shape)
        check_not_stacked(self, self.weight, len(self.shape))
        normalised = self._normalise(x.astype(at_least_float32(x.dtype)))
        return _affine(normalised, self.weight, self.bias).astype(x.dtype)

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
        super().__init__(shape, eps, use_weight, use_bias, dtype, weight_init, bias_init, key)

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
        super().__init__(shape, eps, use_weight, use_bias, dtype, weight_init, bias_init, key)

    def _normalise(self, x: Array) -> Array:
        return x * jax.lax.rsqrt(jnp.mean(x**2) + self.eps)


class GroupNorm(_StatelessNorm):
    """Normalises each group of channels separately, then scales and shifts each channel.

    `groups=channels` is instance normalisation; `groups=1` is layer normalisation with one scale
    for each channel. The layer computes in at least float32. Wu & He (2018), "Group Normalization".

    >>> import jax.numpy as jnp
    >>> layer = GroupNorm(groups=2, channels=4)
    >>> layer(jnp.ones((4, 8, 8))).shape
    (4, 8, 8)
    """

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
        self.groups = whole_number(groups, "groups")
        self.channels = None if channels is None else whole_number(channels, "channels", least=0)
        if channels is None and channelwise_affine:
            raise ValueError("GroupNorm needs `channels` unless `channelwise_affine=False`.")
        if (self.channels or 0) % self.groups != 0:
            raise ValueError(
                f"The number of groups must divide the number of channels: got groups={groups} and "
                f"channels={channels}."
            )
        self.eps = real_number(eps, "eps")
        self.channelwise_affine = channelwise_affine
        use = channelwise_affine
        self.weight, self.bias = draw_affine(
            (self.channels or 0,), dtype, use, use, weight_init, bias_init, key
        )

    def _apply(self, x: Array) -> Array:
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
        return jnp.moveaxis(_affine(normalised, self.weight, self.bias), -1, 0).astype(x.dtype)

    def _mean(self, x: Array) -> Array:
        """For each channel, the mean of its group; channels are the last axis."""
        of_channels = jnp.mean(x, tuple(range(x.ndim - 1)), keepdims=True)
        of_groups = jnp.mean(of_channels.reshape(self.groups, -1), 1)
        return jnp.repeat(of_groups, x.shape[-1] // self.groups).reshape(of_channels.shape)


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


# --- Normalisation over a batch ---


Statistics = tuple[Float[Array, " input_size"], Float[Array, " input_size"]]
"""Mean and variance of each channel."""


class BatchNorm(StatefulLayer):
    """Batch normalisation: normalises each channel over the batch and the spatial axes.

        (x - mean) / sqrt(variance + eps) * weight + bias

    Statistics are computed and stored in at least float32. Ioffe & Szegedy (2015), "Batch
    Normalization: Accelerating Deep Network Training by Reducing Internal Covariate Shift".

    With `mode="batch"`, training uses the statistics of the current batch, as in PyTorch. Inference
    uses running averages, `running = momentum * running + (1 - momentum) * batch`. The running
    averages start at mean 0 and variance 1. After `n` batches these initial values still have the
    weight `momentum**n`. The layer removes the contribution of the initial values before it uses
    the averages (bias correction, as in Adam). With `mode="ema"`, training and inference both use
    the running averages, which start at the statistics of the first batch.

    `set_statistics` sets the running averages, for example from a pretrained network. Inference
    uses these averages unchanged, and training continues from them. Before the first training step
    with `mode="batch"`, `state.set(norm.batch_state_index, (mean, variance))` has the same effect.

    All variances are biased: the sum of squares is divided by the number `n` of values. With
    `unbiased=True` the running variance is divided by `n - 1`, as in PyTorch.

    >>> import jax, jax.numpy as jnp
    >>> from eqxlike import nn
    >>> norm, state = nn.make_with_state(nn.BatchNorm)(2, axis_name="batch", mode="batch")
    >>> batched = jax.vmap(norm, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
    >>> y, state = batched(jnp.array([[1.0, 2.0], [3.0, 6.0]]), state)
    >>> print(y.round(2))
    [[-1. -1.]
     [ 1.  1.]]
    """

    keeps_precision: ClassVar[bool] = True
    # PyTorch's names of the running averages, used when weights are exported.
    _state_names: ClassVar[dict[str, tuple[str, ...]]] = {
        "ema_state_index": ("running_mean", "running_var"),
        "batch_state_index": ("running_mean", "running_var"),
    }
    weight: Float[Array, " input_size"] | None
    bias: Float[Array, " input_size"] | None
    ema_first_time_index: StateIndex[Bool[Array, ""]] | None
    ema_state_index: StateIndex[Statistics] | None
    batch_counter: StateIndex[Int[Array, ""]] | None
    batch_state_index: StateIndex[Statistics] | None
    axis_name: Hashable | tuple[Hashable, ...] | None
    inference: bool
    input_size: int = field(static=True)
    eps: float = field(static=True)
    channelwise_affine: bool = field(static=True)
    momentum: float = field(static=True)
    mode: Literal["ema", "batch"] = field(static=True)
    batched: bool = field(static=True)
    unbiased: bool = field(static=True, default=False)

    def __init__(
        self,
        input_size: int,
        axis_name: Hashable | Sequence[Hashable] | None = None,
        eps: float = 1e-5,
        channelwise_affine: bool = True,
        momentum: float = 0.99,
        inference: bool = False,
        dtype: Any = None,
        mode: Literal["ema", "batch", "legacy"] = "legacy",
        *,
        batched: bool = False,
        unbiased: bool = False,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        key: PRNGKeyArray | None = None,
    ):
        """**Arguments:**

        - `input_size`: number of channels.
        - `axis_name`: name of the batch axis, as in `jax.vmap(..., axis_name=...)`; or a sequence
          of names, for example to include the devices of a `pmap`.
        - `eps`: added to the variance to avoid division by zero.
        - `channelwise_affine`: whether to scale and shift each channel.
        - `momentum`: weight of the old running averages. PyTorch's `momentum` is the weight of the
          new batch, so 0.1 in PyTorch is 0.9 here.
        - `inference`: if `True`, calls normalise with the running averages and do not update them.
        - `dtype`: dtype of weight and bias; JAX's default float if `None`. The running averages
          have the same dtype, but at least float32.
        - `mode`: `"batch"` or `"ema"`; `"legacy"` is `"ema"` with a warning.
        - `batched`: whether the layer is called on a whole batch of shape `(batch, input_size,
          ...)`, without `vmap`. `axis_name` is then optional. If `axis_name` is given, statistics
          are over both the batch and the named axes.
        - `unbiased`: whether the running variance uses the unbiased variance of each batch, divided
          by `n - 1` for `n` values in a channel, as in PyTorch.
        - `weight_init`, `bias_init`: initializers, for example from `jax.nn.initializers`; ones and
          zeros by default.
        - `key`: random key for `weight_init` and `bias_init`.

        **Raises:**

        - `ValueError` if `mode` is unknown.
        - `ValueError` if `input_size` is not an integer of at least 0.
        - `ValueError` if `axis_name` is missing and `batched` is `False`.
        - `TypeError` if `eps` or `momentum` is not a number.
        """
        if mode not in ("ema", "batch", "legacy"):
            raise ValueError(f"mode must be 'batch' or 'ema', got {mode!r}.")
        if mode == "legacy":
            warnings.warn(
                "BatchNorm without `mode=` uses 'ema'. Pass `mode='ema'` to keep this, or "
                "`mode='batch'`, which is faster and what other libraries do.",
                stacklevel=stacklevel_of_user(),
            )
            mode = "ema"
        if axis_name is None and not batched:
            raise ValueError(
                "BatchNorm needs to know the batch axis. Pass `axis_name=`, the axis name of a "
                "`jax.vmap` around the layer; or `batched=True`, to call it on arrays of shape "
                "(batch, channels, ...)."
            )
        self.input_size = whole_number(input_size, "input_size", least=0)
        dtype, is_affine = parameter_dtype(dtype), channelwise_affine
        self.weight, self.bias = draw_affine(
            (self.input_size,), dtype, is_affine, is_affine, weight_init, bias_init, key
        )
        ones, zeros = draw_affine((self.input_size,), at_least_float32(dtype))
        is_ema = mode == "ema"
        self.ema_first_time_index = StateIndex(jnp.array(True)) if is_ema else None
        self.ema_state_index = StateIndex((zeros, zeros)) if is_ema else None
        self.batch_counter = None if is_ema else StateIndex(jnp.array(0))
        self.batch_state_index = None if is_ema else StateIndex((zeros, ones))
        self.axis_name = tuple(axis_name) if isinstance(axis_name, list) else axis_name
        self.inference = inference
        self.eps = real_number(eps, "eps")
        self.channelwise_affine = channelwise_affine
        self.momentum = real_number(momentum, "momentum")
        self.mode = mode
        self.batched = batched
        self.unbiased = unbiased

    def set_statistics(
        self,
        state: State,
        mean: Float[Array, " input_size"],
        variance: Float[Array, " input_size"],
    ) -> State:
        """Sets the running averages. Inference uses the new averages unchanged; training updates
        them.

        **Arguments:**

        - `state`: the `State` with the running averages. Use only the new state afterwards.
        - `mean`, `variance`: JAX or NumPy arrays of shape `(input_size,)`, in the dtype of the
          running averages. Convert PyTorch's tensors with `running_mean.numpy()`.

        **Returns:** the new state.

        **Raises:** `ValueError` if `mean` or `variance` has another shape or dtype.

        >>> import jax.numpy as jnp
        >>> from eqxlike import nn
        >>> norm, state = nn.make_with_state(nn.BatchNorm)(2, batched=True, mode="batch")
        >>> state = norm.set_statistics(state, jnp.array([1.0, 2.0]), jnp.ones(2))
        >>> norm(jnp.array([[1.0, 2.0]]), state, inference=True)[0].tolist()
        [[0.0, 0.0]]
        """
        averages, progress = self._indices
        state = state.set(averages, (mean, variance))
        marker = False if self.mode == "ema" else _SET_BY_USER
        return state.set(progress, jnp.full_like(state.get(progress), marker))

    def __call__(
        self,
        x: Float[Array, "..."],
        state: State,
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
    ) -> tuple[Float[Array, "..."], State]:
        """**Arguments:**

        - `x`: shape `(input_size, ...)`; or shape `(batch, input_size, ...)` with `batched=True`.
          If `axis_name` is set, calls in training must be inside a `vmap` with this axis name.
        - `state`: the `State` with the running averages.
        - `key`: ignored; accepted so that all layers have the same signature.
        - `inference`: overrides `self.inference` for this call.

        **Returns:** an array with the shape and dtype of `x`, and the new state.

        **Raises:** `ValueError` if `x` has another shape; `NameError` if the call is not inside an
        axis named `axis_name`.
        """
        channels = (self.input_size, "...")
        check_input(self, x, ("batch", *channels) if self.batched else channels)
        check_not_stacked(self, self.weight, 1)
        inference = self.inference if inference is None else inference
        # On a CPU, convolutions use the layout with channels last. This layer uses the same layout,
        # so that XLA inserts no transposes between the layer and a convolution.
        channel_axis = 1 if self.batched else 0
        values = jnp.moveaxis(x.astype(at_least_float32(x.dtype)), channel_axis, -1)
        statistics, state = self._statistics(values, state, inference)
        mean, variance = (each.astype(values.dtype) for each in statistics)
        scale = jax.lax.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight.astype(scale.dtype)
        # `centre` equals `mean`, but JAX differentiates `centre` as a constant. `centre` cancels in
        # `out` and in all derivatives of `out`. Only `shift` depends on `mean`, so the gradient
        # with respect to `mean` uses the same sum over the batch as the gradient with respect to
        # the bias.
        centre = jax.lax.stop_gradient(mean)
        shift = (centre - mean) * scale
        if self.bias is not None:
            shift = shift + self.bias.astype(shift.dtype)
        centred = values - _broadcast_channels(centre, values)
        out = centred * _broadcast_channels(scale, values) + _broadcast_channels(shift, values)
        return jnp.moveaxis(out, -1, channel_axis).astype(x.dtype), state

    def _statistics(self, x: Array, state: State, inference: bool) -> tuple[Statistics, State]:
        """Returns the mean and variance to normalise with, and the new state."""
        averages, progress = self._indices
        # In mode "ema", `seen` is a flag that is true before the first update. Otherwise it is
        # the number of updates, or `_SET_BY_USER`.
        running, seen = state.get(averages), state.get(progress)
        is_ema = self.mode == "ema"
        if inference:
            return running if is_ema else self._debiased(running, seen), state
        measured = self._batch_moments(x)
        batch, updated = self._update(running, measured, self._correction(x))
        if is_ema:
            is_first = seen & _is_initial(running, 0)
            mean, variance = (
                jnp.where(is_first, *pair) for pair in zip(batch, updated, strict=True)
            )
            state = state.set(progress, jnp.zeros_like(is_first))
            return (mean, variance), state.set(averages, (mean, variance))
        is_set_by_user = (seen < 0) | ((seen == 0) & ~_is_initial(running, 1))
        state = state.set(progress, jnp.where(is_set_by_user, _SET_BY_USER, seen + 1))
        return measured, state.set(averages, updated)

    def _update(
        self, running: Statistics, batch: Statistics, correction: float
    ) -> tuple[Statistics, Statistics]:
        """Returns the statistics of the batch, in the dtype of the running averages and with the
        corrected variance, and the new running averages.
        """
        mean, variance = (each.astype(running[0].dtype) for each in batch)
        variance = variance * correction
        new_mean, new_variance = (
            self.momentum * old + (1 - self.momentum) * new
            for old, new in zip(running, (mean, variance), strict=True)
        )
        return (mean, variance), (new_mean, new_variance)

    def _debiased(self, running: Statistics, count: Array) -> Statistics:
        """Removes the initial mean 0 and variance 1 from the running averages.

        Statistics that the user set are returned unchanged.
        """
        mean, variance = running
        initial_weight = jnp.asarray(self.momentum, mean.dtype) ** count.astype(mean.dtype)
        is_unchanged = (count <= 0) | (initial_weight == 1)
        initial_weight = jnp.where(is_unchanged, jnp.zeros_like(initial_weight), initial_weight)
        share = 1 - initial_weight
        # Rounding may make a variance of 0 negative.
        averaged = jnp.maximum((variance - initial_weight) / share, 0)
        return mean / share, jnp.where(is_unchanged, variance, averaged)

    def _batch_moments(self, x: Array) -> Statistics:
        axes = tuple(range(x.ndim - 1))
        mean = self._over_batch(jnp.mean(x, axes))
        # The squares are computed after the mean, because `mean(x**2) - mean**2` loses all digits
        # if the mean is large. The constant `centre` saves sums in the backward pass, as in
        # `__call__`. The term `(mean - centre)**2` is 0, but its second derivative is not 0.
        # `squares` has no such second derivative, because `centre` is constant, so the term is
        # subtracted.
        centre = jax.lax.stop_gradient(mean)
        squares = self._over_batch(jnp.mean((x - _broadcast_channels(centre, x)) ** 2, axes))
        return mean, squares - (mean - centre) ** 2

    def _correction(self, x: Array) -> float:
        """`n / (n - 1)` if `unbiased`, otherwise 1."""
        if not self.unbiased:
            return 1.0
        size = x.size // self.input_size if self.input_size else 2
        size *= 1 if self.axis_name is None else jax.lax.psum(1, self.axis_name)
        if size == 1:
            raise ValueError(
                f"{describe(self)} has `unbiased=True`, which needs at least two values for each "
                "channel, got one. Pass more than one example, or `unbiased=False`."
            )
        return size / (size - 1)

    def _over_batch(self, mean: Array) -> Array:
        if self.axis_name is None:
            return mean
        names = self.axis_name if isinstance(self.axis_name, tuple) else (self.axis_name,)
        try:
            return mean_over_axes(mean, names)
        except NameError as error:
            raise NameError(
                f"{describe(self)} computes statistics over the axis {self.axis_name!r}, but is "
                f"not called inside an axis of that name ({error}). Write `jax.vmap(model, "
                f"in_axes=(0, None), out_axes=(0, None), axis_name={self.axis_name!r})(x, state)`, "
                "or construct the layer with `batched=True` to call it on a whole batch."
            ) from None

    @property
    def _indices(self) -> tuple[Any, Any]:
        """The index of the running averages, and the index of the flag or counter of updates."""
        if self.mode == "ema":
            return self.ema_state_index, self.ema_first_time_index
        return self.batch_state_index, self.batch_counter


_SET_BY_USER = -1
"""Value of `batch_counter` after the user set the statistics. This value disables the bias
correction.

`set_statistics` writes this value. A plain `state.set(norm.batch_state_index, ...)` does not change
the counter. Before the first update, when the counter is 0, averages that differ from the initial
averages therefore also count as set by the user (`_is_initial`).
"""


def _is_initial(running: Statistics, variance: float) -> Array:
    """Whether `running` has its initial values, that is, the user has not set other values."""
    return jnp.all(running[0] == 0) & jnp.all(running[1] == variance)


def _broadcast_channels(per_channel: Array, x: Array) -> Array:
    """Broadcasts one number for each channel to the shape of `x`, whose last axis is channels."""
    return jax.lax.broadcast_in_dim(per_channel, x.shape, (x.ndim - 1,))
