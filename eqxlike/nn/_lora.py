"""Low-rank adaptation (LoRA) of linear layers."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, PRNGKeyArray, Shaped

from .._check_numbers import check_scale, real_number, whole_number
from .._dtypes import parameter_dtype
from .._module import Module, field
from .._pytree import tree_at
from ._inputs import check_input, check_instance, check_not_stacked, feature_shape
from ._linear import Linear
from ._modes import freeze, unfreeze
from ._parameters import Initializer, Parameter, draw, fan_in_limit


class LoRALinear(Module):
    """A frozen `Linear` with a trained low-rank correction to its weight.

        y = W x + b + (alpha / rank) B A x

    `A`, of shape `(rank, in_size)`, is initialised randomly. `B`, of shape `(out_size, rank)`, is
    initialised to zero, so initially the outputs equal the outputs of the `Linear`. Use
    `nn.replace_layers` to adapt the `Linear` layers of a model.

    The `Linear` is frozen with `nn.freeze`, so it has no gradient, no optimiser moments and no
    weight decay. Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang & Chen (2021), "LoRA: Low-Rank
    Adaptation of Large Language Models".

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

        - `linear`: the layer to adapt. If the arrays of `linear` have leading axes, as in an
          `nn.ScanStack` or an ensemble, `A` and `B` have the same leading axes.
        - `rank`: rank of the correction.
        - `alpha`: the correction is scaled by `alpha / rank`, so that the learning rate does not
          depend on the rank. `None` means no scaling.
        - `train_base`: whether to train `linear` too.
        - `dtype`: dtype of `A` and `B`; the dtype of the weight if `None`. Small updates need
          float32, even if the weight is in bfloat16. The layer computes in the dtype of the weight.
        - `weight_init`: initializer of `A`, as for a `Linear` from `in_features` to `rank`; uniform
          by default.
        - `key`: random key for `A`.

        **Raises:**

        - `ValueError` if `rank` is not a positive integer.
        - `ValueError` if `alpha` is not positive.
        - `TypeError` if `linear` is not a `Linear`.
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
            (rank, in_size), dtype, fan_in_limit(in_size), weight_init, is_outputs_first=True
        )
        self.linear = linear if train_base else freeze(linear)
        self.down = _draw_stacked(key, stacked, parameter)
        self.up = jnp.zeros((*stacked, out_size, rank), dtype)
        self.rank = rank
        self.alpha = real_number(alpha, "alpha")
        self.train_base = train_base

    @property
    def weight(self) -> Shaped[Array, "out_size in_size"]:
        """The corrected weight, `W + (alpha / rank) B A`."""
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
        """**Arguments:** as for `Linear`.

        **Returns:** shape `(out_features,)`, or `()` if `out_features="scalar"`.

        **Raises:** `ValueError` if `x` has another shape.
        """
        check_input(self, x, feature_shape(self.in_features))
        check_not_stacked(self, self.down, 2)
        # `filter_grad` skips frozen arrays, but `jax.grad` does not.
        linear = self.linear if self.train_base else jax.lax.stop_gradient(self.linear)
        vector = jnp.reshape(x, (1,)) if self.in_features == "scalar" else x
        down, up = (each.astype(linear.weight.dtype) for each in (self.down, self.up))
        correction = self._scale * (up @ (down @ vector))
        if self.out_features == "scalar":
            correction = jnp.squeeze(correction)
        return linear(x, key=key) + correction

    def merge(self, *, keep_parts: bool = False) -> Linear:
        """Adds the correction to the weight, so that a call costs no more than a call of a
        `Linear`.

        **Arguments:**

        - `keep_parts`: whether to keep the original weight and the correction, so that
          `MergedLinear.unmerge` restores them bit for bit. Keeping these parts doubles the memory.

        **Returns:** a `Linear` with the outputs of this layer, up to rounding; a `MergedLinear` if
        `keep_parts=True`.
        """
        if keep_parts:
            return MergedLinear(self)
        return tree_at(lambda linear: linear.weight, unfreeze(self.linear), self.weight)


class MergedLinear(Linear):
    """A `Linear` that keeps the `LoRALinear` from which it was merged.

    `LoRALinear.merge` makes a `MergedLinear`. Do not train a `MergedLinear`: train the layer that
    `unmerge` returns.

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
        """**Returns:** the original layer, with bit-identical weights."""
        return self.parts


def _draw_stacked(key: PRNGKeyArray, stacked: Sequence[int], parameter: Parameter) -> Array:
    if not stacked:
        return draw(key, parameter)[0]
    size, *others = stacked
    return jax.vmap(lambda key: _draw_stacked(key, others, parameter))(jr.split(key, size))
