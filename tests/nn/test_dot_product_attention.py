"""Every implementation of attention agrees with the formula in float64, with its derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxlike import nn

HEADS, KV_HEADS, SIZE, VALUE_SIZE = 4, 2, 8, 6


def arrays(num_queries, num_keys, dtype=jnp.float64):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [
        (num_queries, HEADS, SIZE),
        (num_keys, KV_HEADS, SIZE),
        (num_keys, KV_HEADS, VALUE_SIZE),
    ]
    return [
        jax.random.normal(key, shape, jnp.float32).astype(dtype)
        for key, shape in zip(keys, shapes, strict=True)
    ]


def formula(query, key, value, *, allowed, bias=0.0, scale=SIZE**-0.5):
    """Attention as a textbook has it, where nothing is attended to the mean of all values."""
    key, value = jnp.repeat(key, HEADS // KV_HEADS, 1), jnp.repeat(value, HEADS // KV_HEADS, 1)
    scores = jnp.einsum("qhd,khd->hqk", query, key) * scale + bias
    allowed = jnp.broadcast_to(allowed, scores.shape)
    is_idle = ~allowed.any(-1, keepdims=True)
    weights = jax.nn.softmax(jnp.where(allowed | is_idle, scores, -jnp.inf), axis=-1)
    return jnp.einsum("hqk,khd->qhd", jnp.where(is_idle, 1 / scores.shape[-1], weights), value)


def cases(q, k):
    """Arguments by name, and what they mean: which keys are allowed, and a bias."""
    rows, columns = np.arange(q)[:, None], np.arange(k)
    random = np.random.default_rng(0)
    mask = random.random((q, k)) < 0.5
    mask[1 % q] = False
    head_mask = random.random((HEADS, q, k)) < 0.5
    bias = random.normal(size=(HEADS, q, k))
    segments = np.sort(random.integers(0, 4, q)), np.sort(random.integers(0, 5, k))
    return {
        "all": ({}, True, 0.0),
        "causal": ({"mask": "causal"}, columns <= rows, 0.0),
        "window": ({"window": 9}, abs(columns - rows) <= 9, 0.0),
        "causal window": (
            {"is_causal": True, "window": (5, None)},
            (columns <= rows) & (columns >= rows - 5),
            0.0,
        ),
        "no bound after": ({"window": (2, None), "scale": 0.1}, columns >= rows - 2, 0.0),
        "negative offset": (
            {"is_causal": True, "window": 3, "query_offset": -5},
            (columns <= rows - 5) & (columns >= rows - 8),
            0.0,
        ),
        "offset in an array": (
            {"is_causal": True, "query_offset": jnp.array(3)},
            columns <= rows + 3,
            0.0,
        ),
        "mask": ({"mask": mask}, mask, 0.0),
        "mask of heads": (
            {"mask": head_mask, "is_causal": True},
            head_mask & (columns <= rows),
            0.0,
        ),
        "segments": ({"segment_ids": segments}, segments[0][:, None] == segments[1], 0.0),
        "key length": (
            {"key_length": 5, "is_causal": True},
            (columns < 5) & (columns <= rows),
            0.0,
        ),
        "no key": ({"key_length": 0}, False, 0.0),
        "bias": ({"bias": bias}, True, bias),
        "bias of keys": ({"bias": bias[:1, :1], "is_causal": True}, columns <= rows, bias[:1, :1]),
        "float mask": ({"mask": np.where(mask, bias[0], -np.inf)}, mask, bias[:1]),
    }


def outcomes(attend, arguments):
    """The output and the cotangents, with their tangents."""

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
            for name, (options, allowed, bias) in list(cases(*lengths).items())[chosen]:
                known = {name: options[name] for name in options if name == "scale"}
                expected = functools.partial(formula, allowed=allowed, bias=bias, **known)
                ours = functools.partial(
                    nn.dot_product_attention, implementation=implementation, **options
                )
                found[name] = outcomes(ours, arguments), outcomes(expected, arguments)
            return found

        for name, (found, expected) in all_of(*arguments).items():
            for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
                np.testing.assert_allclose(one, other, atol=1e-9, err_msg=name)


@pytest.fixture
def cudnn(monkeypatch):
    """The kernel as JAX offers it, computed by XLA: with its residuals, without forward mode."""
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


def test_cudnn_agrees_with_the_formula_under_vmap(cudnn):
    batch = 3
    query, key, value = (
        jnp.stack([each, each[::-1], each * 0.5]) for each in arrays(12, 12, jnp.float16)
    )
    value = jnp.concatenate([value, value[..., :2]], -1)
    supported = {
        name: case
        for name, case in cases(12, 12).items()
        if "query_offset" not in case[0] and name != "window"
    }
    del supported["no bound after"]

    @jax.jit
    def all_of(query, key, value):
        found = {}
        for name, (options, allowed, bias) in supported.items():
            known = {name: options[name] for name in options if name == "scale"}
            bias = jnp.asarray(bias, jnp.float32)
            expected = functools.partial(formula, allowed=allowed, bias=bias, **known)
            is_float = lambda each: getattr(each, "dtype", None) == np.float64
            options = {
                name: jnp.asarray(each, jnp.float16) if is_float(each) else each
                for name, each in options.items()
            }
            ours = functools.partial(nn.dot_product_attention, implementation="cudnn", **options)
            wide = [each.astype(jnp.float32) for each in (query, key, value)]
            of_batch = lambda attend: jax.vmap(lambda *args: outcomes(attend, args))
            found[name] = of_batch(ours)(query, key, value), of_batch(expected)(*wide)
        return found

    for name, (found, expected) in all_of(query, key, value).items():
        for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            assert one.dtype == jnp.float16
            np.testing.assert_allclose(one.astype(jnp.float32), other, atol=0.05, err_msg=name)
    assert {each["batch"] for each in cudnn} == {1, batch}
    # A mask that all examples share is not repeated for each of them.
    assert {each["mask"] for each in cudnn} == {(), (1, 1, 12, 12), (1, HEADS, 12, 12)}


def test_auto_uses_cudnn_where_it_can_and_an_explicit_choice_says_why_not(cudnn):
    query, key, value = arrays(13, 13, jnp.float16)
    both = lambda **options: nn.dot_product_attention(query, key, key, **options)
    np.testing.assert_allclose(both(), both(implementation="plain"), atol=1e-2)
    assert cudnn  # Traced for the platforms that have it.
    for options, reason in (
        ({"bias": jnp.zeros((1, 1, 13))}, "its bias or float mask has dtype float32"),
        ({"query_offset": 3}, "the query offset is 3"),
        ({"window": 3}, "a window that is not causal"),
    ):
        with pytest.raises(ValueError, match=f"does not support this attention: .*{reason}"):
            both(implementation="cudnn", **options)
    with pytest.raises(ValueError, match="keys have 8 features, but values have 6"):
        nn.dot_product_attention(query, key, value, implementation="cudnn")


def test_cudnn_that_is_not_there_is_an_error_that_says_so():
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


def test_shard_map_sums_the_gradients_of_what_devices_share():
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    query, key = jax.random.normal(jax.random.key(0), (2, 140, 2, 4))

    def loss(query, key, length=70):
        attend = functools.partial(nn.dot_product_attention, implementation="blocks")
        return (attend(query, key, key, key_length=length) ** 2).sum()

    def of_device(query, key):
        return jax.lax.psum(loss(query, key, 70 + 0 * jax.lax.axis_index("a")), "a")

    mapped = jax.shard_map(of_device, mesh=mesh, in_specs=(jax.P("a"), jax.P()), out_specs=jax.P())
    found = jax.jit(jax.grad(mapped, (0, 1)))(query, key)
    for one, other in zip(found, jax.jit(jax.grad(loss, (0, 1)))(query, key), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("implementation", ["plain", "blocks"])
def test_unusual_numbers(implementation):
    query, key, value = arrays(9, 9, jnp.float32)
    attend = functools.partial(nn.dot_product_attention, implementation=implementation)
    expected = attend(query, key, value)
    for options in ({"window": 2**31 - 1}, {"is_causal": True, "query_offset": 2**40}):
        np.testing.assert_allclose(attend(query, key, value, **options), expected, atol=1e-6)
    # NaN is not taken for a key that is masked.
    assert jnp.isnan(attend(query, key.at[2].set(jnp.nan), value)).all()
    assert jnp.isnan(attend(query, key, value, bias=jnp.full((9, 9), jnp.nan))).all()
    assert attend(query[:0], key, value).shape == (0, HEADS, VALUE_SIZE)
    # A scale may be trained.
    of_scale = jax.grad(lambda scale: attend(query, key, value, scale=scale).sum())
    step = 1e-2
    difference = attend(query, key, value, scale=0.3 + step) - attend(
        query, key, value, scale=0.3 - step
    )
    np.testing.assert_allclose(of_scale(0.3), difference.sum() / (2 * step), rtol=1e-2)


def test_layers_are_exported_for_any_length_and_batch():
    scope = jax.export.SymbolicScope()
    length, batch = jax.export.symbolic_shape("length, batch", scope=scope)
    attention = nn.MultiheadAttention(2, 8, key=jax.random.key(0))
    convolution = nn.Conv1d(8, 3, 3, padding=1, key=jax.random.key(0))
    exported = jax.export.export(
        jax.jit(
            lambda x, y: (
                attention(x, x, x, "causal"),
                jax.grad(lambda y: (convolution_of(y)).sum())(y),
            )
        )
    )
    convolution_of = jax.vmap(convolution)
    shapes = ((length, 8), (batch, 8, 5))
    program = exported(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    found = program.call(jnp.ones((7, 8)), jnp.ones((2, 8, 5)))
    assert [each.shape for each in found] == [(7, 8), (2, 8, 5)]
    blocks = nn.MultiheadAttention(2, 8, implementation="blocks", key=jax.random.key(0))
    with pytest.raises(ValueError, match="needs static lengths"):
        jax.export.export(jax.jit(lambda x: blocks(x, x, x)))(
            jax.ShapeDtypeStruct((length, 8), jnp.float32)
        )


def test_memory_grows_with_the_length():
    def temporary_bytes(length):
        attend = functools.partial(nn.dot_product_attention, is_causal=True)
        x = jax.ShapeDtypeStruct((length, 2, 16), jnp.float32)
        step = jax.jit(jax.grad(lambda x: attend(x, x, x).sum()))
        return step.lower(x).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(4096) < 2.5 * temporary_bytes(2048)


MISTAKES = {
    "query of shape (sequence, heads, size), got shape (2, 3, 4, 8). For a batch": (
        [jnp.ones((2, 3, 4, 8)), *2 * [jnp.ones((3, 4, 8))]],
        {},
    ),
    "heads a multiple of kv_heads": ([jnp.ones((3, n, 8)) for n in (4, 3, 3)], {}),
    "at least one key": ([jnp.ones((3, 4, 8)), *2 * [jnp.ones((0, 4, 8))]], {}),
    "query of floats": (3 * [jnp.ones((3, 4, 8), int)], {}),
    "mask of shape (3, 3)": (3 * [jnp.ones((3, 4, 8))], {"mask": jnp.ones((2, 3), bool)}),
    "an array or \"causal\", got 'x'": (3 * [jnp.ones((3, 4, 8))], {"mask": "x"}),
    "bias of shape (4, 3, 3)": (3 * [jnp.ones((3, 4, 8))], {"bias": jnp.ones((2, 3, 3))}),
    "bias of floats": (3 * [jnp.ones((3, 4, 8))], {"bias": jnp.ones((3, 3), int)}),
    "window to be an integer or a pair": (3 * [jnp.ones((3, 4, 8))], {"window": (1, 2, 3)}),
    "segment_ids of integers": (3 * [jnp.ones((3, 4, 8))], {"segment_ids": jnp.ones(3)}),
    "key_length to be an integer": (3 * [jnp.ones((3, 4, 8))], {"key_length": jnp.ones(())}),
    "implementation must be one of": (3 * [jnp.ones((3, 4, 8))], {"implementation": "flash"}),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_named(message):
    args, options = MISTAKES[message]
    with pytest.raises((ValueError, TypeError)) as error:
        nn.dot_product_attention(*args, **options)
    assert message in str(error.value)
