"""`fuse` joins Linear layers with the same input in one product, and changes nothing else."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from eqxlike.nn import FusedAttention, FusedLinear, MultiheadAttention, fuse, unfuse
from tests.nn.arrays import assert_close, filled, normal
from tests.nn.mistakes import each_mistake

X = normal(jax.random.key(9), (5, 8))
LAYERS = [nn.Linear(3, size, key=jax.random.key(size)) for size in (2, 4)]


def attention(seed=0, **options):
    options = {"num_heads": 2, "query_size": 8, "use_value_bias": False, **options}
    return MultiheadAttention(**options, key=jax.random.key(seed))


def of_itself(model, x=X):
    return model(x, x, x)


BIASED = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}


def count_products(function, *args):
    """The number of matrix products in a call, including inner functions and loops."""

    def count(jaxpr):
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        inner = (jax.extend.core.jaxprs_in_params(eqn.params) for eqn in jaxpr.eqns)
        own = sum(eqn.primitive.name == "dot_general" for eqn in jaxpr.eqns)
        return own + sum(map(count, itertools.chain.from_iterable(inner)))

    return count(eqx.filter_make_jaxpr(function)(*args)[0])


@eqx.filter_jit
def both(call, left, right):
    """The outputs of `call` for two models, in one program."""
    return call(left), call(right)


@pytest.mark.parametrize("options", [BIASED, {"vo_size": 2, "qk_size": 5, "dropout_p": 0.5}])
def test_attention_computes_the_same_with_one_product_instead_of_three(options):
    model = attention(**options)
    fused = fuse(model)
    assert isinstance(fused, FusedAttention)
    plain = nn.inference_mode(model), nn.inference_mode(fused)
    assert count_products(of_itself, plain[0], X) - count_products(of_itself, plain[1], X) == 2
    assert_close(*both(lambda model: model(X, X, X, key=jax.random.key(1)), fused, model))


def test_inputs_are_projected_together_only_if_they_are_the_same_array():
    model, other = attention(**BIASED), jnp.asarray(1 + np.asarray(X))
    fused = fuse(model)
    cases = [(1, (X[:3], X, X)), (0, (X, other, X + 2)), (0, (X, other, X))]
    for num_less, inputs in cases:
        call = lambda model, inputs=inputs: model(*inputs)
        assert count_products(call, model) - count_products(call, fused) == num_less
    assert_close(*both(lambda model: [model(*inputs) for _, inputs in cases], fused, model))
    assert unfuse(fused) == model


def test_only_projections_of_one_size_are_fused():
    model = attention(key_size=4, value_size=4)
    fused = fuse(model)
    assert fused.places == ((1, 2),)
    kv = X[:, :4]
    assert_close(*both(lambda each: each(X, kv, kv), fused, model))


def merged(layer):
    return nn.LoRALinear(layer, 2, key=jax.random.key(3)).merge(keep_parts=True)


def with_query(replace):
    """Attention whose query projection is replaced."""
    return eqx.tree_at(lambda model: model.query_proj, attention(), replace_fn=replace)


DIFFERENT = {
    "frozen": lambda: nn.freeze(attention(), lambda model: model.query_proj),
    "partly frozen": lambda: nn.freeze(attention(**BIASED), lambda m: m.query_proj.weight),
    "dtype": lambda: with_query(
        lambda layer: eqx.tree_at(lambda layer: layer.weight, layer, jnp.ones((8, 8), jnp.float16))
    ),
    "bias": lambda: attention(use_query_bias=True),
    "WeightNorm": lambda: with_query(nn.WeightNorm),
    "merged": lambda: with_query(merged),  # A `MergedLinear` is a Linear with additional fields.
}


@pytest.mark.parametrize("make", DIFFERENT.values(), ids=DIFFERENT)
def test_projection_that_differs_from_the_others_is_not_fused(make):
    assert fuse(make()).places == ((1, 2),)


def test_frozen_layers_become_one_frozen_layer():
    model = nn.freeze(attention(), lambda m: (m.query_proj, m.key_proj, m.value_proj))
    fused = fuse(model)
    assert eqx.filter(fused, eqx.is_inexact_array).fused[0].weight is None
    gradient = eqx.filter_eval_shape(eqx.filter_grad(lambda m: of_itself(m).sum()), fused)
    assert gradient.fused[0].weight is None
    assert_close(*both(of_itself, fused, model))
    assert unfuse(fused) == model


def test_shared_weights_are_not_fused():
    model = attention()
    tied = (model, nn.Linear(8, 8, use_bias=False, key=jax.random.key(2)))
    tied = eqx.tree_at(lambda pair: pair[1].weight, tied, model.query_proj.weight)
    assert fuse(tied)[0].places == ((1, 2),)
    twice = (model, model)
    assert fuse(twice) is twice
    query = lambda model: model.query_proj.weight
    pair = attention(0), attention(1)
    shared = nn.Shared(pair, where=lambda pair: query(pair[1]), get=lambda pair: query(pair[0]))
    assert fuse(shared) is shared


def test_model_without_layers_to_fuse_is_the_same_object():
    model = nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    assert fuse(model) is model
    assert unfuse(model) is model
    assert fuse(fuse(attention())) == fuse(attention())


class Block(eqx.Module):
    attention: MultiheadAttention
    norm: nn.LayerNorm

    def __init__(self, key):
        self.attention = MultiheadAttention(2, 8, key=key)
        self.norm = nn.LayerNorm(8)

    def __call__(self, x, *, key=None):
        y = jax.vmap(self.norm)(x)
        return x + self.attention(y, y, y)


def test_stacked_layers_are_fused_in_their_stack():
    model = filled(nn.ScanStack, Block, depth=3, key=jax.random.key(0))
    fused = fuse(model)
    assert fused.layers.attention.fused[0].weight.shape == (3, 24, 8)
    assert_close(*both(lambda each: each(X), fused, model))
    assert unfuse(fused) == model


def test_attention_inside_a_branch_and_inside_attention_is_fused():
    block = Block(jax.random.key(0))
    fused = fuse(nn.Parallel([block, nn.Identity()]))
    assert isinstance(fused[0].attention, FusedAttention)
    nested = eqx.tree_at(lambda each: each.dropout, attention(), block)
    fused = fuse(nested)
    assert isinstance(fused, FusedAttention)
    assert isinstance(fused.dropout.attention, FusedAttention)
    assert unfuse(fused) == nested


def test_fused_linear_returns_the_outputs_of_its_layers():
    fused = FusedLinear(LAYERS)
    x = jnp.arange(3.0)
    assert_close(fused(x), tuple(layer(x) for layer in LAYERS))
    assert fused.unfuse() == tuple(LAYERS)
    assert_close(fused.between(1, 2)(x), (LAYERS[1](x),))
    with pytest.raises(ValueError, match=r"FusedLinear expected x of shape \(3,\), got shape \(2"):
        fused(jnp.ones(2))


def linear(in_size):
    return nn.Linear(in_size, 2, key=jax.random.key(0))


MISTAKES = {
    ValueError: {
        "at least one layer": lambda: FusedLinear([]),
        r"layers\[0\] has 3 inputs, a bias and a weight of float32, and layers\[1\] has 4": (
            lambda: FusedLinear([LAYERS[0], linear(4)])
        ),
        "takes or returns a scalar": lambda: FusedLinear([linear("scalar")]),
    },
    TypeError: {
        r"layers\[1\] is a Identity": lambda: FusedLinear([LAYERS[0], nn.Identity()]),
    },
}


@each_mistake(MISTAKES)
def test_layers_that_cannot_be_fused_are_refused(error, words, call):
    with pytest.raises(error, match=words):
        call()
