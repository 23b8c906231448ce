"""`MultiheadAttention`, compared with Equinox and formulas: dropout, masks and errors."""

import equinox
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from tests.nn.arrays import assert_close, filled, normal
from tests.nn.mistakes import each_mistake

BIASES = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}

compiled = eqx.filter_jit(lambda attention, *args, **kwargs: attention(*args, **kwargs))


def inputs(getkey, key_size=8, value_size=8, **options):
    shapes = ((4, 8), (5, key_size), (5, value_size))
    return [normal(getkey(), shape) for shape in shapes]


def test_outputs_equal_equinox(getkey):
    """Layers with all size arguments, and with rotated heads, in one program."""
    rope = nn.RotaryPositionalEmbedding(4)

    def turn(query, key, value):
        return *(jax.vmap(rope, 1, 1)(each) for each in (query, key)), value

    calls = [({}, [9 * x for x in inputs(getkey)], {"process_heads": turn})]
    for options, mask_shape in [
        ({"key_size": 6, "value_size": 5, **BIASES}, (2, 4, 5)),
        ({"qk_size": 3, "vo_size": 7, "output_size": 3}, (4, 5)),
    ]:
        mask = np.asarray(normal(getkey(), mask_shape)) > -0.5
        calls.append((options, (*[9 * x for x in inputs(getkey, **options)], mask), {}))

    @eqx.filter_jit
    def outputs(module_layers):
        return [
            attention(*arguments, **how)
            for attention, (_, arguments, how) in zip(module_layers, calls, strict=True)
        ]

    # The arrays have the same order in both libraries, so they have the same values.
    found, expected = (
        outputs(
            [filled(module.MultiheadAttention, 2, 8, **each, key=jr.key(0)) for each, *_ in calls]
        )
        for module in (nn, equinox.nn)
    )
    assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_same_key_draws_the_same_weights_and_dropout_as_equinox(getkey):
    key, drop_key, arguments = getkey(), getkey(), inputs(getkey)
    ours, theirs = (
        module.MultiheadAttention(2, 8, use_key_bias=True, dropout_p=0.4, key=jr.clone(key))
        for module in (nn, equinox.nn)
    )
    for own, their in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.array_equal(own, their)
    with jax.debug_key_reuse(False):
        found, expected = (compiled(each, *arguments, key=drop_key) for each in (ours, theirs))
    assert_close(found, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="needs a key"):
        eqx.filter_eval_shape(ours, *arguments)
    # Without queries, the output has no rows.
    none = eqx.filter_eval_shape(ours, jnp.ones((0, 8)), *arguments[1:], key=drop_key)
    assert none.shape == (0, 8)


# The first query attends to no key.
MASK = np.repeat(np.arange(70)[:, None] > 0, 90, axis=1)


@pytest.mark.parametrize(("lengths", "mask"), [((70, 90), MASK), ((140, 30), "causal")])
def test_blocks_and_the_plain_formula_drop_the_same_weights(lengths, mask):
    options = {"dropout_p": 0.3, "num_kv_heads": 2}

    def outcomes(implementation, x, y, keys):
        attention = nn.MultiheadAttention(
            4, 8, **options, implementation=implementation, key=jr.key(0)
        )

        def of_batch(x, y):
            return jax.vmap(lambda x, y, key: attention(x, y, y, mask, key=key))(x, y, keys)

        def both(*args):
            output, pull = jax.vjp(of_batch, *args)
            return output, pull(jnp.sin(output))

        return jax.jvp(both, (x, y), (jnp.cos(x), jnp.cos(y)))

    @jax.jit
    def both_outcomes(*args):
        return [outcomes(implementation, *args) for implementation in ("blocks", "plain")]

    random = np.random.default_rng(0)
    x, y = (random.normal(size=(2, length, 8)).astype("f4") for length in lengths)
    with jax.debug_key_reuse(False):
        outcomes_of_both = both_outcomes(x, y, jr.split(jr.key(1)))
    for one, other in zip(*map(jax.tree.leaves, outcomes_of_both), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5 * np.abs(other).max())


def test_blocks_refuse_dropout_with_probability_one_or_an_array(getkey):
    for p in (1, jnp.float32(0.5)):
        attention = nn.MultiheadAttention(2, 8, dropout_p=p, implementation="blocks", key=getkey())
        with pytest.raises(ValueError, match=r'"blocks" supports `nn\.Dropout` with a number p'):
            eqx.filter_eval_shape(attention, *inputs(getkey), key=getkey())


def test_projections_and_dropout_share_no_key(getkey):
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
        compiled(watched, *inputs(getkey), key=key)
    jax.effects_barrier()
    heads = {tuple(data.tolist()) for data in jr.key_data(jr.split(jr.clone(key), 2))}
    assert len(set(seen)) == 4 + 5 + 5 + 4
    assert heads.isdisjoint(seen)


def test_softmax_of_low_precision_is_computed_in_float32(getkey):
    attention = nn.MultiheadAttention(1, 2, dtype=jnp.float16, key=getkey())
    eye = lambda array: jnp.eye(2, dtype=array.dtype)
    attention = nn.replace_layers(attention, eqx.is_array, eye)
    x = jnp.full((300, 2), 300, jnp.float16)  # The logits, 2 * 300^2, exceed the range of float16.
    np.testing.assert_allclose(compiled(attention, x, x, x), 300)


def test_gradient_of_low_precision_is_close_to_float32(getkey):
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


def test_float_masks_are_added_and_other_masks_select(getkey):
    """One query attends to no key. `tests/pytorch` tests finite biases."""
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


def call(*shapes, mask=None, **options):
    def run(attention):
        arrays = map(jnp.ones, shapes or ((4, 8), (5, 8), (5, 8)))
        attention(*arrays, None if mask is None else jnp.ones(mask, bool), **options)

    return run


def with_rotary():
    return nn.MultiheadAttention(2, 8, rotary=nn.RotaryPositionalEmbedding(4), key=jr.key(0))


MISTAKES = {
    ValueError: {
        r"expected query of shape \(q_seq, 8\), got .*\(4, 7\)": call((4, 7), (5, 8), (5, 8)),
        r"expected value of shape \(5, 8\), got shape \(6, 8\)": call((4, 8), (5, 8), (6, 8)),
        r"expected value of shape \(n, 8\), got shape \(5, 8\)": lambda attention: jax.eval_shape(
            lambda key_: attention(jnp.ones((4, 8)), key_, jnp.ones((5, 8))),
            jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 8"), jnp.float32),
        ),
        "at least one row of key_ and value, got": call((4, 8), (0, 8), (0, 8)),
        r"mask of shape \(4, 5\), .* got shape \(5, 4\)": call(mask=(5, 4)),
        r"\(2, 4, 5\) .* got shape \(3, 4, 5\)": call(mask=(3, 4, 5)),
        r"jax\.vmap": call((2, 4, 8), (2, 5, 8), (2, 5, 8)),
        "qk_size.* must be at least 1.*query_size=4 and num_heads=8": (
            lambda _: nn.MultiheadAttention(8, 4, key=jr.key(0))
        ),
        r"expected \[\(4, 2, 4\), .* got \[\(4, 2, 1\)": (
            call(process_heads=lambda q, k, v: (q[..., :1], k, v))
        ),
        "got positions but has no rotary embedding": call(positions=jnp.arange(4)),
        "4 queries, 5 keys and one array of positions: pass a pair": (
            lambda _: call(positions=jnp.arange(4))(with_rotary())
        ),
        "a pair of arrays, got a tuple of 3": (
            lambda _: call(positions=(jnp.arange(4),) * 3)(with_rotary())
        ),
    }
}


@each_mistake(MISTAKES)
def test_mistakes_are_refused(error, words, call, getkey):
    with pytest.raises(error, match=words):
        call(nn.MultiheadAttention(2, 8, key=getkey()))


def test_grouped_heads_rotary_and_normalisation_equal_a_layer_by_hand(getkey):
    """The layer written by hand repeats the heads of keys."""
    rotary = nn.RotaryPositionalEmbedding(4)
    options = {"num_kv_heads": 2, "rotary": rotary, "window": 3, "normalize_qk": True}
    attention = nn.MultiheadAttention(4, 24, **options, key=getkey())
    weights_of_norms = lambda layer: (layer.query_norm.weight, layer.key_norm.weight)
    attention = eqx.tree_at(weights_of_norms, attention, (jnp.arange(6.0),) * 2)
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


def test_decoding_with_an_offset_gives_the_rows_of_the_whole_sequence(getkey):
    rotary = nn.RotaryPositionalEmbedding(4)
    attention = nn.MultiheadAttention(2, 8, rotary=rotary, key=getkey())
    x = jr.normal(getkey(), (6, 8))

    @eqx.filter_jit
    def row(attention, x, offset):
        query = jax.lax.dynamic_slice_in_dim(x, offset, 1)
        return attention(query, x, x, is_causal=True, query_offset=offset)[0]

    whole = attention(x, x, x, "causal")
    rows = jnp.stack([row(attention, x, jnp.array(offset)) for offset in range(6)])
    np.testing.assert_allclose(rows, whole, rtol=1e-5, atol=1e-6)
