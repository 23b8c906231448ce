import equinox
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from tests.nn.arrays import filled, normal

BIASES = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}


ours_compiled = eqx.filter_jit(lambda attention, *args, **kwargs: attention(*args, **kwargs))


@eqx.filter_jit
def outputs(ours, theirs, *args, **kwargs):
    return ours(*args, **kwargs), theirs(*args, **kwargs)


def both(getkey, **options):
    key = getkey()
    make = eqx.filter_jit(
        lambda key: (
            nn.MultiheadAttention(2, 8, **options, key=key),
            equinox.nn.MultiheadAttention(2, 8, **options, key=jr.clone(key)),
        )
    )
    return make(key)


def inputs(getkey, key_size=8, value_size=8, **options):
    shapes = ((4, 8), (5, key_size), (5, value_size))
    return [normal(getkey(), shape) for shape in shapes]


def test_outputs_are_those_of_equinox(getkey):
    """Of all sizes, and with heads that are turned, in one program."""
    rope = nn.RotaryPositionalEmbedding(4)

    def turn(query, key, value):
        turned = [jax.vmap(rope, 1, 1)(each) for each in (query, key)]
        return (*turned, value)

    calls = [({}, [9 * x for x in inputs(getkey)], {"process_heads": turn})]
    for options, mask_shape in [
        ({"key_size": 6, "value_size": 5, **BIASES}, (2, 4, 5)),
        ({"qk_size": 3, "vo_size": 7, "output_size": 3}, (4, 5)),
    ]:
        mask = np.asarray(normal(getkey(), mask_shape)) > -0.5
        calls.append((options, (*[9 * x for x in inputs(getkey, **options)], mask), {}))

    # Of the same numbers: their arrays are in one order.
    pairs = [
        [
            filled(module.MultiheadAttention, 2, 8, **options, key=jr.key(0))
            for module in (nn, equinox.nn)
        ]
        for options, _, _ in calls
    ]

    @eqx.filter_jit
    def outputs_of_both(pairs):
        return [
            [attention(*arguments, **how) for attention in pair]
            for pair, (_, arguments, how) in zip(pairs, calls, strict=True)
        ]

    for found, expected in outputs_of_both(pairs):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_same_key_draws_the_weights_and_drops_what_equinox_does(getkey):
    ours, theirs = both(getkey, use_key_bias=True, dropout_p=0.4)
    leaves = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    assert all(np.array_equal(own, their) for own, their in leaves)
    arguments, key = inputs(getkey), getkey()
    with jax.debug_key_reuse(False):
        found, expected = outputs(ours, theirs, *arguments, key=key)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="needs a key"):
        eqx.filter_eval_shape(ours, *arguments)
    # No queries, no rows.
    none = eqx.filter_eval_shape(ours, jnp.ones((0, 8)), *arguments[1:], key=key)
    assert none.shape == (0, 8)


@pytest.mark.parametrize("lengths", [(70, 90), (140, 30)])
def test_blocks_drop_the_weights_that_the_plain_formula_drops(lengths):
    # The first query attends to no key.
    masked = np.ones(lengths, bool)
    masked[0] = False

    def outcomes(implementation, x, y, keys, mask):
        attention = nn.MultiheadAttention(
            4,
            8,
            dropout_p=0.3,
            num_kv_heads=2,
            implementation=implementation,
            key=jr.key(0),
        )

        def of_batch(x, y):
            return jax.vmap(lambda x, y, key: attention(x, y, y, mask, key=key))(x, y, keys)

        def both(*args):
            output, pull = jax.vjp(of_batch, *args)
            return output, pull(jnp.sin(output))

        return jax.jvp(both, (x, y), (jnp.cos(x), jnp.cos(y)))

    @jax.jit
    def all_of(*args):
        return [
            outcomes(implementation, *args, mask)
            for mask in (masked, "causal")
            for implementation in ("blocks", "plain")
        ]

    random = np.random.default_rng(0)
    x, y = (random.normal(size=(2, length, 8)).astype("f4") for length in lengths)
    with jax.debug_key_reuse(False):
        found = all_of(x, y, jr.split(jr.key(1)))
    for blocks, plain in (found[:2], found[2:]):
        for one, other in zip(*map(jax.tree.leaves, (blocks, plain)), strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5 * np.abs(other).max())


@pytest.mark.parametrize("p", [1, jnp.float32(0.5)], ids=["all", "array"])
def test_blocks_refuse_dropout_that_they_cannot_compute(getkey, p):
    attention = nn.MultiheadAttention(2, 8, dropout_p=p, implementation="blocks", key=getkey())
    with pytest.raises(ValueError, match=r'"blocks" supports `nn\.Dropout` with a number p'):
        eqx.filter_eval_shape(attention, *inputs(getkey), key=getkey())


def test_projection_that_needs_a_key_shares_none_with_the_dropout(getkey):
    attention = nn.to_bayesian(filled(nn.MultiheadAttention, 2, 8, dropout_p=0.5, key=getkey()))
    key = getkey()
    seen = []

    class Seen(eqx.Module):
        layer: nn.BayesianLinear

        def __call__(self, x, *, key):
            jax.debug.callback(lambda data: seen.append(tuple(data.tolist())), jr.key_data(key))
            return self.layer(x, key=key)

    watched = nn.replace_layers(attention, nn.BayesianLinear, Seen)
    with jax.debug_key_reuse(True):
        ours_compiled(watched, *inputs(getkey), key=key)
    jax.effects_barrier()
    heads = {tuple(data.tolist()) for data in jr.key_data(jr.split(jr.clone(key), 2))}
    assert len(set(seen)) == 4 + 5 + 5 + 4
    assert heads.isdisjoint(seen)


def test_softmax_of_low_precision_is_computed_in_float32(getkey):
    attention = nn.MultiheadAttention(1, 2, dtype=jnp.float16, key=getkey())
    for projection in ("query_proj", "key_proj", "value_proj", "output_proj"):
        attention = eqx.tree_at(
            lambda a, name=projection: getattr(a, name).weight,
            attention,
            jnp.eye(2, dtype=jnp.float16),
        )
    x = jnp.full((300, 2), 300, jnp.float16)  # The logits, 2 * 300^2, are past float16's range.
    np.testing.assert_allclose(ours_compiled(attention, x, x, x), 300)


def test_gradient_of_low_precision_is_that_of_float32(getkey):
    dtype = jnp.bfloat16
    attention = nn.MultiheadAttention(2, 8, key=getkey())
    arrays = (attention, *inputs(getkey))
    low = jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x).astype(dtype)) if eqx.is_array(x) else x, arrays
    )

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(arrays):
        attention, *inputs = arrays
        return attention(*inputs).astype(jnp.float32).sum()

    with jax.numpy_dtype_promotion("strict"):
        found, expected = jax.tree.leaves(gradient(low)), jax.tree.leaves(gradient(arrays))
    assert {leaf.dtype for leaf in found} == {jnp.dtype(dtype)}
    for leaf, other in zip(found, expected, strict=True):
        scale = float(np.max(np.abs(other)))
        np.testing.assert_allclose(np.asarray(leaf, np.float32), other, atol=0.05 * scale)


def test_float_masks_are_added_and_others_choose(getkey):
    """Also where a query attends to no key; `tests/pytorch` has the values of finite biases."""
    attention, (query, key_, value) = nn.MultiheadAttention(2, 8, key=getkey()), inputs(getkey)
    chosen = np.tril(np.ones((4, 5), bool), -1)  # The first query attends to no key.

    @eqx.filter_jit
    def attended(mask):
        return jax.value_and_grad(lambda x: jnp.sum(attention(x, key_, value, mask) ** 2))(query)

    expected = attended(chosen)
    assert all(np.isfinite(each).all() for each in expected)
    masks = [chosen.astype(int), chosen[None], np.where(chosen, 0.0, -np.inf).astype(np.float32)]
    for dtype in ("float16", "bfloat16", "float32"):
        masks.append(jnp.where(chosen, 0.0, jnp.finfo(dtype).min).astype(dtype))
    for mask in masks:
        for ours, theirs in zip(attended(mask), expected, strict=True):
            np.testing.assert_allclose(ours[1:], theirs[1:], rtol=1e-5) if ours.ndim else None
            assert np.isfinite(ours).all()
    bias = eqx.filter_grad(lambda bias: attention(query, key_, value, bias).sum())(masks[2])
    assert np.isfinite(bias).all()
    assert np.array_equal(bias.any(1), [False, False, True, True])
    assert not bias[~chosen].any()
    with pytest.raises(TypeError, match=r"mask of booleans, integers or floats, got .* complex64"):
        attention(query, key_, value, jnp.ones((4, 5), complex))


@pytest.mark.parametrize(
    ("shapes", "mask_shape", "message"),
    [
        (((4, 7), (5, 8), (5, 8)), None, r"expected query of shape \(q_seq, 8\), got .*\(4, 7\)"),
        (((4, 8), (5, 8), (6, 8)), None, r"expected value of shape \(5, 8\), got shape \(6, 8\)"),
        (((4, 8), (0, 8), (0, 8)), None, r"at least one row of key_ and value, got"),
        (((4, 8), (5, 8), (5, 8)), (5, 4), r"mask of shape \(4, 5\), .* got shape \(5, 4\)"),
        (((4, 8), (5, 8), (5, 8)), (3, 4, 5), r"\(2, 4, 5\) .* got shape \(3, 4, 5\)"),
        (((2, 4, 8), (2, 5, 8), (2, 5, 8)), None, r"jax\.vmap"),
    ],
)
def test_wrong_shapes_are_named(shapes, mask_shape, message, getkey):
    attention = nn.MultiheadAttention(2, 8, key=getkey())
    mask = None if mask_shape is None else jnp.ones(mask_shape, bool)
    with pytest.raises(ValueError, match=message):
        attention(*map(jnp.ones, shapes), mask)


def test_unfit_heads_are_refused(getkey):
    message = "qk_size.* must be at least 1.*query_size=4 and num_heads=8"
    with pytest.raises(ValueError, match=message):
        nn.MultiheadAttention(8, 4, key=getkey())
    attention = nn.MultiheadAttention(2, 8, key=getkey())
    with pytest.raises(ValueError, match=r"expected \[\(4, 2, 4\), .* got \[\(4, 2, 1\)"):
        attention(*inputs(getkey), process_heads=lambda q, k, v: (q[..., :1], k, v))


def test_grouped_heads_rotary_and_normalisation_are_what_they_say(getkey):
    """Next to the same layer by hand, with the heads of keys repeated."""
    rotary = nn.RotaryPositionalEmbedding(4)
    attention = nn.MultiheadAttention(
        4, 24, num_kv_heads=2, rotary=rotary, window=3, normalize_qk=True, key=getkey()
    )
    attention = eqx.tree_at(
        lambda a: (a.query_norm.weight, a.key_norm.weight), attention, (jnp.arange(6.0),) * 2
    )
    x, positions = jr.normal(getkey(), (7, 24)), jnp.array([0, 1, 2, 3, 0, 1, 2])
    segments = jnp.array([0, 0, 0, 0, 1, 1, 1])
    rows = np.arange(7)
    allowed = (rows <= rows[:, None]) & (rows >= rows[:, None] - 3)
    allowed &= np.asarray(segments) == np.asarray(segments)[:, None]

    @eqx.filter_jit
    def outputs(attention, x):
        query, key, value = (
            jax.vmap(projection)(x).reshape(7, -1, 6)
            for projection in (attention.query_proj, attention.key_proj, attention.value_proj)
        )
        turned = []
        for heads, norm in ((query, attention.query_norm), (key, attention.key_norm)):
            scaled = heads / jnp.sqrt(jnp.mean(heads**2, -1, keepdims=True) + 1e-5)
            scaled = scaled * norm.weight[None, None]
            first = rotary(scaled[..., :4], positions=positions)
            turned.append(jnp.concatenate([first, scaled[..., 4:]], -1))
        query, key = turned
        key, value = jnp.repeat(key, 2, 1), jnp.repeat(value, 2, 1)
        scores = jnp.einsum("qhd,khd->hqk", query, key) / jnp.sqrt(6.0)
        weights = jax.nn.softmax(jnp.where(allowed[None], scores, -jnp.inf), axis=-1)
        by_hand = jnp.einsum("hqk,khd->qhd", weights, value).reshape(7, 24)
        ours = attention(x, x, x, "causal", segment_ids=segments, positions=positions)
        return ours, jax.vmap(attention.output_proj)(by_hand)

    np.testing.assert_allclose(*outputs(attention, x), rtol=1e-5, atol=1e-6)


def test_decoding_with_an_offset_gives_the_rows_of_the_whole(getkey):
    rotary = nn.RotaryPositionalEmbedding(4)
    attention = nn.MultiheadAttention(2, 8, rotary=rotary, key=getkey())
    x = jr.normal(getkey(), (6, 8))

    @eqx.filter_jit
    def row(attention, x, offset):
        query = jax.lax.dynamic_slice_in_dim(x, offset, 1)
        return attention(query, x, x, is_causal=True, query_offset=offset)[0]

    whole = attention(x, x, x, "causal")
    plain = nn.MultiheadAttention(2, 8, key=getkey())
    with pytest.raises(ValueError, match="got positions but has no rotary embedding"):
        plain(x, x, x, positions=jnp.arange(6))
    rows = jnp.stack([row(attention, x, jnp.array(offset)) for offset in range(6)])
    np.testing.assert_allclose(rows, whole, rtol=1e-5, atol=1e-6)
