"""The chunked cross-entropy equals the plain cross-entropy and needs less memory."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import eqxlike as eqx
from eqxlike import nn
from eqxlike.nn import _cross_entropy
from tests.nn.arrays import assert_close, normal
from tests.nn.mistakes import each_mistake

OPTIONS = {"ignore_index": -100, "label_smoothing": 0.1, "z_loss": 0.01}


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    """Makes the chunks so small that the arrays of these tests have several chunks."""
    monkeypatch.setattr(_cross_entropy, "_SMALL", 2**6)


def plain(features, readout, labels, ignore_index=None, label_smoothing=0.0, z_loss=0.0):
    """The definition, which computes all logits at once."""
    weight, *bias = readout
    logits = features @ weight.T
    logits += jnp.broadcast_to(bias[0], logits.shape) if bias else 0
    log_p = jax.nn.log_softmax(logits)
    of_label = jnp.take_along_axis(log_p, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    losses = -(1 - label_smoothing) * of_label - label_smoothing * log_p.mean(-1)
    losses += z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    counts = labels.astype(int) != ignore_index if ignore_index else jnp.ones_like(labels, bool)
    return losses.mean(where=counts)


def layer(readout):
    """A layer with the weight and the bias of `readout`."""
    linear = nn.Linear(1, 1, len(readout) > 1, key=jr.key(0))
    return eqx.tree_at(lambda linear: jax.tree.leaves(linear), linear, list(readout))


def ours(features, readout, labels, **options):
    return nn.cross_entropy(features, layer(readout), labels, **options)


def example(getkey, shape=(3, 7), size=5, classes=23, dtype=jnp.float64):
    arrays = [normal(getkey(), each, dtype) for each in ((*shape, size), (classes, size), classes)]
    labels = jr.randint(getkey(), shape, 0, classes)
    return arrays[0], tuple(arrays[1:]), labels


def sum_of_groups(loss):
    """A weighted sum of the losses of groups. `vmap` over groups shares the readout."""

    def total(features, readout, labels):
        means = jax.vmap(lambda x, y: loss(x, readout, y))(features, labels)
        return means @ jnp.arange(1.0, 1.0 + len(means))

    return total


def test_value_and_derivatives_equal_the_plain_formula(getkey):
    """Compares first and second derivatives in both modes, also under `vmap`."""
    with jax.enable_x64(True):
        features, readout, labels = example(getkey)
        labels = labels.at[0, :3].set(-100)

        @functools.partial(jax.jit, static_argnums=0)
        def derivatives(loss, features, readout, labels):
            loss = functools.partial(loss, **OPTIONS)
            one = lambda features, readout: loss(features, readout, labels)
            ensemble = jax.tree.map(lambda each: jnp.stack([each, 2 * each]), readout)
            return [
                jax.value_and_grad(one, (0, 1))(features, readout),
                jax.grad(one)(features, readout),
                jax.grad(one, 1)(features, readout),
                jax.jacfwd(one, 1)(features, readout),
                jax.jacrev(jax.jacrev(one, 1), 0)(features, readout),
                jax.jacfwd(jax.grad(one, 1), 1)(features, readout),
                jax.vmap(jax.grad(loss, 1), (0, None, 0))(features, readout, labels),
                jax.vmap(jax.grad(one, 1), (None, 0))(features, ensemble),
                jax.grad(sum_of_groups(loss), (0, 1))(features, readout, labels),
                jax.jacfwd(sum_of_groups(loss))(features, readout, labels),
            ]

        found, expected = (derivatives(loss, features, readout, labels) for loss in (ours, plain))
        assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_readout_may_be_an_embedding_or_an_array(getkey):
    features, (weight, _), labels = example(getkey, dtype=jnp.float32)
    expected = plain(features, (weight,), labels)
    for readout in (layer([weight]), nn.Embedding(weight=weight), weight, np.asarray(weight)):
        np.testing.assert_allclose(nn.cross_entropy(features, readout, labels), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_close_to_float64(dtype, getkey):
    """The number of tokens is so large that 1 / number underflows in float16."""
    features, readout, labels = example(getkey, (2**12,), 8, 64, dtype)
    readout = tuple(each / 4 for each in readout)
    value, gradients = jax.jit(jax.value_and_grad(ours, (0, 1)))(features, readout, labels)
    assert value.dtype == jnp.float32
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda each: jnp.asarray(each, jnp.float64), (features, readout))
        expected, exact = jax.jit(jax.value_and_grad(plain, (0, 1)))(*exact, labels)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(exact), strict=True):
        assert one.dtype == dtype
        one, other = np.asarray(one, np.float64), np.asarray(other)
        error = np.abs(one - other).max()
        least = float(jnp.finfo(dtype).smallest_subnormal)
        assert error <= 4 * float(jnp.finfo(dtype).eps) * np.abs(other).max() + least


def test_wrong_labels_are_nan_and_a_batch_without_tokens_is_zero(getkey):
    features, readout, labels = example(getkey, classes=300, dtype=jnp.float32)
    step = jax.jit(jax.value_and_grad(ours, (0, 1)), static_argnames="ignore_index")
    for wrong in (-1, 300):
        value, gradients = step(features, readout, labels.at[0, 0].set(wrong))
        for found in (value, *jax.tree.leaves(gradients)):
            assert jnp.isnan(found).any()
    for found in jax.tree.leaves(step(features, readout, jnp.full((3, 7), -1), ignore_index=-1)):
        np.testing.assert_array_equal(found, jnp.zeros_like(found))
    labels = (labels % 200).astype(jnp.uint8)  # uint8 cannot represent 300
    value, _ = step(features, readout, labels, ignore_index=-100)
    np.testing.assert_allclose(value, plain(features, readout, labels), rtol=1e-5)
    assert ours(features[:, :0], readout, labels[:, :0]) == 0


@pytest.mark.parametrize("function", [lambda loss: loss, sum_of_groups])
def test_memory_holds_one_chunk(function, monkeypatch, getkey):
    monkeypatch.undo()
    arrays = example(getkey, (4, 1024), 8, 4096, jnp.float32)

    def num_bytes(loss):
        program = jax.jit(jax.value_and_grad(function(loss), (0, 1))).lower(*arrays).compile()
        return program.memory_analysis().temp_size_in_bytes

    found = num_bytes(ours)
    assert found < 0.35 * num_bytes(plain)
    assert found < 4 * 4096 * 4096  # the size of all logits


def of_shards(features, readout, labels):
    count = (labels != -1).sum().astype(jnp.float32)
    total = ours(features, readout, labels, ignore_index=-1) * count
    return jax.lax.psum(total, "devices") / jax.lax.psum(count, "devices")


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit, None])
def test_tokens_and_classes_may_be_sharded(axis_type, getkey):
    """Shards with `jax.jit`, or with `jax.shard_map` if `axis_type` is `None`."""
    features, readout, labels = example(getkey, (4, 6), 4, 32, jnp.float32)
    arrays = features, readout, labels.at[0].set(-1)
    step = jax.value_and_grad(functools.partial(ours, ignore_index=-1), (0, 1))
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(axis_type or AxisType.Auto,))
    split, whole = P("devices"), P()
    if axis_type is None:
        mapped = jax.shard_map(
            of_shards, mesh=mesh, in_specs=(split, whole, split), out_specs=whole
        )
        assert_close(jax.jit(jax.value_and_grad(mapped, (0, 1)))(*arrays), step(*arrays))
        return
    for tokens, classes in [(split, whole), (whole, split)]:
        specs = (tokens, (classes, classes), tokens)
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        with jax.set_mesh(mesh):
            found = jax.jit(step)(*jax.device_put(arrays, shardings))
        assert_close(found, step(*arrays))


def call(features=(2, 3), readout=None, labels=(2,), dtype=int, **options):
    readout = jnp.ones((5, 3)) if readout is None else readout
    arrays = jnp.ones(features), readout, jnp.zeros(labels, dtype)
    return lambda: nn.cross_entropy(*arrays, **options)


MISTAKES = {
    ValueError: {
        r"shape \(\.\.\., 3\)": call((2, 4)),
        r"\(2, 3\) and \(3,\)": call(labels=(3,)),
        "label_smoothing must be from 0 to 1": call(label_smoothing=1.5),
    },
    TypeError: {
        "0 to 4; got dtype float32. For labels -1": call(dtype=float),
        r"array of shape \(3,\) and": call(readout=jnp.ones(3)),
        "with a weight None": call(readout=jnp.tanh),
        "ignore_index must be an integer, got 1.5": call(ignore_index=1.5),
    },
}


@each_mistake(MISTAKES)
def test_mistakes_are_refused(error, words, call):
    with pytest.raises(error, match=words):
        call()


def test_export_for_any_number_of_tokens():
    (tokens,) = jax.export.symbolic_shape("tokens")
    weight = jnp.arange(12.0).reshape(4, 3) / 10
    step = jax.jit(jax.value_and_grad(lambda x, y: nn.cross_entropy(x, weight, y, ignore_index=9)))
    exported = jax.export.export(step)(
        jax.ShapeDtypeStruct((tokens, 3), "float32"), jax.ShapeDtypeStruct((tokens,), "int32")
    )
    arguments = jnp.arange(15.0).reshape(5, 3), jnp.array([0, 3, 9, 1, 2])
    for found, expected in zip(exported.call(*arguments), step(*arguments), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
