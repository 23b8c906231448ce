"""Small layers: dropout, embeddings, rotary positions, recurrent cells."""

import re

import equinox
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from tests.nn.arrays import assert_close, normal


def test_same_key_drops_the_same_entries_as_equinox(getkey):
    x, key = normal(getkey(), (4, 5)), getkey()
    ours, theirs = nn.Dropout(0.3), equinox.nn.Dropout(0.3)
    np.testing.assert_array_equal(ours(x, key=key), theirs(x, key=jr.clone(key)))


def test_flag_of_a_dropout_call_overrides_the_flag_of_the_layer(getkey):
    for flag in (True, False):
        y = nn.Dropout(0.5, inference=not flag)(jnp.ones(100), key=getkey(), inference=flag)
        assert bool((y == 1).all()) == flag


def test_dropout_needs_a_key_only_if_entries_are_dropped():
    for layer in (nn.Dropout(0.5, inference=True), nn.Dropout(0), nn.Dropout(0.0)):
        assert layer(jnp.ones(3)).tolist() == [1, 1, 1]
    model = nn.Sequential([nn.Identity(), nn.Sequential([nn.Dropout(0.5)])])
    with pytest.raises(RuntimeError, match=r"^Dropout at Sequential.layers\[1\].layers\[0\] needs"):
        model(jnp.ones(3))


def test_probability_one_and_array_probabilities_have_zero_gradients(getkey):
    key = getkey()
    gradient = jax.grad(lambda x: nn.Dropout(1.0)(x, key=getkey()).sum())(jnp.ones(3))
    assert gradient.tolist() == [0, 0, 0]
    assert jax.grad(lambda p: nn.Dropout(p)(jnp.ones(9), key=key).sum())(jnp.array(0.5)) == 0


def test_dropout_keeps_the_dtype(getkey):
    for dtype, p in ((jnp.bfloat16, 0.5), (jnp.float16, jnp.array(0.5)), (jnp.complex64, 0.5)):
        x = np.ones(3, dtype)
        assert eqx.filter_eval_shape(nn.Dropout(p), x, key=getkey()).dtype == dtype


def test_wrong_probabilities_are_refused():
    for bad in (-0.1, 2, float("nan"), np.float32(1.5)):
        message = rf"probability p in \[0, 1\], got {re.escape(repr(bad))}"
        with pytest.raises(ValueError, match=message):
            nn.Dropout(bad)
    for bad in ("0.5", None, True, 0.5j, jnp.array(1), np.array(True), [0.5]):
        message = f"a floating-point array; got .*of type {type(bad).__name__}"
        with pytest.raises(TypeError, match=message):
            nn.Dropout(bad)


def test_old_name_of_inference_warns_and_works():
    with pytest.warns(DeprecationWarning, match="use `inference=`"):
        layer = nn.Dropout(0.5, deterministic=True)
    assert layer.inference
    with pytest.warns(DeprecationWarning, match="use `inference=`"):
        assert nn.Dropout(0.5)(jnp.ones(1), deterministic=True).tolist() == [1]


def test_same_key_gives_the_embedding_of_equinox(getkey):
    key = getkey()
    ours, theirs = nn.Embedding(5, 3, key=key), equinox.nn.Embedding(5, 3, key=jr.clone(key))
    np.testing.assert_array_equal(ours.weight, theirs.weight)
    for index in (0, 4, -1, 7, np.int32(2), jnp.array(3)):
        np.testing.assert_array_equal(ours(index), theirs(index))


def test_embedding_is_given_or_drawn_by_an_initializer(getkey):
    for weight in (jnp.ones((2, 3)), jax.ShapeDtypeStruct((2, 3), jnp.float32)):
        layer = nn.Embedding(weight=weight)
        assert (layer.num_embeddings, layer.embedding_size) == (2, 3)
    layer = nn.Embedding(4, 4, weight_init=jax.nn.initializers.orthogonal(), key=getkey())
    np.testing.assert_allclose(layer.weight @ layer.weight.T, jnp.eye(4), atol=1e-5)


def test_rotation_is_a_product_of_complex_numbers(getkey):
    x = np.asarray(normal(getkey(), (7, 6)), np.float64)
    for arguments, theta in (((6,), 10_000.0), ((6, 100.0), 100.0)):
        turns = np.outer(np.arange(7), theta ** (-np.arange(3) / 3))
        turned = (x[:, :3] + 1j * x[:, 3:]) * np.exp(1j * turns)
        with jax.enable_x64(True):
            ours = jax.jit(nn.RotaryPositionalEmbedding(*arguments))(jnp.asarray(x))
        np.testing.assert_allclose(ours, np.concatenate([turned.real, turned.imag], 1), rtol=1e-10)


def test_rotation_of_low_precision_computes_its_angles_in_float32(getkey):
    x = normal(getkey(), (400, 6), jnp.bfloat16)
    rope = jax.jit(nn.RotaryPositionalEmbedding(6))
    exact = np.asarray(rope(x.astype(jnp.float32)))
    assert rope(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(rope(x), exact.astype(jnp.bfloat16))


def scaled_turns(positions, scaling, half=4, theta=100.0):
    """The angles of the papers' equations, one feature at a time."""
    factor, length = scaling["factor"], scaling.get("original_max_position_embeddings", 1)
    kind, turns = scaling["rope_type"], np.empty((len(positions), half))
    if kind == "dynamic":
        longest = max(max(positions) + 1, length)
        theta *= (factor * longest / length - (factor - 1)) ** (2 * half / (2 * half - 2))
    for j in range(half):
        frequency = theta ** (-j / half)
        wavelength = 2 * np.pi / frequency
        if kind == "linear":
            frequency /= factor
        if kind == "llama3":
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            smooth = (length / wavelength - low) / (high - low)
            if wavelength > length / low:
                frequency /= factor
            elif wavelength > length / high:
                frequency *= (1 - smooth) / factor + smooth
        if kind == "yarn":
            fast, slow = (
                half * np.log(length / (turns * 2 * np.pi)) / np.log(theta)
                for turns in (scaling.get("beta_fast", 32), scaling.get("beta_slow", 1))
            )
            if scaling.get("truncate", True):
                fast, slow = np.floor(fast), np.ceil(slow)
            ramp = min(max((j - max(fast, 0)) / (min(slow, 2 * half - 1) - max(fast, 0)), 0), 1)
            frequency *= ramp / factor + 1 - ramp
        turns[:, j] = np.asarray(positions) * frequency
    return turns


LENGTH = {"original_max_position_embeddings": 30}
SCALINGS = [
    ({"rope_type": "linear", "factor": 4}, 1),
    ({"type": "dynamic", "rope_type": "dynamic", "factor": 4.0, **LENGTH}, 1),
    ({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4} | LENGTH, 1),
    ({"rope_type": "yarn", "factor": 4.0} | LENGTH, 0.1 * np.log(4) + 1),
    (
        {"rope_type": "yarn", "factor": 4, "beta_fast": 9, "beta_slow": 2, "truncate": False}
        | {"attention_factor": 1.3, **LENGTH},
        1.3,
    ),
]


def test_positions_and_scalings_agree_with_the_papers(getkey):
    """All heads have the same angles, also under `vmap` over heads and with a traced offset."""
    x = np.asarray(normal(getkey(), (5, 3, 8)), np.float64)
    # The largest position is below or above the original length.
    every = [np.arange(27.0, 32.0), np.array([3, 0, 2, 29, 28]), np.arange(12, 17)]
    with jax.enable_x64(True):
        ropes = [nn.RotaryPositionalEmbedding(8, 100.0, scaling=each) for each, _ in SCALINGS]

        @jax.jit
        def turn(x, every, offset):
            turned = [
                [rope(x, positions=each) for each in (*every, offset)]
                + [jax.vmap(lambda x, rope=rope: rope(x, positions=12), 1, 1)(x)]
                for rope in ropes
            ]
            return turned, [rope(x[:, 0]) for rope in ropes]

        ours, from_zero = turn(x, every, np.int32(27))
    for rope, (scaling, factor), outputs, first in zip(
        ropes, SCALINGS, ours, from_zero, strict=True
    ):
        assert hash(rope) == hash(nn.RotaryPositionalEmbedding(8, 100.0, scaling=scaling))
        positions = [*every, every[0], every[2], np.arange(5)]
        for where, output in zip(positions, [*outputs, first[:, None]], strict=True):
            turns = np.exp(1j * scaled_turns(where, scaling))[:, None]
            turned = (x[..., :4] + 1j * x[..., 4:]) * turns * factor
            expected = np.concatenate([turned.real, turned.imag], -1)[:, : output.shape[1]]
            np.testing.assert_allclose(output, expected, rtol=1e-10, atol=1e-10)


def rope(size=2, x=None, positions=None, **options):
    layer = nn.RotaryPositionalEmbedding(size, **options)
    return x if x is None else layer(jnp.ones(x), positions=positions)


def scaled(*kind, **options):
    names = ("rope_type", "factor")
    return lambda: rope(scaling=dict(zip(names, kind, strict=False)) | options)


UNFIT = {
    "must be a mapping, such as": lambda: rope(scaling=2.0),
    "one of 'default', 'linear'.*got None": scaled(factor=2.0),
    "got 'longrope'": scaled("longrope"),
    "needs 'factor'": scaled("linear"),
    r"scaling\['factor'\] must be positive": scaled("linear", 0),
    "takes 'factor'.*`theta=`": scaled("linear", 2, rope_theta=1e4),
    "the `max_position_embeddings` of": scaled("dynamic", 2),
    "an embedding_size of at least 4": scaled(**SCALINGS[1][0]),
    "'low_freq_factor' < 'high_freq_fa": scaled(**(SCALINGS[2][0] | {"low_freq_factor": 4})),
    r"shape \(seq_length, 4\), got shape \(3, 2, 4\)": lambda: rope(4, (3, 2, 4)),
    r"shape \(seq_length, 4\), got shape \(3, 5\)": lambda: rope(4, (3, 5)),
    r"positions of shape \(3,\), got shape \(2,\)": lambda: rope(4, (3, 2, 4), jnp.arange(2)),
    r"positions .* \(3,\), got shape \(3, 2\)": lambda: rope(4, (3, 2, 4), jnp.ones((3, 2), int)),
    "jnp.array": lambda: rope(4, (3, 2, 4), [0, 1, 2]),
    "integers or floats, got dtype bool": lambda: rope(4, (3, 2, 4), True),
    "must be even": lambda: rope(3),
    "integer of at least 0": lambda: rope(-2),
    "needs either `weight`, or": lambda: nn.Embedding(),
    "and `key`\\.": lambda: nn.Embedding(2, 3),
    r"got shape \(3,\)": lambda: nn.Embedding(weight=jnp.ones(3)),
    "`weight` to be an array, got a list": lambda: nn.Embedding(weight=[[1.0, 2.0]]),
    r"shape \(3, None\), given by the": lambda: nn.Embedding(3, weight=jnp.ones((2, 3))),
    "embedding_size must be": lambda: nn.Embedding(2, -1, key=jr.key(0)),
    r"Embedding expected x of shape \(\).*jax.vmap": (
        lambda: nn.Embedding(5, 3, key=jr.key(0))(jnp.array([1, 2]))
    ),
}


@pytest.mark.parametrize("message", UNFIT)
def test_wrong_arguments_are_refused(message):
    with pytest.raises((TypeError, ValueError), match=message):
        UNFIT[message]()


CELLS = ["GRUCell", "LSTMCell"]


def hidden_for(name, size=4):
    return (jnp.ones(size), jnp.ones(size)) if name == "LSTMCell" else jnp.ones(size)


def test_same_key_gives_the_cells_of_equinox(getkey):
    x = normal(getkey(), (3,))

    @eqx.filter_jit
    def cells_and_outputs(key):
        cells = [
            [
                getattr(module, name)(3, 4, use_bias, key=jr.clone(key))
                for name, use_bias in (("GRUCell", True), ("LSTMCell", False))
            ]
            for module in (nn, equinox.nn)
        ]
        return cells, [
            [cell(x, hidden_for(name)) for cell, name in zip(each, CELLS, strict=True)]
            for each in cells
        ]

    (ours, theirs), outputs = cells_and_outputs(getkey())
    for own, their in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(own, their)
    assert_close(*outputs)


def test_initializers_draw_the_parameters_of_cells(getkey):
    initializers = jax.nn.initializers
    options = {"weight_init": initializers.orthogonal(), "bias_init": initializers.zeros}
    make = lambda key: [getattr(nn, name)(3, 4, **options, key=jr.clone(key)) for name in CELLS]
    for cell in eqx.filter_jit(make)(getkey()):
        weight = np.asarray(cell.weight_hh)
        np.testing.assert_allclose(weight.T @ weight, np.eye(4), atol=1e-5)
        assert not np.any(cell.bias)


@pytest.mark.parametrize("name", CELLS)
def test_wrong_shapes_of_a_cell_are_refused(name, getkey):
    cell = getattr(nn, name)(3, 4, key=getkey())
    with pytest.raises(ValueError, match=rf"{name} expected input of shape \(3,\), got .*\(5,\)"):
        cell(jnp.ones(5), hidden_for(name))
    with pytest.raises(ValueError, match=rf"{name} expected hidden.* of shape \(4,\), got"):
        cell(jnp.ones(3), hidden_for(name, 2))
