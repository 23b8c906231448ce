"""Normalisation of each channel over a batch."""

import warnings
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from .._check_numbers import real_number, whole_number
from .._compat import mean_over_axes
from .._dtypes import at_least_float32, parameter_dtype
from .._module import field
from .._traceback import stacklevel_of_user
from ._inputs import check_input, check_not_stacked, describe
from ._parameters import Initializer, draw_affine
from ._stateful import State, StatefulLayer, StateIndex

Statistics = tuple[Float[Array, " input_size"], Float[Array, " input_size"]]
"""Mean and variance of each channel."""


class BatchNorm(StatefulLayer):
    """Moves each channel to mean 0 and scales it to variance 1, over the batch and all axes but
    that of the channels; then scales and shifts it.

    Ioffe & Szegedy (2015), "Batch Normalization: Accelerating Deep Network Training by Reducing
    Internal Covariate Shift": `(x - mean) / sqrt(variance + eps) * weight + bias`. Statistics are
    computed and kept in at least float32.

    With `mode="batch"` training uses the statistics of the batch at hand, as PyTorch does, and
    inference their running averages `r <- momentum * r + (1 - momentum) * batch`. These begin with
    mean 0 and variance 1, of which after `n` batches the share `momentum**n` is left: it is taken
    out before they are used. With `mode="ema"` both use the running averages, which start as the
    statistics of the first batch.

    `set_statistics` sets running averages, for example of a network that was trained
    elsewhere. Inference uses them unchanged, and training continues the averages from them. Before
    the first training step `state.set(norm.batch_state_index, (mean, variance))` does the same.

    All variances are biased, `1 / n`. With `unbiased=True` the running variance is `1 / (n - 1)`,
    as in PyTorch.

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
    # In files for other libraries, whose names of the running averages these are.
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
        - `axis_name`: of the axis of the batch, as in `jax.vmap(..., axis_name=...)`; or a sequence
          of such, for statistics over several, as over the devices of a `pmap`.
        - `eps`: added to the variance, so that there is no division by zero.
        - `channelwise_affine`: whether to scale and shift each channel.
        - `momentum`: the share of the old running averages in the new ones. PyTorch counts the
          other way round: its `momentum=0.1` is 0.9 here.
        - `inference`: whether to normalise with the running averages and leave them alone.
        - `dtype`: of weight and bias; JAX's default float if `None`. That of the running averages
          is the same, or float32 if that is wider.
        - `mode`: `"batch"` or `"ema"`; `"legacy"` is `"ema"`, with a warning.
        - `batched`: whether the layer is called on a whole batch, `(batch, input_size, ...)`,
          without a `vmap`. Needs no `axis_name`; with one, statistics are over both.
        - `unbiased`: whether the running variance averages `n / (n - 1)` times the batch's
          variance, for `n` values in a channel, as in PyTorch.
        - `weight_init`, `bias_init`: one of `jax.nn.initializers`, instead of ones and zeros.
        - `key`: for initializers that are random.

        **Raises:** `ValueError` for another mode, for a size that is not a non-negative integer,
        and if there is neither an `axis_name` nor `batched=True`; `TypeError` for an `eps` or
        `momentum` that is not a number.
        """
        if mode not in ("ema", "batch", "legacy"):
            raise ValueError(f"mode must be 'batch' or 'ema', got {mode!r}.")
        if mode == "legacy":
            warnings.warn(
                "BatchNorm was given no `mode=`, and takes 'ema' as it always did. Write "
                "`mode='ema'` to keep that; 'batch' is what other libraries do, and faster.",
                stacklevel=stacklevel_of_user(),
            )
            mode = "ema"
        if axis_name is None and not batched:
            raise ValueError(
                "BatchNorm needs to know what the batch is. Give `axis_name=`, the name of the "
                "axis of a `jax.vmap` around the layer; or `batched=True`, to call it on arrays of "
                "shape (batch, channels, ...)."
            )
        input_size = whole_number(input_size, "input_size", least=0)
        dtype, is_affine = parameter_dtype(dtype), channelwise_affine
        self.weight, self.bias = draw_affine(
            (input_size,), dtype, is_affine, is_affine, weight_init, bias_init, key
        )
        ones, zeros = draw_affine((input_size,), at_least_float32(dtype))
        is_ema = mode == "ema"
        self.ema_first_time_index = StateIndex(jnp.array(True)) if is_ema else None
        self.ema_state_index = StateIndex((zeros, zeros)) if is_ema else None
        self.batch_counter = None if is_ema else StateIndex(jnp.array(0))
        self.batch_state_index = None if is_ema else StateIndex((zeros, ones))
        self.axis_name = tuple(axis_name) if isinstance(axis_name, list) else axis_name
        self.inference = inference
        self.input_size = input_size
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
        """Sets the running averages. Inference uses them unchanged; training continues from them.

        **Arguments:**

        - `state`: holds the running averages. Use only the new state afterwards.
        - `mean`, `variance`: JAX or NumPy arrays with a value for each channel, in the dtype of the
          running averages. Convert PyTorch's tensors: `running_mean.numpy()`.

        **Returns:** the new state.

        **Raises:** `ValueError` for another shape or dtype.

        >>> import jax.numpy as jnp
        >>> from eqxlike import nn
        >>> norm, state = nn.make_with_state(nn.BatchNorm)(2, batched=True, mode="batch")
        >>> state = norm.set_statistics(state, jnp.array([1.0, 2.0]), jnp.ones(2))
        >>> norm(jnp.array([[1.0, 2.0]]), state, inference=True)[0].tolist()
        [[0.0, 0.0]]
        """
        if self.mode == "ema":
            statistics, start, settled = self.ema_state_index, self.ema_first_time_index, False
        else:
            statistics, start, settled = self.batch_state_index, self.batch_counter, _SETTLED
        assert statistics is not None
        assert start is not None
        state = state.set(statistics, (mean, variance))
        return state.set(start, jnp.full_like(state.get(start), settled))

    def __call__(
        self,
        x: Float[Array, "..."],
        state: State,
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
    ) -> tuple[Float[Array, "..."], State]:
        """**Arguments:**

        - `x`: shape `(input_size, ...)`, inside of a `vmap` with that `axis_name` unless in
          inference mode; or `(batch, input_size, ...)` for a layer with `batched=True`.
        - `state`: holds the running averages.
        - `key`: ignored; layers share one signature.
        - `inference`: overrides the layer's own flag for this call.

        **Returns:** the shape and dtype of `x`, and the new state.

        **Raises:** `ValueError` if `x` has another shape; `NameError` if there is no axis of that
        name around the call.
        """
        del key
        channels = (self.input_size, "...")
        check_input(self, x, ("batch", *channels) if self.batched else channels)
        check_not_stacked(self, self.weight, 1)
        inference = self.inference if inference is None else inference
        # With the channels last: between two convolutions on a CPU XLA then keeps their layout.
        values = jnp.moveaxis(x.astype(at_least_float32(x.dtype)), self._channel_axis, -1)
        if self.mode == "ema":
            statistics, state = self._ema_statistics(values, state, inference)
        else:
            statistics, state = self._batch_statistics(values, state, inference)
        mean, variance = (each.astype(values.dtype) for each in statistics)
        scale = jax.lax.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight.astype(scale.dtype)
        # Whatever the centre is, it cancels, in derivatives of any order too. A constant one spares
        # the backward pass sums over the batch: that for the bias serves the mean.
        centre = jax.lax.stop_gradient(mean)
        shift = (centre - mean) * scale
        if self.bias is not None:
            shift = shift + self.bias.astype(shift.dtype)
        out = (values - _spread(centre, values)) * _spread(scale, values) + _spread(shift, values)
        return jnp.moveaxis(out, -1, self._channel_axis).astype(x.dtype), state

    def _ema_statistics(self, x: Array, state: State, inference: bool) -> tuple[Statistics, State]:
        assert self.ema_first_time_index is not None
        assert self.ema_state_index is not None
        running = state.get(self.ema_state_index)
        if inference:
            return running, state
        batch, updated = self._updated(running, self._measure(x), self._correction(x))
        is_first = state.get(self.ema_first_time_index) & _is_initial(running, 0)
        mean, variance = (jnp.where(is_first, *pair) for pair in zip(batch, updated, strict=True))
        state = state.set(self.ema_first_time_index, jnp.zeros_like(is_first))
        return (mean, variance), state.set(self.ema_state_index, (mean, variance))

    def _batch_statistics(
        self, x: Array, state: State, inference: bool
    ) -> tuple[Statistics, State]:
        assert self.batch_counter is not None
        assert self.batch_state_index is not None
        count = state.get(self.batch_counter)
        running = state.get(self.batch_state_index)
        if inference:
            return self._debiased(running, count), state
        measured = self._measure(x)
        _, updated = self._updated(running, measured, self._correction(x))
        is_settled = (count < 0) | ((count == 0) & ~_is_initial(running, 1))
        state = state.set(self.batch_counter, jnp.where(is_settled, _SETTLED, count + 1))
        return measured, state.set(self.batch_state_index, updated)

    def _debiased(self, running: Statistics, count: Array) -> Statistics:
        """The average over past batches, without the initial values 0 and 1. Statistics that were
        set are unchanged.
        """
        mean, variance = running
        from_start = jnp.asarray(self.momentum, mean.dtype) ** count.astype(mean.dtype)
        is_raw = (count <= 0) | (from_start == 1)
        from_start = jnp.where(is_raw, jnp.zeros_like(from_start), from_start)
        share = 1 - from_start
        # Rounding may bring a variance of 0 below it.
        averaged = jnp.maximum((variance - from_start) / share, 0)
        return mean / share, jnp.where(is_raw, variance, averaged)

    def _updated(
        self, running: Statistics, batch: Statistics, correction: float
    ) -> tuple[Statistics, Statistics]:
        """A batch's statistics in the dtype of the running averages, and these updated."""
        mean, variance = (each.astype(running[0].dtype) for each in batch)
        variance = variance * correction
        new_mean, new_variance = (
            self.momentum * old + (1 - self.momentum) * new
            for old, new in zip(running, (mean, variance), strict=True)
        )
        return (mean, variance), (new_mean, new_variance)

    def _measure(self, x: Array) -> Statistics:
        axes = tuple(range(x.ndim - 1))
        mean = self._over_batch(jnp.mean(x, axes))
        # In two passes: the difference of two large sums would have no digits left. The mean of
        # the squares around a centre is the variance and the square of the mean's distance to it,
        # which is 0 here, and whose derivatives make the centre cancel as in `__call__`.
        centre = jax.lax.stop_gradient(mean)
        squares = self._over_batch(jnp.mean((x - _spread(centre, x)) ** 2, axes))
        return mean, squares - (mean - centre) ** 2

    def _correction(self, x: Array) -> float:
        """The factor that makes the variance of a batch unbiased; 1 without `unbiased`."""
        if not self.unbiased:
            return 1.0
        size = x.size // self.input_size if self.input_size else 2
        size *= 1 if self.axis_name is None else jax.lax.psum(1, self.axis_name)
        if size == 1:
            raise ValueError(
                f"{describe(self)} has `unbiased=True`, but one value for each channel has no "
                "unbiased variance. Pass more than one example, or `unbiased=False`."
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
                f"{describe(self)} computes statistics over the axis {self.axis_name!r}, and there "
                f"is no axis of that name around the call ({error}). Write `jax.vmap(model, "
                f"in_axes=(0, None), out_axes=(0, None), axis_name={self.axis_name!r})(x, state)`, "
                "or make the layer with `batched=True` to call it on a whole batch."
            ) from None

    @property
    def _channel_axis(self) -> int:
        return 1 if self.batched else 0


_SETTLED = -1
"""The value of the counter if statistics were set, not averaged from the initial ones."""


def _is_initial(running: Statistics, variance: float) -> Array:
    """Whether these are the initial statistics of a `State`, so that none were set."""
    return jnp.all(running[0] == 0) & jnp.all(running[1] == variance)


def _spread(per_channel: Array, x: Array) -> Array:
    """One number for each channel, in the shape of `x`, whose channels are last."""
    return jax.lax.broadcast_in_dim(per_channel, x.shape, (x.ndim - 1,))
