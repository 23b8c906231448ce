"""Linear layers that read one input, made one product; and back."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.tree_util as jtu
from jaxtyping import Array, PRNGKeyArray

from ..._compat import Tracer
from ..._module import Module, field, stored_fields
from ..._pytree import flag_frozen, is_array
from .._attention import MultiheadAttention, project
from .._inputs import check_instance
from .._linear import FusedLinear, Linear
from .._weights import Shared
from ._freeze import freeze, unfreeze

Tree = TypeVar("Tree", bound=Any)


def fuse(model: Tree) -> Tree:
    """A copy of a model in which Linear layers that read one input are one matrix product.

    These are the projections of query, key and value of each `MultiheadAttention`, which becomes a
    `FusedAttention`. (`GRUCell` and `LSTMCell` have all their gates in one.) For a layer of your
    own there is `FusedLinear`. The model computes the same numbers, to rounding, and its gradients
    are the gradients of the stacked weights.

    One product are layers of the same number of inputs and the same dtype, all with a bias or all
    without, all frozen or none, on the same devices. Others are left alone: what is not a plain
    `Linear`, as a `LoRALinear`, a `BayesianLinear` or one in a `WeightNorm`; layers whose arrays
    stand at several places of the model; and all inside of a `Shared`, whose functions know the
    layers by their paths.

    What is kept next to the model has the structure of its arrays: fuse before you make the
    state of an optimiser, and `unfuse` before you save what others are to read.

    **Arguments:**

    - `model`: a Module, or any pytree.

    **Returns:** the model; `model` itself if there is nothing to fuse.

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

    def fused(node: Any) -> Any:
        return _fuse_attention(node, counts) if type(node) is MultiheadAttention else node

    return _rebuilt(model, fused)


def unfuse(model: Tree) -> Tree:
    """The inverse of `fuse`: the layers by themselves, every bit of their weights.

    >>> import jax
    >>> from eqxlike import nn
    >>> attention = nn.MultiheadAttention(num_heads=2, query_size=8, key=jax.random.key(0))
    >>> nn.unfuse(nn.fuse(attention)) == attention
    True
    """
    check_instance(model, "unfuse")

    def unfused(node: Any) -> Any:
        if not isinstance(node, FusedAttention):
            return node
        layers = {
            PROJECTIONS[at]: layer
            for fused, own in zip(node.fused, node.places, strict=True)
            for at, layer in zip(own, _layers_of(fused), strict=True)
        }
        return _copy(node, MultiheadAttention, layers)

    return _rebuilt(model, unfused)


def _rebuilt(model: Any, function: Callable[[Any], Any]) -> Any:
    """The model with `function` of each attention, inner ones first."""
    made: dict[int, Any] = {}

    def visit(node: Any) -> Any:
        if isinstance(node, Shared):
            return node
        if id(node) not in made:
            parts, treedef = jtu.tree_flatten(
                node, is_leaf=lambda part: part is not node and isinstance(part, _VISITED)
            )
            new = [visit(part) if isinstance(part, _VISITED) else part for part in parts]
            is_new = any(one is not other for one, other in zip(new, parts, strict=True))
            made[id(node)] = function(treedef.unflatten(new) if is_new else node)
        return made[id(node)]

    return visit(model)


_VISITED = (MultiheadAttention, Shared)


def _fuse_attention(attention: MultiheadAttention, counts: dict[int, int]) -> MultiheadAttention:
    projections = [getattr(attention, name) for name in PROJECTIONS]
    places = _alike(projections, counts)
    fused = [_fused([projections[at] for at in each]) for each in places]
    return FusedAttention(attention, fused, places) if places else attention


def _copy(module: Module, cls: type, fields: dict[str, Any]) -> Any:
    """A `cls` with the fields of a Module of that class or of a subclass, and with `fields`."""
    new: Any = object.__new__(cls)
    own = {each.name: getattr(module, each.name) for each in dataclasses.fields(cls)}  # pyright: ignore
    stored_fields(new).update({**own, **fields})
    return new


def _alike(layers: Sequence[Any], counts: dict[int, int]) -> list[tuple[int, ...]]:
    """The indices of the layers that can be one product, for each product."""
    groups: dict[Any, list[int]] = {}
    for index, layer in enumerate(layers):
        kind = _kind(layer, counts)
        if kind is not None:
            groups.setdefault(kind, []).append(index)
    return [tuple(each) for each in groups.values() if len(each) > 1]


def _kind(layer: Any, counts: dict[int, int]) -> Any:
    """The same for layers that can be one product; `None` for one that is to be left alone."""
    if not isinstance(layer, Linear):
        return None
    frozen = set(flag_frozen(layer))
    plain = unfreeze(layer) if True in frozen else layer
    arrays = [plain.weight] if plain.bias is None else [plain.weight, plain.bias]
    if type(plain) is not Linear or len(frozen) != 1 or not all(map(is_array, arrays)):
        return None
    if any(counts[id(array)] > 1 for array in arrays):
        return None
    if not isinstance(plain.in_features, int) or not isinstance(plain.out_features, int):
        return None
    place = tuple(
        None if isinstance(each, Tracer) else getattr(each, "sharding", None) for each in arrays
    )
    types = tuple((each.dtype, each.shape[:-2]) for each in arrays)
    return plain.in_features, types, plain.use_bias, frozen.pop(), place


def _fused(layers: Sequence[Any]) -> FusedLinear:
    if any(flag_frozen(layers[0])):
        return freeze(FusedLinear(list(map(unfreeze, layers))))
    return FusedLinear(layers)


def _layers_of(fused: FusedLinear) -> tuple[Linear, ...]:
    if any(flag_frozen(fused)):
        return tuple(map(freeze, unfreeze(fused).unfuse()))
    return fused.unfuse()


# --- Attention whose projections of one input are one matrix product ---


PROJECTIONS = ("query_proj", "key_proj", "value_proj")


class FusedAttention(MultiheadAttention):
    """A `MultiheadAttention` that projects query, key and value at once; made by `nn.fuse`.

    It does where they are the same array: `attention(x, x, x)`. Of a key and a value that are one
    array the projections are one product, next to another query. What is passed as several arrays
    is projected one by one, as before: to `jax.vmap(attention)(x, x, x)` they are three, and to
    `jax.vmap(lambda x: attention(x, x, x))(x)` one.

    - `fused`: the products. The fields of the projections in them are `None`.
    - `places`: for each product, which of query (0), key (1) and value (2) it projects.

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

        - `attention`: the attention to compute.
        - `fused`, `places`: as in the fields.
        """
        for each in dataclasses.fields(attention):
            setattr(self, each.name, getattr(attention, each.name))
        self.fused = tuple(fused)
        self.places = tuple(places)
        for at in itertools.chain(*places):
            setattr(self, PROJECTIONS[at], None)

    def _project(
        self, inputs: tuple[Array, Array, Array], keys: Sequence[PRNGKeyArray | None]
    ) -> Sequence[Array]:
        found: dict[int, Array] = {}
        for fused, places in zip(self.fused, self.places, strict=True):
            start = 0
            for _, same in itertools.groupby(places, key=lambda at: id(inputs[at])):
                run = list(same)
                stop = start + len(run)
                rows = fused if len(run) == len(places) else fused.between(start, stop)
                found |= zip(run, jax.vmap(rows)(inputs[run[0]]), strict=True)
                start = stop
        for at, name in enumerate(PROJECTIONS):
            if at not in found:
                found[at] = project(getattr(self, name), inputs[at], keys[at])
        return [found[at] for at in range(3)]
