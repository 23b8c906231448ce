"""Fuses linear layers with the same input into one matrix product, and undoes it."""

import collections
import dataclasses
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.tree_util as jtu
from jaxtyping import Array, PRNGKeyArray

from .._compat import Tracer
from .._module import field, stored_fields
from .._pytree import flag_frozen, is_array
from ._attention import MultiheadAttention, project
from ._inputs import check_instance
from ._linear import FusedLinear, Linear
from ._modes import freeze, unfreeze
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
