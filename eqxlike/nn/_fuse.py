"""Linear layers in other forms: fused layers, and layers with low-rank adaptation (LoRA)."""

import collections
import dataclasses
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jaxtyping import Array, PRNGKeyArray, Shaped

from .._check_numbers import check_scale, real_number, whole_number
from .._compat import Tracer
from .._dtypes import parameter_dtype
from .._module import Module, field, stored_fields
from .._pytree import flag_frozen, is_array, tree_at
from ._attention import MultiheadAttention, project
from ._inputs import check_input, check_instance, check_not_stacked, feature_shape
from ._linear import FusedLinear, Linear
from ._modes import freeze, unfreeze
from ._parameters import Initializer, Parameter, draw, fan_in_limit
from ._weights import Shared

Tree = TypeVar("Tree", bound=Any)


def fuse(model: Tree) -> Tree:
    """Fuses Linear layers with the same input into one matrix product.

    The query, key and value projections of each `MultiheadAttention` are fused. The layer becomes a
    `FusedAttention`. (`GRUCell` and `LSTMCell` already compute all gates in one product.) Use
    `FusedLinear` in your own layers. The outputs are equal up to rounding. Gradients are with
    respect to the fused weights.

    Layers are fused if they have the same number of inputs, the same dtype and the same devices.
    Either all or none must have a bias, and either all or none must be frozen. The following layers
    are not fused: subclasses and replacements of `Linear`, such as `LoRALinear`, `BayesianLinear`
    or a layer in a `WeightNorm`; layers whose arrays occur several times in the model; and layers
    inside a `Shared`, because `Shared` finds nodes by their paths.

    Fusing changes the structure of the model. Call `fuse` before you create the optimiser state,
    and `unfuse` before you save a file for other programs.

    **Arguments:**

    - `model`: a Module, or any pytree.

    **Returns:** a copy of the model; `model` itself if there is nothing to fuse.

    **Raises:** `TypeError` if `model` is a class.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp
        >>> from eqxlike import nn
        >>> attention = nn.MultiheadAttention(num_heads=2, query_size=8, key=jax.random.key(0))
        >>> fused = nn.fuse(attention)
        >>> def count_products(attention):
        ...     jaxpr, *_ = eqx.filter_make_jaxpr(lambda x: attention(x, x, x))(jnp.ones((5, 8)))
        ...     return str(jaxpr).count("dot_general")
        >>> count_products(attention) - count_products(fused)
        2
    """
    check_instance(model, "fuse")
    counts = collections.Counter(map(id, filter(is_array, jtu.tree_leaves(model))))

    def fused(attention: MultiheadAttention) -> MultiheadAttention:
        projections = [getattr(attention, name) for name in PROJECTIONS]
        groups: dict[Any, list[int]] = collections.defaultdict(list)
        for index, layer in enumerate(projections):
            groups[_fusion_key(layer, counts)].append(index)
        groups.pop(None, None)  # Layers that cannot be fused.
        places = [tuple(each) for each in groups.values() if len(each) > 1]
        layers = [_fuse_layers([projections[index] for index in each]) for each in places]
        return FusedAttention(attention, layers, places) if places else attention

    return _map_attention(model, lambda node: type(node) is MultiheadAttention, fused)


def unfuse(model: Tree) -> Tree:
    """The inverse of `fuse`: restores the separate layers, with bit-identical weights.

    >>> import jax
    >>> from eqxlike import nn
    >>> attention = nn.MultiheadAttention(num_heads=2, query_size=8, key=jax.random.key(0))
    >>> nn.unfuse(nn.fuse(attention)) == attention
    True
    """
    check_instance(model, "unfuse")

    def unfused(attention: FusedAttention) -> MultiheadAttention:
        fields = dataclasses.fields(MultiheadAttention)
        values = {each.name: getattr(attention, each.name) for each in fields}
        for fused, places in zip(attention.fused, attention.places, strict=True):
            names = [PROJECTIONS[index] for index in places]
            values |= zip(names, _unfuse_layers(fused), strict=True)
        new: MultiheadAttention = object.__new__(MultiheadAttention)
        stored_fields(new).update(values)
        return new

    return _map_attention(model, lambda node: isinstance(node, FusedAttention), unfused)


def _map_attention(
    model: Any, is_attention: Callable[[Any], bool], function: Callable[[Any], Any]
) -> Any:
    """Replaces attention layers outside of `Shared`, inner layers first.

    A layer that occurs twice in the model stays shared.
    """
    made: dict[int, tuple[Any, Any]] = {}

    def is_found(node: Any) -> bool:
        return is_attention(node) or isinstance(node, Shared)

    def replaced(node: Any) -> Any:
        if isinstance(node, Shared):
            return node
        if id(node) not in made:
            parts, treedef = jtu.tree_flatten(
                node, is_leaf=lambda part: part is not node and is_found(part)
            )
            new = [replaced(part) if is_found(part) else part for part in parts]
            changed = node if all(map(operator.is_, new, parts)) else treedef.unflatten(new)
            # Keeps a reference to the node, so that Python gives its `id` to no other node.
            made[id(node)] = node, function(changed) if is_attention(node) else changed
        return made[id(node)][1]

    return replaced(model)


def _fusion_key(layer: Any, counts: dict[int, int]) -> Any:
    """A key that is equal for layers that can be fused; `None` for a layer that cannot be fused."""
    if not isinstance(layer, Linear):
        return None
    frozen = set(flag_frozen(layer))
    plain = unfreeze(layer) if True in frozen else layer
    arrays = [plain.weight] if plain.bias is None else [plain.weight, plain.bias]
    is_own = all(is_array(array) and counts[id(array)] <= 1 for array in arrays)
    has_scalars = "scalar" in (plain.in_features, plain.out_features)
    if type(plain) is not Linear or len(frozen) != 1 or not is_own or has_scalars:
        return None
    shardings = tuple(
        None if isinstance(each, Tracer) else getattr(each, "sharding", None) for each in arrays
    )
    types = tuple((each.dtype, each.shape[:-2]) for each in arrays)
    return plain.in_features, types, plain.use_bias, frozen.pop(), shardings


def _fuse_layers(layers: Sequence[Any]) -> FusedLinear:
    if any(flag_frozen(layers[0])):
        return freeze(FusedLinear(list(map(unfreeze, layers))))
    return FusedLinear(layers)


def _unfuse_layers(fused: FusedLinear) -> tuple[Linear, ...]:
    if any(flag_frozen(fused)):
        return tuple(map(freeze, unfreeze(fused).unfuse()))
    return fused.unfuse()


# --- Attention with fused projections ---


PROJECTIONS = ("query_proj", "key_proj", "value_proj")


class FusedAttention(MultiheadAttention):
    """A `MultiheadAttention` with fused projections, as made by `nn.fuse`.

    If query, key and value are the same array, `attention(x, x, x)`, they are projected by one
    matrix product. If only key and value are the same array, they share a product. Different arrays
    are projected separately. Inside `jax.vmap(attention)(x, x, x)` the inputs are three different
    arrays; write `jax.vmap(lambda x: attention(x, x, x))(x)`.

    - `fused`: the fused layers. The attributes of the replaced projections, such as `query_proj`,
      are `None`.
    - `places`: for each fused layer, the inputs that it projects: query (0), key (1) or value (2).

    >>> import eqxlike as eqx, jax, jax.numpy as jnp
    >>> from eqxlike import nn
    >>> attention = nn.MultiheadAttention(num_heads=2, query_size=8, key=jax.random.key(0))
    >>> fused = nn.fuse(attention)
    >>> fused.fused[0].weight.shape, eqx.filter_jit(fused)(*3 * [jnp.ones((5, 8))]).shape
    ((24, 8), (5, 8))
    """

    fused: tuple[FusedLinear, ...]
    places: tuple[tuple[int, ...], ...] = field(static=True)

    def __init__(
        self,
        attention: MultiheadAttention,
        fused: Sequence[FusedLinear],
        places: Sequence[tuple[int, ...]],
    ):
        """**Arguments:**

        - `attention`: the layer to convert.
        - `fused`, `places`: see the class.
        """
        for each in dataclasses.fields(attention):
            setattr(self, each.name, getattr(attention, each.name))
        self.fused = tuple(fused)
        self.places = tuple(places)
        for index in itertools.chain(*places):
            setattr(self, PROJECTIONS[index], None)

    def _project(
        self, inputs: tuple[Array, Array, Array], keys: Sequence[PRNGKeyArray | None]
    ) -> Sequence[Array]:
        found: dict[int, Array] = {}
        for fused, places in zip(self.fused, self.places, strict=True):
            start = 0
            for _, same in itertools.groupby(places, key=lambda index: id(inputs[index])):
                run = list(same)
                stop = start + len(run)
                rows = fused if len(run) == len(places) else fused.between(start, stop)
                found |= zip(run, jax.vmap(rows)(inputs[run[0]]), strict=True)
                start = stop
        for index, name in enumerate(PROJECTIONS):
            if index not in found:
                found[index] = project(getattr(self, name), inputs[index], keys[index])
        return [found[index] for index in range(3)]


# --- Low-rank adaptation (LoRA) ---


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
