"""Low-rank adaptation of affine maps."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, PRNGKeyArray, Shaped

from ..._check_numbers import check_scale, real_number, whole_number
from ..._dtypes import parameter_dtype
from ..._module import Module, field
from ..._pytree import tree_at
from .._inputs import check_input, check_instance, check_not_stacked, feature_shape
from .._linear import Linear
from .._parameters import Initializer, Parameter, draw, fan_in_limit
from ._freeze import freeze, unfreeze


class LoRALinear(Module):
    """A `Linear` and a correction of low rank to its weight, which is trained in its place.

        y = W x + b + (alpha / rank) B A x

    Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang & Chen (2021), "LoRA: Low-Rank Adaptation of Large
    Language Models". `A`, of shape `(rank, in_size)`, is drawn; `B`, of shape `(out_size, rank)`,
    starts at zero: at first the layer computes what the `Linear` did. It stands wherever a `Linear`
    does: `nn.replace_layers` puts it into a model.

    The `Linear` is frozen, see `nn.freeze`: no gradient is computed for it, and an optimiser
    neither keeps moments for it nor lets it decay.

    >>> import jax, jax.numpy as jnp
    >>> from eqxlike import nn
    >>> linear = nn.Linear(64, 32, key=jax.random.key(0))
    >>> layer = LoRALinear(linear, rank=4, key=jax.random.key(1))
    >>> layer.down.shape, layer.up.shape, bool((layer(jnp.ones(64)) == linear(jnp.ones(64))).all())
    ((4, 64), (32, 4), True)
    >>> layer.merge().weight.shape
    (32, 64)
    """

    linear: Linear
    down: Shaped[Array, "rank in_size"]
    up: Shaped[Array, "out_size rank"]
    rank: int = field(static=True)
    alpha: float = field(static=True)
    train_base: bool = field(static=True)

    def __init__(
        self,
        linear: Linear,
        rank: int,
        *,
        alpha: float | None = None,
        train_base: bool = False,
        dtype: Any = None,
        weight_init: Initializer | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `linear`: the layer to adapt. If its arrays have leading axes, as those of stacked layers
          in `nn.ScanStack` or of an ensemble, so do those of the correction.
        - `rank`: of the correction.
        - `alpha`: the correction is scaled by `alpha / rank`, so that another rank needs no other
          learning rate; `rank` if `None`, which scales by 1.
        - `train_base`: whether `linear` is trained too.
        - `dtype`: of `A` and `B`; the dtype of the weight if `None`. Small updates need float32,
          also next to a weight in bfloat16. The layer computes in the dtype of the weight.
        - `weight_init`: of `A`, an initializer as for a `Linear` from `in_features` to `rank`; by
          default uniform as there.
        - `key`: for `A`.

        **Raises:** `ValueError` if `rank` is not a positive integer or `alpha` not positive;
        `TypeError` if `linear` is not a `Linear`.
        """
        check_instance(linear, "LoRALinear")
        if not isinstance(linear, Linear):
            raise TypeError(f"linear must be an nn.Linear, got a {type(linear).__name__}.")
        rank = whole_number(rank, "rank")
        alpha = rank if alpha is None else alpha
        check_scale(alpha, "alpha")
        *stacked, out_size, in_size = linear.weight.shape
        dtype = linear.weight.dtype if dtype is None else parameter_dtype(dtype)
        parameter = Parameter(
            (rank, in_size), dtype, fan_in_limit(in_size), weight_init, inputs_last=True
        )
        self.linear = linear if train_base else freeze(linear)
        self.down = _draw_stacked(key, stacked, parameter)
        self.up = jnp.zeros((*stacked, out_size, rank), dtype)
        self.rank = rank
        self.alpha = real_number(alpha, "alpha")
        self.train_base = train_base

    @property
    def weight(self) -> Shaped[Array, "out_size in_size"]:
        """The weight that inputs are multiplied by, `W + (alpha / rank) B A`."""
        correction = self._scale * (self.up @ self.down)
        return self.linear.weight + correction.astype(self.linear.weight.dtype)

    @property
    def bias(self) -> Shaped[Array, " out_size"] | None:
        return self.linear.bias

    @property
    def in_features(self) -> int | Literal["scalar"]:
        return self.linear.in_features

    @property
    def out_features(self) -> int | Literal["scalar"]:
        return self.linear.out_features

    @property
    def use_bias(self) -> bool:
        return self.linear.use_bias

    @property
    def _scale(self) -> float:
        return self.alpha / self.rank

    def __call__(
        self, x: Shaped[Array, " in_features"], *, key: PRNGKeyArray | None = None
    ) -> Shaped[Array, " out_features"]:
        """**Arguments:** those of `Linear`.

        **Returns:** shape `(out_features,)`, or `()` if `out_features="scalar"`.

        **Raises:** `ValueError` if `x` has another shape.
        """
        check_input(self, x, feature_shape(self.in_features))
        check_not_stacked(self, self.down, 2)
        # `filter_grad` passes over what is frozen; `jax.grad` and a rule of the user's would not.
        linear = self.linear if self.train_base else jax.lax.stop_gradient(self.linear)
        vector = jnp.reshape(x, (1,)) if self.in_features == "scalar" else x
        down, up = (each.astype(linear.weight.dtype) for each in (self.down, self.up))
        correction = self._scale * (up @ (down @ vector))
        if self.out_features == "scalar":
            correction = jnp.squeeze(correction)
        return linear(x, key=key) + correction

    def merge(self, *, keep_parts: bool = False) -> Linear:
        """The `Linear` with the correction added to its weight, which costs no more to call.

        **Arguments:**

        - `keep_parts`: whether to keep the parts of the sum next to it. No subtraction gives
          back the weight from a sum that was rounded; with its parts `MergedLinear.unmerge` does,
          bit for bit, for as much memory again.

        **Returns:** a `Linear` that computes what this layer does, to rounding; a `MergedLinear` if
        `keep_parts`.
        """
        if keep_parts:
            return MergedLinear(self)
        return tree_at(lambda linear: linear.weight, unfreeze(self.linear), self.weight)


class MergedLinear(Linear):
    """A `Linear` that keeps the `LoRALinear` it was merged from; made by `LoRALinear.merge`.

    It is for calling: what is trained is the layer that `unmerge` returns.

    >>> import jax
    >>> from eqxlike import nn
    >>> model = nn.Sequential([nn.Linear(8, 8, key=jax.random.key(0))])
    >>> def adapt(layer, key):
    ...     return LoRALinear(layer, rank=4, key=key)
    >>> def merge(layer):
    ...     return layer.merge(keep_parts=True)
    >>> adapted = nn.replace_layers(model, nn.Linear, adapt, key=jax.random.key(1))
    >>> merged = nn.replace_layers(adapted, LoRALinear, merge)
    >>> nn.replace_layers(merged, MergedLinear, lambda layer: layer.unmerge()) == adapted
    True
    """

    parts: LoRALinear

    def __init__(self, parts: LoRALinear):
        """**Arguments:**

        - `parts`: the layer to merge.
        """
        self.weight = parts.weight
        self.bias = parts.bias
        self.in_features = parts.in_features
        self.out_features = parts.out_features
        self.use_bias = parts.use_bias
        self.parts = parts

    def unmerge(self) -> LoRALinear:
        """**Returns:** the layer as it was, every bit of its weights."""
        return self.parts


def _draw_stacked(key: PRNGKeyArray, stacked: Sequence[int], parameter: Parameter) -> Array:
    if not stacked:
        return draw(key, parameter)[0]
    size, *others = stacked
    return jax.vmap(lambda key: _draw_stacked(key, others, parameter))(jr.split(key, size))
