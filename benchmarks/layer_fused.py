"""The benefit of `nn.fuse`: projections of self-attention as one product and separately."""

import functools

import jax
import jax.numpy as jnp

import eqxlike
from benchmarks import networks
from benchmarks.cases import Case, check_agreement
from benchmarks.layer_rows import Row, Table
from benchmarks.timing import Call
from eqxlike import nn

APART = "three products"
FUSED = "one product (nn.fuse)"

FORWARD = Table("Self-attention of a batch, forward", unit="microseconds")
GRADIENT = Table("Self-attention of a batch, value and gradient", unit="microseconds")


def attention(width: int, length: int, batch: int, table: Table) -> Row:
    """The row of a `MultiheadAttention` with four heads, called as `attention(x, x, x)`."""

    def build(column: str) -> Call:
        model = nn.MultiheadAttention(4, width, key=jax.random.key(0))
        model = nn.fuse(model) if column == FUSED else model
        function = _value_and_gradient if table is GRADIENT else _output
        return functools.partial(function, model, networks.normal(batch, length, width, seed=1))

    builders = {column: functools.partial(build, column) for column in (APART, FUSED)}
    name = f"width {width}, {length} tokens, batch {batch}"
    return Row(
        table, Case(name, builders, baseline=APART), functools.partial(check_agreement, times=1)
    )


@eqxlike.filter_jit
def _output(model: nn.MultiheadAttention, x: jax.Array) -> jax.Array:
    return jax.vmap(lambda x: model(x, x, x))(x)


@eqxlike.filter_jit
def _value_and_gradient(model: nn.MultiheadAttention, x: jax.Array) -> jax.Array:
    def loss(model: nn.MultiheadAttention) -> jax.Array:
        return jnp.mean(_output(model, x) ** 2)

    value, gradient = eqxlike.filter_value_and_grad(loss)(model)
    # The result contains the whole gradient, so that XLA computes all of it.
    return value + 0.0 * sum(jnp.sum(each) for each in jax.tree.leaves(gradient))
