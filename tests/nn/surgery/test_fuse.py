"""`fuse` makes one product of Linear layers that read one input, and nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from eqxlike.nn import FusedAttention, FusedLinear, MultiheadAttention, fuse, unfuse
from tests.nn.arrays import filled, normal

X = normal(jax.random.key(9), (5, 8))


def attention(seed=0, **options):
    options = {"num_heads": 2, "query_size": 8, "use_value_bias": False, **options}
    return MultiheadAttention(**options, key=jax.random.key(seed))


def of_itself(model, x=X):
    return model(x, x, x)


BIASED = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}


def count_products(function, *args):
    """The matrix products of a call, in functions and loops inside it too."""

    def count(jaxpr):
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        inner = [
            count(each)
            for eqn in jaxpr.eqns
            for each in jax.extend.core.jaxprs_in_params(eqn.params)
        ]
        return sum(eqn.primitive.name == "dot_general" for eqn in jaxpr.eqns) + sum(inner)

    return count(eqx.filter_make_jaxpr(function)(*args)[0])


@eqx.filter_jit
def both(call, left, right):
    """What `call` returns for each of two models, in one program."""
    return call(left), call(right)


def assert_close(left, right):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), left, right)


@pytest.mark.parametrize(
    "options",
    [BIASED, {"vo_size": 2, "qk_size": 5, "dropout_p": 0.5}],
    ids=str,
)
def test_attention_computes_the_same_in_one_product_where_there_were_three(options):
    model = attention(**options)
    fused = fuse(model)
    assert isinstance(fused, FusedAttention)
    plain = nn.inference_mode(model), nn.inference_mode(fused)
    assert count_products(of_itself, plain[0], X) - count_products(of_itself, plain[1], X) == 2
    assert_close(*both(lambda model: model(X, X, X, key=jax.random.key(1)), fused, model))


def test_only_inputs_that_are_one_array_are_projected_at_once():
    model, other = attention(**BIASED), jnp.asarray(1 + np.asarray(X))
    fused = fuse(model)
    cases = [(1, (X[:3], X, X)), (0, (X, other, X + 2)), (0, (X, other, X))]
    for num_less, inputs in cases:
        call = lambda model, inputs=inputs: model(*inputs)
        assert count_products(call, model) - count_products(call, fused) == num_less
    assert_close(*both(lambda model: [model(*inputs) for _, inputs in cases], fused, model))
    assert unfuse(fused) == model


def test_only_projections_of_the_same_size_are_one():
    model = attention(key_size=4, value_size=4)
    fused = fuse(model)
    assert fused.places == ((1, 2),)
    kv = X[:, :4]
    assert_close(*both(lambda each: each(X, kv, kv), fused, model))


def half(array):
    return array.astype(jnp.float16)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: nn.freeze(model, lambda model: model.query_proj),
        lambda _: nn.freeze(attention(**BIASED), lambda model: model.query_proj.weight),
        lambda model: eqx.tree_at(lambda m: m.query_proj.weight, model, replace_fn=half),
        lambda model: attention(use_query_bias=True),
        lambda model: eqx.tree_at(lambda m: m.query_proj, model, replace_fn=nn.WeightNorm),
        # A `MergedLinear` is a Linear, and keeps more.
        lambda model: eqx.tree_at(lambda m: m.query_proj, model, replace_fn=merged),
    ],
    ids=["frozen", "partly frozen", "dtype", "bias", "WeightNorm", "merged"],
)
def test_what_differs_from_the_others_is_left_alone(change):
    assert fuse(change(attention())).places == ((1, 2),)


def merged(layer):
    return nn.LoRALinear(layer, 2, key=jax.random.key(3)).merge(keep_parts=True)


def test_frozen_layers_are_one_that_is_frozen():
    model = nn.freeze(attention(), lambda m: (m.query_proj, m.key_proj, m.value_proj))
    fused = fuse(model)
    assert eqx.filter(fused, eqx.is_inexact_array).fused[0].weight is None
    gradient = eqx.filter_eval_shape(eqx.filter_grad(lambda m: of_itself(m).sum()), fused)
    assert gradient.fused[0].weight is None
    assert_close(*both(of_itself, fused, model))
    assert unfuse(fused) == model


def test_weights_that_stand_at_several_places_are_left_alone():
    model = attention()
    tied = (model, nn.Linear(8, 8, use_bias=False, key=jax.random.key(2)))
    tied = eqx.tree_at(lambda pair: pair[1].weight, tied, model.query_proj.weight)
    assert fuse(tied)[0].places == ((1, 2),)
    twice = (model, model)
    assert fuse(twice) is twice


def test_layers_inside_of_shared_are_left_alone():
    shared = nn.Shared(
        (attention(0), attention(1)),
        where=lambda pair: pair[1].query_proj.weight,
        get=lambda pair: pair[0].query_proj.weight,
    )
    assert fuse(shared) is shared


def test_model_without_such_layers_is_the_same_object():
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


def test_stacked_layers_are_fused_as_they_are_stored():
    model = filled(nn.ScanStack, Block, depth=3, key=jax.random.key(0))
    fused = fuse(model)
    assert fused.layers.attention.fused[0].weight.shape == (3, 24, 8)
    assert_close(*both(lambda each: each(X), fused, model))
    assert unfuse(fused) == model


def test_attention_inside_a_branch_is_fused():
    block = Block(jax.random.key(0))
    fused = fuse(nn.Parallel([block, nn.Identity()]))
    assert isinstance(fused[0].attention, FusedAttention)


def test_attention_inside_attention_is_fused_and_unfused():
    outer, inner = attention(), Block(jax.random.key(0))
    nested = eqx.tree_at(lambda each: each.dropout, outer, inner)
    fused = fuse(nested)
    assert isinstance(fused, FusedAttention)
    assert isinstance(fused.dropout.attention, FusedAttention)
    assert unfuse(fused) == nested


LAYERS = [nn.Linear(3, size, key=jax.random.key(size)) for size in (2, 4)]


def test_fused_linear_returns_what_each_layer_does():
    fused = FusedLinear(LAYERS)
    x = jnp.arange(3.0)
    assert_close(fused(x), tuple(layer(x) for layer in LAYERS))
    assert fused.unfuse() == tuple(LAYERS)
    assert_close(fused.between(1, 2)(x), (LAYERS[1](x),))


@pytest.mark.parametrize(
    ("layers", "error", "said"),
    [
        ([], ValueError, "at least one layer"),
        ([LAYERS[0], nn.Identity()], TypeError, r"layers\[1\] is a Identity"),
        (
            [LAYERS[0], nn.Linear(4, 2, key=jax.random.key(0))],
            ValueError,
            r"layers\[0\] has 3 inputs, a bias and a weight of float32, and layers\[1\] has 4",
        ),
        ([nn.Linear("scalar", 2, key=jax.random.key(0))], ValueError, "takes or returns a scalar"),
    ],
)
def test_layers_that_are_not_one_product_are_refused(layers, error, said):
    with pytest.raises(error, match=said):
        FusedLinear(layers)


def test_input_of_another_shape_names_the_layer():
    with pytest.raises(ValueError, match=r"FusedLinear expected x of shape \(3,\), got shape \(2"):
        FusedLinear(LAYERS)(jnp.ones(2))
