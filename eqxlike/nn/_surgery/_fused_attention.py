"""Attention whose projections of one input are one matrix product."""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
from jaxtyping import Array, PRNGKeyArray

from ..._module import field
from .._attention import MultiheadAttention, project
from .._linear import FusedLinear

PROJECTIONS = ("query_proj", "key_proj", "value_proj")


class FusedAttention(MultiheadAttention):
    """A `MultiheadAttention` that projects query, key and value at once; made by `nn.fuse`.

    It does where they are the same array: `attention(x, x, x)`. Of a key and a value that are one
    array the projections are one product, beside another query. What is passed as several arrays
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
