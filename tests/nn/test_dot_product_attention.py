"""Every implementation of attention and its derivatives agree with the formula in float64."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from eqxlike import nn
from tests.nn.arrays import assert_close
from tests.nn.mistakes import each_mistake

HEADS, KV_HEADS, SIZE, VALUE_SIZE = 4, 2, 8, 6


def arrays(num_queries, num_keys, dtype=jnp.float64):
    rows, heads = (num_queries, num_keys, num_keys), (HEADS, KV_HEADS, KV_HEADS)
    shapes = zip(rows, heads, (SIZE, SIZE, VALUE_SIZE), strict=True)
    keys = jax.random.split(jax.random.key(0), 3)
    drawn = map(functools.partial(jax.random.normal, dtype=jnp.float32), keys, shapes)
    return [each.astype(dtype) for each in drawn]


def formula(query, key, value, *, allowed, bias=0.0, scale=SIZE**-0.5):
    """The definition of attention. A query without an allowed key gets the mean of all values."""
    key, value = jnp.repeat(key, HEADS // KV_HEADS, 1), jnp.repeat(value, HEADS // KV_HEADS, 1)
    scores = jnp.einsum("qhd,khd->hqk", query, key) * scale + bias
    allowed = jnp.broadcast_to(allowed, scores.shape)
    is_idle = ~allowed.any(-1, keepdims=True)
    weights = jax.nn.softmax(jnp.where(allowed | is_idle, scores, -jnp.inf), axis=-1)
    return jnp.einsum("hqk,khd->qhd", jnp.where(is_idle, 1 / scores.shape[-1], weights), value)


def cases(q, k):
    """Options by name, with the allowed keys and the bias that they mean."""
    rows, columns = np.arange(q)[:, None], np.arange(k)
    random = np.random.default_rng(0)
    mask = random.random((q, k)) < 0.5
    mask[1 % q] = False
    head_mask = random.random((HEADS, q, k)) < 0.5
    bias = random.normal(size=(HEADS, q, k))
    segments = np.sort(random.integers(0, 4, q)), np.sort(random.integers(0, 5, k))
    causal, shifted = columns <= rows, {"is_causal": True, "query_offset": jnp.array(3)}
    return {
        "all": ({}, True),
        "causal": ({"mask": "causal"}, causal),
        "window": ({"window": 9}, abs(columns - rows) <= 9),
        "causal window": ({"is_causal": True, "window": (5, None)}, causal & (columns >= rows - 5)),
        "no bound after": ({"window": (2, None), "scale": 0.1}, columns >= rows - 2),
        "negative offset": (
            {"is_causal": True, "window": 3, "query_offset": -5},
            (columns <= rows - 5) & (columns >= rows - 8),
        ),
        "offset in an array": (shifted, columns <= rows + 3),
        "mask": ({"mask": mask}, mask),
        "mask of heads": ({"mask": head_mask, "is_causal": True}, head_mask & causal),
        "segments": ({"segment_ids": segments}, segments[0][:, None] == segments[1]),
        "key length": ({"key_length": 5, "is_causal": True}, (columns < 5) & causal),
        "no key": ({"key_length": 0}, False),
        "bias": ({"bias": bias}, True, bias),
        "bias of keys": ({"bias": bias[:1, :1], "is_causal": True}, causal, bias[:1, :1]),
        "float mask": ({"mask": np.where(mask, bias[0], -np.inf)}, mask, bias[:1]),
    }


def formula_of(options, allowed, bias=0.0):
    known = {name: options[name] for name in options if name == "scale"}
    return functools.partial(formula, allowed=allowed, bias=bias, **known)


def outcomes(attend, arguments):
    """The output and the gradients, and the tangents of both."""

    def both(*args):
        output, pull = jax.vjp(attend, *args)
        return output, pull(jnp.sin(output))

    return jax.jvp(both, arguments, tuple(map(jnp.cos, arguments)))


@pytest.mark.parametrize(
    ("implementation", "lengths", "chosen"),
    [
        ("plain", (11, 9), slice(None)),
        ("blocks", (1, 70), slice(0, None, 7)),
        ("blocks", (200, 37), slice(0, None, 3)),
        ("blocks", (150, 300), slice(1, None, 3)),
        ("blocks", (70, 90), slice(2, None, 3)),
    ],
)
def test_implementations_agree_with_the_formula(implementation, lengths, chosen):
    with jax.enable_x64(True):
        arguments = tuple(arrays(*lengths))

        @jax.jit
        def all_of(*arguments):
            found = {}
            for name, (options, *meaning) in list(cases(*lengths).items())[chosen]:
                options = options | {"implementation": implementation}
                ours = functools.partial(nn.dot_product_attention, **options)
                expected = formula_of(options, *meaning)
                found[name] = outcomes(ours, arguments), outcomes(expected, arguments)
            return found

        for name, (found, expected) in all_of(*arguments).items():
            assert_close(found, expected, rtol=1e-7, atol=1e-9, err_msg=name)


@pytest.fixture
def cudnn(monkeypatch):
    """Replaces cuDNN's kernel by XLA, with the kernel's residuals and without forward mode."""
    calls = []

    def attention(
        query, key, value, *, bias, mask, key_value_seq_lengths, implementation, **options
    ):
        assert implementation == "cudnn"
        assert (query.ndim, query.dtype) == (4, jnp.float16)
        calls.append({"mask": getattr(mask, "shape", ()), "batch": len(query), **options})

        def plain(*args):
            wide = (each.astype(jnp.float32) for each in args)
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                lengths = {"key_value_seq_lengths": key_value_seq_lengths}
                bias32 = None if bias is None else bias.astype(jnp.float32)
                found = original(*wide, bias=bias32, mask=mask, **lengths, **options)
                return found.astype(jnp.float16)

        @jax.custom_vjp
        def kernel(query, key, value):
            return forward(query, key, value)[0]

        def forward(query, key, value):
            output = plain(query, key, value)
            log_sums = jnp.zeros((len(query), query.shape[2], query.shape[1]), jnp.float32)
            return output, (query, key, value, log_sums, output)

        def backward(residuals, cotangent):
            return jax.vjp(plain, *residuals[:3])[1](cotangent)

        kernel.defvjp(forward, backward)
        return kernel(query, key, value)

    original = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    return calls


def in_half(options):
    """`options` with float16 arrays instead of float64."""
    is_wide = lambda each: getattr(each, "dtype", None) == np.float64
    return {
        name: jnp.asarray(each, jnp.float16) if is_wide(each) else each
        for name, each in options.items()
    }


def test_cudnn_agrees_with_the_formula_under_vmap(cudnn):
    query, key, value = (
        jnp.stack([each, each[::-1], each * 0.5]) for each in arrays(12, 12, jnp.float16)
    )
    value = jnp.concatenate([value, value[..., :2]], -1)
    # cuDNN supports neither offsets nor windows that are not causal.
    left_out = ("window", "no bound after", "negative offset", "offset in an array")
    supported = {name: case for name, case in cases(12, 12).items() if name not in left_out}

    @jax.jit
    def all_of(*args):
        found, wide = {}, [each.astype(jnp.float32) for each in args]
        of_batch = lambda attend: jax.vmap(lambda *args: outcomes(attend, args))
        for name, (options, allowed, *bias) in supported.items():
            expected = formula_of(options, allowed, *(each.astype("f4") for each in bias))
            options = in_half(options) | {"implementation": "cudnn"}
            ours = functools.partial(nn.dot_product_attention, **options)
            found[name] = of_batch(ours)(*args), of_batch(expected)(*wide)
        return found

    for name, (found, expected) in all_of(query, key, value).items():
        assert {each.dtype for each in jax.tree.leaves(found)} == {jnp.dtype(jnp.float16)}
        found = jax.tree.map(lambda each: each.astype(jnp.float32), found)
        assert_close(found, expected, rtol=1e-7, atol=0.05, err_msg=name)
    assert {each["batch"] for each in cudnn} == {1, 3}
    # A mask that all examples share is not repeated for each example.
    assert {each["mask"] for each in cudnn} == {(), (1, 1, 12, 12), (1, HEADS, 12, 12)}


def test_auto_uses_cudnn_if_possible_and_an_explicit_choice_names_the_obstacle(cudnn):
    query, key, value = arrays(13, 13, jnp.float16)
    both = lambda **options: nn.dot_product_attention(query, key, key, **options)
    np.testing.assert_allclose(both(), both(implementation="plain"), atol=1e-2)
    assert cudnn  # The kernel is traced for the platforms that have cuDNN.
    for options, reason in (
        ({"bias": jnp.zeros((1, 1, 13))}, "its bias or float mask has dtype float32"),
        ({"query_offset": 3}, "the query offset is 3"),
        ({"window": 3}, "a window that is not causal"),
    ):
        with pytest.raises(ValueError, match=f"does not support this attention: .*{reason}"):
            both(implementation="cudnn", **options)
    with pytest.raises(ValueError, match="keys have 8 features, but values have 6"):
        nn.dot_product_attention(query, key, value, implementation="cudnn")


def test_missing_cudnn_is_an_error():
    query, key, _ = arrays(12, 12, jnp.bfloat16)
    with pytest.raises(ValueError, match="cuDNN is not detected"):
        nn.dot_product_attention(query, key, key, implementation="cudnn")


@pytest.mark.parametrize(
    ("axis_type", "spec"), [("Auto", jax.P("a")), ("Explicit", jax.P(None, None, "a"))]
)
def test_sharded_arrays_and_shard_map_agree(axis_type, spec):
    types = (getattr(jax.sharding.AxisType, axis_type),)
    mesh = jax.make_mesh((2,), ("a",), axis_types=types)
    x = jax.random.normal(jax.random.key(0), (2, 70, 4, 8))

    def gradient(x, implementation="blocks"):
        attend = functools.partial(
            nn.dot_product_attention, is_causal=True, implementation=implementation
        )
        return jax.grad(lambda x: jnp.sum(jnp.sin(jax.vmap(attend)(x, x, x))))(x)

    sharded = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
    mapped = jax.shard_map(gradient, mesh=mesh, in_specs=spec, out_specs=spec)
    expected = jax.jit(functools.partial(gradient, implementation="plain"))(x)
    for found in (jax.jit(gradient)(sharded), jax.jit(mapped)(sharded)):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_shard_map_sums_the_gradients_of_shared_arrays():
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    query, key = jax.random.normal(jax.random.key(0), (2, 140, 2, 4))

    def loss(query, key, length=70):
        attend = functools.partial(nn.dot_product_attention, implementation="blocks")
        return (attend(query, key, key, key_length=length) ** 2).sum()

    def of_device(query, key):
        return jax.lax.psum(loss(query, key, 70 + 0 * jax.lax.axis_index("a")), "a")

    mapped = jax.shard_map(of_device, mesh=mesh, in_specs=(jax.P("a"), jax.P()), out_specs=jax.P())
    found = jax.jit(jax.grad(mapped, (0, 1)))(query, key)
    assert_close(found, jax.jit(jax.grad(loss, (0, 1)))(query, key), rtol=1e-7, atol=1e-4)


@pytest.mark.parametrize("implementation", ["plain", "blocks"])
def test_unusual_numbers(implementation):
    query, key, value = arrays(9, 9, jnp.float32)
    attend = functools.partial(nn.dot_product_attention, implementation=implementation)
    expected = attend(query, key, value)
    for options in ({"window": 2**31 - 1}, {"is_causal": True, "query_offset": 2**40}):
        np.testing.assert_allclose(attend(query, key, value, **options), expected, atol=1e-6)
    # NaN does not mask a key.
    assert jnp.isnan(attend(query, key.at[2].set(jnp.nan), value)).all()
    assert jnp.isnan(attend(query, key, value, bias=jnp.full((9, 9), jnp.nan))).all()
    assert attend(query[:0], key, value).shape == (0, HEADS, VALUE_SIZE)
    # A scale may be trained.
    of_scale = jax.grad(lambda scale: attend(query, key, value, scale=scale).sum())
    above, below = (attend(query, key, value, scale=scale) for scale in (0.31, 0.29))
    np.testing.assert_allclose(of_scale(0.3), (above - below).sum() / 0.02, rtol=1e-2)


def test_layers_are_exported_for_any_length_and_batch():
    scope = jax.export.SymbolicScope()
    length, batch = jax.export.symbolic_shape("length, batch", scope=scope)
    attention = nn.MultiheadAttention(2, 8, key=jax.random.key(0))
    convolution = jax.vmap(nn.Conv1d(8, 3, 3, padding=1, key=jax.random.key(0)))

    def run(x, y):
        return attention(x, x, x, "causal"), jax.grad(lambda y: convolution(y).sum())(y)

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((length, 8), (batch, 8, 5))]
    program = jax.export.export(jax.jit(run))(*shapes)
    found = program.call(jnp.ones((7, 8)), jnp.ones((2, 8, 5)))
    assert [each.shape for each in found] == [(7, 8), (2, 8, 5)]
    blocks = nn.MultiheadAttention(2, 8, implementation="blocks", key=jax.random.key(0))
    with pytest.raises(ValueError, match="needs static lengths"):
        jax.export.export(jax.jit(lambda x: blocks(x, x, x)))(shapes[0])


def test_memory_grows_with_the_length():
    def temporary_bytes(length):
        attend = functools.partial(nn.dot_product_attention, is_causal=True)
        x = jax.ShapeDtypeStruct((length, 2, 16), jnp.float32)
        step = jax.jit(jax.grad(lambda x: attend(x, x, x).sum()))
        return step.lower(x).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(4096) < 2.5 * temporary_bytes(2048)


def call(*shapes, dtype=float, **options):
    arrays = [jnp.ones(shape, dtype) for shape in shapes or [(3, 4, 8)] * 3]
    return lambda: nn.dot_product_attention(*arrays, **options)


def symbolic(shape):
    return jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape, scope=SCOPE), jnp.float32)


SCOPE = jax.export.SymbolicScope()
MISTAKES = {
    ValueError: {
        r"query of shape \(sequence, heads, size\), got shape \(2, 3, 4, 8\)\. For a batch": (
            call((2, 3, 4, 8), (3, 4, 8), (3, 4, 8))
        ),
        "heads a multiple of kv_heads": call((3, 4, 8), (3, 3, 8), (3, 3, 8)),
        r"got query \(3, 4, 8\), key \(5, 4, 8\) and value \(6, 4, 8\)": (
            call((3, 4, 8), (5, 4, 8), (6, 4, 8))
        ),
        r"key \(n, 4, 8\) and value \(1, 4, 8\)": lambda: jax.eval_shape(
            nn.dot_product_attention, *map(symbolic, ("m, 4, 8", "n, 4, 8", "1, 4, 8"))
        ),
        "at least one key": call((3, 4, 8), (0, 4, 8), (0, 4, 8)),
        r"mask of shape \(3, 3\)": call(mask=jnp.ones((2, 3), bool)),
        "an array or \"causal\", got 'x'": call(mask="x"),
        r"bias of shape \(4, 3, 3\)": call(bias=jnp.ones((2, 3, 3))),
        "window to be an integer or a pair": call(window=(1, 2, 3)),
        "implementation must be one of": call(implementation="flash"),
        "segment_ids of integers": call(segment_ids=jnp.ones(3)),
        "key_length to be an integer": call(key_length=jnp.ones(())),
    },
    TypeError: {
        "query of floats": call(dtype=int),
        "bias of floats": call(bias=jnp.ones((3, 3), int)),
    },
}


@each_mistake(MISTAKES)
def test_mistakes_are_refused(error, words, call):
    with pytest.raises(error, match=words):
        call()
