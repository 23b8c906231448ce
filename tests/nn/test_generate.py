"""Text generation with and without a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from tests.nn.mistakes import each_mistake

VOCABULARY, WIDTH = 31, 16
GREEDY = nn.Sampler(temperature=0)


class Block(eqx.Module):
    attention: nn.MultiheadAttention
    norm: nn.RMSNorm

    def __init__(self, key, **options):
        rotary = nn.RotaryPositionalEmbedding(WIDTH // 4)
        self.attention = nn.MultiheadAttention(4, WIDTH, rotary=rotary, key=key, **options)
        self.norm = nn.RMSNorm(WIDTH)

    def __call__(self, carry):
        x, cache = carry
        y = jax.vmap(self.norm)(x)
        y, cache = self.attention(y, y, y, "causal", cache=cache)
        return x + y, cache


class Model(eqx.Module):
    embedding: nn.Embedding
    blocks: object

    def __init__(self, options, is_stack):
        key1, *keys = jax.random.split(jax.random.key(0), 1 + len(options))
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, key=key1)
        blocks = [Block(key, **each) for key, each in zip(keys, options, strict=True)]
        self.blocks = nn.ScanStack.stack(blocks) if is_stack else blocks

    def __call__(self, tokens, cache=None):
        x = jax.vmap(self.embedding)(tokens)
        blocks = [self.blocks] if isinstance(self.blocks, nn.ScanStack) else self.blocks
        for block in blocks:
            x, cache = block((x, cache))
        return x @ self.embedding.weight.T, cache


MODELS = {
    "grouped heads": ([{"num_kv_heads": 2}] * 2, False),
    "stack": ([{"num_kv_heads": 1}] * 3, True),
    "stack of windows": ([{"window": 3}] * 2, True),
    "windows and none": (
        [{"num_kv_heads": 2} | each for each in ({"window": (4, 0)}, {}, {"window": 2})],
        False,
    ),
}


def tokens(*shape):
    return jnp.asarray(np.random.default_rng(0).integers(0, VOCABULARY, shape))


@pytest.mark.parametrize("name", ["stack", "stack of windows", "windows and none"])
def test_cache_gives_the_tokens_and_logits_of_the_whole_context(name):
    model, prompts, lengths = Model(*MODELS[name]), tokens(3, 9), jnp.array([9, 1, 5])

    def without_cache(tokens):
        return model(tokens)[0]

    options = {"max_new_tokens": 8, "sampler": GREEDY, "lengths": lengths}
    found = nn.generate(model, prompts, **options)
    np.testing.assert_array_equal(found, nn.generate(without_cache, prompts, **options))
    # A single prompt, with a cache of another dtype.
    cache = nn.KVCache.for_model(model, 17, dtype=jnp.float16)
    alone = nn.generate(model, prompts[0], cache=cache, **(options | {"lengths": None}))
    np.testing.assert_array_equal(alone, found[0])

    @jax.jit
    def both(tokens):
        """Logits with a cache, in calls of one or several tokens, and without a cache."""
        cache, logits = nn.KVCache.for_model(model, 20), []
        for part in jnp.split(tokens, [6, 7, 9]):
            each, cache = model(part, cache=cache)
            logits.append(each)
        return jnp.concatenate(logits), without_cache(tokens), cache.start

    found, expected, start = both(tokens(18))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert start == 18


def test_other_settings_and_weights_do_not_compile_again():
    traced = []

    def model(tokens):
        traced.append(tokens.shape)
        return jax.nn.one_hot(tokens + 1, 9) * 3

    step = lambda key, **options: nn.generate(
        model, jnp.array([[1], [4]]), max_new_tokens=3, sampler=nn.Sampler(**options), key=key
    )
    found = {
        tuple(step(jax.random.key(seed), temperature=temperature, top_k=5)[0].tolist())
        for seed, temperature in enumerate([0.0, 0.0, 1.0, 2.0, 3.0])
    }
    assert (2, 3, 4) in found
    assert len(found) > 2
    assert traced == [(1,), (4,)]  # one trace for the prompt, one for the loop


def test_sampler_keeps_the_tokens_of_its_filters():
    probabilities = np.array([[0.5, 0.25, 0.125, 0.0625, 0.0625], [0.1, 0.2, 0.2, 0.2, 0.3]])
    logits = jnp.log(jnp.asarray(probabilities, jnp.float32))

    def kept(**options):
        filtered = jax.jit(lambda sampler: sampler.filter(logits))(nn.Sampler(**options))
        return np.isfinite(filtered).astype(int).tolist()

    assert kept() == [[1, 1, 1, 1, 1]] * 2
    assert kept(top_k=2) == [[1, 1, 0, 0, 0], [0, 1, 1, 1, 1]]
    assert kept(top_p=0.7) == [[1, 1, 0, 0, 0], [0, 1, 1, 1, 1]]
    assert kept(top_p=0.0) == [[1, 0, 0, 0, 0], [0, 0, 0, 0, 1]]
    assert kept(min_p=0.24) == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert kept(temperature=0.5, min_p=0.24) == [[1, 1, 0, 0, 0], [0, 1, 1, 1, 1]]
    assert kept(top_k=3, top_p=0.5) == [[1, 0, 0, 0, 0], [0, 1, 1, 1, 1]]

    # The cumulative sum of many small probabilities rounds to 1 before the last token.
    many = jax.random.normal(jax.random.key(0), (50_000,)) * 3
    assert np.isfinite(nn.Sampler(top_p=1.0).filter(many)).all()

    draws = jax.vmap(lambda key: nn.Sampler(0.5, top_k=2)(logits[0], key=key))
    counts = np.bincount(draws(jax.random.split(jax.random.key(0), 4000)), minlength=5) / 4000
    np.testing.assert_allclose(counts, [0.8, 0.2, 0, 0, 0], atol=0.03)


def test_generation_stops_at_the_end_of_all_sequences():
    read = []

    def model(tokens):
        jax.debug.callback(read.append, tokens)
        return jax.nn.one_hot(tokens + 1, 30)

    prompt = jnp.array([[1], [4], [20]])
    generate = lambda **options: nn.generate(
        model, prompt, max_new_tokens=9, sampler=GREEDY, **options
    )
    found = generate(eos=[4, 6, 22])
    assert found[:, :4].tolist() == [[2, 3, 4, 4], [5, 6, 6, 6], [21, 22, 22, 22]]
    np.testing.assert_array_equal(found, np.repeat(found[:, :3], [1, 1, 7], axis=1))
    jax.effects_barrier()
    assert len(read) == 3 * 3
    assert generate(eos=4)[1].tolist() == list(range(5, 14))


def test_cache_may_be_donated_and_batched_by_vmap():
    model, prompts = Model(*MODELS["windows and none"]), tokens(2, 5)
    caches = eqx.filter_vmap(lambda: nn.KVCache.for_model(model, 8), axis_size=2)()

    @eqx.filter_jit(donate="all-except-first")
    def step(model, caches, tokens):
        return jax.vmap(lambda row, cache: model(row, cache=cache))(tokens, caches)

    logits, caches = step(model, caches, prompts[:, :4])
    logits, caches = step(model, caches, prompts[:, 4:])
    expected = jax.vmap(lambda row: model(row)[0])(prompts)[:, -1:]
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    logits, caches = step(model, caches, prompts[:, :4])
    # The caches had space for three more tokens.
    assert np.isnan(logits).any(axis=(1, 2)).all()


class OneOfTwo(eqx.Module):
    layers: list
    num_kv_heads: int = eqx.field(static=True, default=2)  # so this is no attention layer

    def __call__(self, tokens, cache=None):
        x = jax.nn.one_hot(tokens, WIDTH)
        return self.layers[0](x, x, x, cache=cache)


def call(**options):
    arguments = {"prompt": tokens(2, 3), "max_new_tokens": 4, "sampler": GREEDY} | options
    return lambda model: nn.generate(**({"model": model} | arguments))


def one_of_two(_):
    layers = [nn.MultiheadAttention(2, WIDTH, key=jax.random.key(0))] * 2
    call(model=OneOfTwo(layers))(None)


CACHE = nn.KVCache(2, 9, 2, 4)
MISTAKES = {
    TypeError: {
        "a prompt of integers, got dtype float32": call(prompt=jnp.ones(3)),
        "eos to be one or several integers, got 1.5": call(eos=1.5),
        r"cache to be an nn\.KVCache, got": call(cache=[1]),
        "a pair of logits and the new cache": (
            call(model=lambda tokens, cache=None: tokens, cache=CACHE)
        ),
    },
    ValueError: {
        r"at least one token, got shape \(2, 0\)": call(prompt=tokens(2, 0)),
        r"integer lengths of shape \(2,\)": call(lengths=[2]),
        r"lengths from 1 to 3, got \[0, 4\]": call(lengths=[0, 4]),
        r"an empty cache for one sequence, .* with start=2": (
            call(cache=CACHE.with_fields(start=jnp.array(2)))
        ),
        "generate needs a key to draw tokens": call(sampler=None),
        "cache of length 4 for a prompt of 3": call(cache=nn.KVCache(2, 4, 2, 4)),
        r"got \(3, 2, 4\), \(3, 2, 4\) and None": call(cache=nn.KVCache(2, 9, 4, 4)),
        r"logits of shape \(3, vocabulary\)": call(model=lambda tokens: tokens),
        "the model has no argument `cache`": call(model=lambda tokens: tokens, cache=CACHE),
        "found none in function": call(model=lambda tokens, cache=None: tokens),
        "cache for 2 layers, but the model called 1": one_of_two,
    },
}


@each_mistake(MISTAKES)
def test_mistakes_are_refused(error, words, call):
    with pytest.raises(error, match=words):
        call(Model(*MODELS["grouped heads"]))


def test_a_batch_is_generated_by_several_devices():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    model, prompts = Model(*MODELS["stack"]), tokens(2, 5)

    def generate(prompts):
        return nn.generate(model, prompts, max_new_tokens=3, sampler=GREEDY)

    mapped = jax.shard_map(generate, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))
    np.testing.assert_array_equal(jax.jit(mapped)(prompts), generate(prompts))


def test_generation_inside_jit_with_64_bits():
    with jax.enable_x64(True):
        model, prompts = Model(*MODELS["stack of windows"]), tokens(2, 5)
        generate = functools.partial(nn.generate, max_new_tokens=3, sampler=GREEDY)

        @jax.jit
        def inside(prompts, lengths, eos):
            return generate(model, prompts, lengths=lengths, eos=eos)

        found = inside(prompts, jnp.array([5, 3]), 99)
        expected = generate(lambda tokens: model(tokens)[0], prompts, lengths=[5, 3])
        np.testing.assert_array_equal(found, expected)


def test_attention_with_a_cache_refuses_masks_and_long_inputs():
    attention = nn.MultiheadAttention(2, 8, key=jax.random.key(0))
    x, cache = jnp.ones((3, 8)), nn.KVCache.for_model(attention, 4)
    # A string is only a mask, not a bias.
    for options in (
        {"mask": jnp.ones((3, 3), bool)},
        {"bias": jnp.ones((1, 3, 3))},
        {"bias": "causal"},
    ):
        with pytest.raises(ValueError, match="with a cache computes causal self-attention"):
            attention(x, x, x, **options, cache=cache)
    with pytest.raises(TypeError, match=r"cache to be an nn\.KVCache or None, got 5"):
        attention(x, x, x, cache=5)
    with pytest.raises(ValueError, match="room for 4 tokens, got 6"):
        attention(*[jnp.ones((6, 8))] * 3, cache=cache)
    output, none = attention(x, x, x, "causal", cache=None)
    assert none is None
    np.testing.assert_array_equal(output, attention(x, x, x, "causal"))
    with pytest.raises(ValueError, match="temperature of at least 0, got -1"):
        nn.Sampler(-1.0)
