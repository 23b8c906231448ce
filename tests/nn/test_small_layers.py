"""Layers of a few lines: dropout, tables of vectors, rotations, recurrent cells."""

import re

import equinox
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from tests.nn.arrays import normal


def test_same_key_drops_what_equinox_drops(getkey):
    x, key = normal(getkey(), (4, 5)), getkey()
    ours, theirs = nn.Dropout(0.3), equinox.nn.Dropout(0.3)
    np.testing.assert_array_equal(ours(x, key=key), theirs(x, key=jr.clone(key)))


@pytest.mark.parametrize("inference", [True, False])
def test_flag_of_the_call_of_dropout_goes_before_that_of_the_layer(inference, getkey):
    x = jnp.ones(100)
    y = nn.Dropout(0.5, inference=not inference)(x, key=getkey(), inference=inference)
    assert bool((y == x).all()) == inference


def test_dropout_needs_no_key_where_nothing_is_dropped():
    for layer in (nn.Dropout(0.5, inference=True), nn.Dropout(0), nn.Dropout(0.0)):
        assert layer(jnp.ones(3)).tolist() == [1, 1, 1]


def test_probability_one_gives_zeros_and_a_zero_gradient(getkey):
    gradient = jax.grad(lambda x: nn.Dropout(1.0)(x, key=getkey()).sum())(jnp.ones(3))
    assert gradient.tolist() == [0, 0, 0]


def test_dropout_keeps_the_dtype(getkey):
    for dtype, p in ((jnp.bfloat16, 0.5), (jnp.float16, jnp.array(0.5)), (jnp.complex64, 0.5)):
        x = np.ones(3, dtype)
        assert eqx.filter_eval_shape(nn.Dropout(p), x, key=getkey()).dtype == dtype


def test_array_probability_gets_no_gradient(getkey):
    key = getkey()
    gradient = jax.grad(lambda p: nn.Dropout(p)(jnp.ones(9), key=key).sum())(jnp.array(0.5))
    assert gradient == 0


def test_wrong_probability_is_refused():
    for bad in (-0.1, 2, float("nan"), np.float32(1.5)):
        message = rf"probability p in \[0, 1\], got {re.escape(repr(bad))}"
        with pytest.raises(ValueError, match=message):
            nn.Dropout(bad)


def test_what_is_no_probability_is_refused_with_its_type():
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


def test_missing_key_is_an_error_that_names_the_layer_in_its_model():
    model = nn.Sequential([nn.Identity(), nn.Sequential([nn.Dropout(0.5)])])
    with pytest.raises(RuntimeError, match=r"^Dropout at Sequential.layers\[1\].layers\[0\] needs"):
        model(jnp.ones(3))


def test_same_key_gives_equinox_table(getkey):
    key = getkey()
    ours, theirs = nn.Embedding(5, 3, key=key), equinox.nn.Embedding(5, 3, key=jr.clone(key))
    np.testing.assert_array_equal(ours.weight, theirs.weight)
    for index in (0, 4, -1, 7, np.int32(2), jnp.array(3)):
        np.testing.assert_array_equal(ours(index), theirs(index))


def test_table_that_is_given_tells_the_sizes():
    layer = nn.Embedding(weight=jnp.ones((2, 3)))
    assert (layer.num_embeddings, layer.embedding_size) == (2, 3)


def test_initializer_draws_the_table(getkey):
    layer = nn.Embedding(4, 4, weight_init=jax.nn.initializers.orthogonal(), key=getkey())
    np.testing.assert_allclose(layer.weight @ layer.weight.T, jnp.eye(4), atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs either `weight`, or"),
        ({"num_embeddings": 2, "embedding_size": 3}, "and `key`\\."),
        ({"weight": jnp.ones(3)}, r"got shape \(3,\)"),
        (
            {"weight": jnp.ones((2, 3)), "num_embeddings": 3},
            r"shape \(3, None\), given by the sizes",
        ),
        ({"num_embeddings": 2, "embedding_size": -1, "key": jr.key(0)}, "embedding_size must be"),
    ],
)
def test_unfit_arguments_of_a_table_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        nn.Embedding(**arguments)


@pytest.mark.parametrize(("arguments", "theta"), [((6,), 10_000.0), ((6, 100.0), 100.0)])
def test_rotation_is_a_product_of_complex_numbers(arguments, theta, getkey):
    x = np.asarray(normal(getkey(), (7, 6)), np.float64)
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
    """The angles by the equations of the papers, a feature at a time."""
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


def test_positions_and_scalings_are_those_of_the_papers(getkey):
    """Also of heads, which turn alike, under `vmap` along the heads, and from a traced offset."""
    x = np.asarray(normal(getkey(), (5, 3, 8)), np.float64)
    # The largest position is on either side of the original length.
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


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (2.0, "must be a mapping, such as"),
        ({"factor": 2.0}, "one of 'default', 'linear'.*got None"),
        ({"rope_type": "longrope"}, "got 'longrope'"),
        ({"rope_type": "linear"}, "needs 'factor'"),
        ({"rope_type": "linear", "factor": 0}, r"scaling\['factor'\] must be positive"),
        ({"rope_type": "linear", "factor": 2, "rope_theta": 1e4}, "takes 'factor'.*`theta=`"),
        ({"rope_type": "dynamic", "factor": 2}, "the `max_position_embeddings` of"),
        (SCALINGS[1][0], "an embedding_size of at least 4"),
        (SCALINGS[2][0] | {"low_freq_factor": 4}, "'low_freq_factor' < 'high_freq_factor'"),
    ],
)
def test_unfit_scaling_is_refused(scaling, message):
    with pytest.raises((TypeError, ValueError), match=message):
        nn.RotaryPositionalEmbedding(2, scaling=scaling)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (None, r"shape \(seq_length, 4\), got shape \(3, 2, 4\)"),
        (jnp.arange(2), r"positions of shape \(3,\), got shape \(2,\)"),
        (jnp.zeros((3, 2), int), r"positions of shape \(3,\), got shape \(3, 2\)"),
        ([0, 1, 2], "jnp.array"),
        (True, "integers or floats, got dtype bool"),
    ],
)
def test_unfit_positions_are_refused(positions, message):
    with pytest.raises((TypeError, ValueError), match=message):
        nn.RotaryPositionalEmbedding(4)(jnp.ones((3, 2, 4)), positions=positions)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.RotaryPositionalEmbedding(3), "must be even"),
        (lambda: nn.RotaryPositionalEmbedding(-2), "integer of at least 0"),
        (
            lambda: nn.RotaryPositionalEmbedding(4)(jnp.ones((3, 5))),
            r"shape \(seq_length, 4\), got shape \(3, 5\)",
        ),
        (
            lambda: nn.Embedding(5, 3, key=jr.key(0))(jnp.array([1, 2])),
            r"Embedding expected x of shape \(\).*jax.vmap",
        ),
    ],
)
def test_unfit_size_or_input_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


CELLS = ["GRUCell", "LSTMCell"]


def hidden_for(name, size=4):
    return (jnp.ones(size), jnp.ones(size)) if name == "LSTMCell" else jnp.ones(size)


@pytest.mark.parametrize(("name", "use_bias"), [("GRUCell", True), ("LSTMCell", False)])
def test_same_key_gives_equinox_cells(name, use_bias, getkey):
    x, hidden = normal(getkey(), (3,)), hidden_for(name)

    @eqx.filter_jit
    def cells_and_outputs(key):
        ours = getattr(nn, name)(3, 4, use_bias, key=key)
        theirs = getattr(equinox.nn, name)(3, 4, use_bias, key=jr.clone(key))
        return ours, theirs, [cell(x, hidden) for cell in (ours, theirs)]

    ours, theirs, outputs = cells_and_outputs(getkey())
    for own, their in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(own, their)
    for own, their in zip(*map(jax.tree.leaves, outputs), strict=True):
        np.testing.assert_allclose(own, their, rtol=1e-5, atol=1e-6)


def test_initializers_draw_the_parameters_of_cells(getkey):
    initializers = jax.nn.initializers
    options = {"weight_init": initializers.orthogonal(), "bias_init": initializers.zeros}
    make = lambda key: [getattr(nn, name)(3, 4, **options, key=jr.clone(key)) for name in CELLS]
    for cell in eqx.filter_jit(make)(getkey()):
        weight = np.asarray(cell.weight_hh)
        np.testing.assert_allclose(weight.T @ weight, np.eye(4), atol=1e-5)
        assert not np.any(cell.bias)


@pytest.mark.parametrize("name", CELLS)
def test_wrong_shapes_of_a_cell_are_named(name, getkey):
    cell = getattr(nn, name)(3, 4, key=getkey())
    with pytest.raises(ValueError, match=rf"{name} expected input of shape \(3,\), got .*\(5,\)"):
        cell(jnp.ones(5), hidden_for(name))
    with pytest.raises(ValueError, match=rf"{name} expected hidden.* of shape \(4,\), got"):
        cell(jnp.ones(3), hidden_for(name, 2))
