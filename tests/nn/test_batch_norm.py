"""`BatchNorm` on batches, on several devices and in inference, against Equinox and formulas."""

import copy
import dataclasses

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from tests.nn.arrays import assert_close, normal
from tests.nn.mistakes import each_mistake

modes = pytest.mark.parametrize("mode", ["ema", "batch"])


def batch_norm(size=3, *args, **options):
    """A layer with `size` channels, and its state."""
    return nn.make_with_state(nn.BatchNorm)(size, *args, **({"mode": "batch"} | options))


def over_batch(norm, axis_name="batch", **options):
    def call(x, state):
        return norm(x, state, **options)

    return jax.vmap(call, in_axes=(0, None), out_axes=(0, None), axis_name=axis_name)


def run(library, shape, num_steps=3, **options):
    """The outputs of training steps and of a call in inference, and the final state."""
    norm, state = library.nn.make_with_state(library.nn.BatchNorm)(3, "batch", **options)
    xs = np.random.default_rng(0).normal(2.0, 3.0, (num_steps, 4, *shape)).astype(np.float32)

    @jax.jit
    def steps(state):
        state, outputs = jax.lax.scan(lambda state, x: over_batch(norm)(x, state)[::-1], state, xs)
        y, state = over_batch(norm, inference=True)(xs[-1], state)
        return outputs, y, jax.tree.leaves(state)

    return jax.tree.leaves(steps(state))


@pytest.mark.parametrize(
    ("mode", "shape", "options"),
    [
        ("ema", (3,), {"momentum": 0.1, "num_steps": 10, "channelwise_affine": False}),
        ("ema", (3,), {"inference": True}),
        ("batch", (3, 2, 2), {"momentum": 0.1, "num_steps": 10, "eps": 0.1}),
        ("batch", (3,), {"inference": True}),
    ],
)
def test_training_and_inference_equal_equinox(mode, shape, options):
    ours, theirs = (run(library, shape, mode=mode, **options) for library in (eqx, equinox))
    assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_fields_are_the_fields_of_equinox_and_a_missing_mode_is_ema_and_warns():
    ours, theirs = (
        [each.name for each in dataclasses.fields(library.nn.BatchNorm)]
        for library in (eqx, equinox)
    )
    assert ours == [*theirs, "batched", "unbiased"]
    for library in (equinox, eqx):
        with pytest.warns(UserWarning, match="mode"):
            assert library.nn.BatchNorm(3, "batch").mode == "ema"


@modes
def test_batched_layer_equals_vmap(mode, getkey):
    x = 3 * np.asarray(normal(getkey(), (4, 3, 2))) + 2
    one_by_one, state = batch_norm(3, "batch", mode=mode)
    at_once, same_state = batch_norm(mode=mode, batched=True)

    def loss(norm, x, state):
        y, state = norm(x, state)
        return jnp.sum(jnp.sin(y)), (y, state)

    gradient = eqx.filter_jit(jax.value_and_grad(loss, argnums=1, has_aux=True))
    expected = gradient(over_batch(one_by_one), x, state)
    found = gradient(at_once, x, same_state)
    assert_close([found[0][1], found[1]], [expected[0][1], expected[1]])


@modes
def test_first_and_second_derivatives_equal_the_formula(mode, getkey):
    norm, state = batch_norm(3, "batch", mode=mode)
    x, tangent, to = (normal(getkey(), (4, 3, 2)) for _ in range(3))
    weight, bias = jnp.array([1.0, 2.0, 3.0]), jnp.array([3.0, 2.0, 1.0])

    def layer(weight, bias, x):
        changed = eqx.tree_at(lambda norm: (norm.weight, norm.bias), norm, (weight, bias))
        return over_batch(changed)(x, state)[0]

    def formula(weight, bias, x):
        mean = jnp.mean(x, (0, 2), keepdims=True)
        variance = jnp.mean((x - mean) ** 2, (0, 2), keepdims=True)
        normed = (x - mean) / jnp.sqrt(variance + norm.eps)
        return normed * weight[:, None][None] + bias[:, None][None]

    @jax.jit
    def derivatives(*at):
        def of(function):
            loss = lambda *at: jnp.sum((function(*at) - to) ** 3)
            return jax.jvp(jax.grad(loss, (0, 1, 2)), at, (bias, weight, tangent))

        return of(layer), of(formula)

    ours, expected = map(jax.tree.leaves, derivatives(weight, bias, x + 5))
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3 * np.abs(other).max())


def test_statistics_over_devices_equal_statistics_of_the_whole_batch(getkey):
    x = normal(getkey(), (2, 4, 3))
    norm, state = batch_norm(3, "device", batched=True)
    axes = {"in_axes": (0, None), "out_axes": (0, None), "axis_name": "device"}
    out, _ = eqx.filter_pmap(lambda x, state: norm(x, state), **axes)(x, state)
    norm, state = batch_norm(3, ["device", "batch"])
    over_axes, _ = jax.jit(over_batch(over_batch(norm), "device"))(x, state)
    assert_close(over_axes, out)
    flat = np.asarray(x).reshape(8, 3)
    expected = (flat - flat.mean(0)) / np.sqrt(flat.var(0) + 1e-5)
    np.testing.assert_allclose(np.reshape(out, (8, 3)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("mode", "check_vma"), [("ema", True), ("batch", True), ("batch", False)])
def test_statistics_inside_shard_map_equal_statistics_of_the_whole_batch(mode, check_vma, getkey):
    x = normal(getkey(), (8, 3))

    def outputs(x, axis_name):
        norm, state = batch_norm(3, axis_name, mode=mode)
        call = over_batch(norm, "examples")
        out, new = call(x, copy.copy(state))
        # All devices have the same second batch.
        _, new = call(jnp.ones((4, 3)), new)
        gradient = jax.grad(lambda x: jnp.sum(call(x, copy.copy(state))[0] ** 3))(x)
        return out, gradient, jax.tree.leaves(new)

    mesh = jax.make_mesh((2,), ("device",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = jax.sharding.PartitionSpec("device"), jax.sharding.PartitionSpec()
    sharded = jax.shard_map(
        lambda x: outputs(x, ("examples", "device")),
        mesh=mesh,
        in_specs=rows,
        out_specs=(rows, rows, whole),
        check_vma=check_vma,
    )
    ours, expected = jax.jit(sharded)(x), jax.jit(lambda x: outputs(x, "examples"))(x)
    assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@modes
def test_training_continues_the_averages_from_given_statistics(mode):
    given, momentum = np.array([[5.0, 0.0], [0.01, 1.0]]), 0.9
    norm, state = batch_norm(2, mode=mode, momentum=momentum, batched=True)
    index = norm.ema_state_index if mode == "ema" else norm.batch_state_index

    statistics = tuple(jnp.asarray(each, jnp.float32) for each in given)
    by_method = norm.set_statistics(copy.copy(state), *statistics)
    by_index = copy.copy(state).set(index, statistics)
    # The third member of this ensemble starts with the initial statistics.
    members = jax.tree.map(lambda *each: jnp.stack(each), by_method, by_index, state)
    batches = np.random.default_rng(0).normal(5.0, 0.1, (20, 8, 2)).astype(np.float32)

    @jax.jit
    @eqx.filter_vmap(in_axes=(0, None), out_axes=0)
    def means_in_inference(state, batches):
        def step(state, x):
            state = norm(x, state)[1]
            out, state = norm(jnp.zeros((1, 2)), state, inference=True)
            return state, out

        return jax.lax.scan(step, state, batches)[1]

    by_method, *found = means_in_inference(members, batches)[:, :, 0]
    np.testing.assert_array_equal(by_method, found[0])
    for start, outputs in zip((given, np.zeros((2, 2))), found, strict=True):
        average = start
        for step, (batch, out) in enumerate(zip(np.float64(batches), outputs, strict=True), 1):
            # Without given statistics, "ema" starts with the statistics of the first batch.
            is_first = step == 1 and mode == "ema" and start is not given
            share = 0 if is_first else momentum
            average = share * average + (1 - share) * np.array([batch.mean(0), batch.var(0)])
            is_biased = mode == "batch" and start is not given
            mean, variance = average / (1 - momentum**step if is_biased else 1)
            expected = -mean / np.sqrt(variance + norm.eps)
            np.testing.assert_allclose(out, expected, rtol=2e-3)


def test_inference_leaves_the_state_unchanged(getkey):
    norm, state = batch_norm(3, "batch", inference=True)
    before, x = jax.tree.leaves(state), normal(getkey(), (3,))
    out, state = norm(x, state)
    # Before training, inference scales by one.
    np.testing.assert_allclose(out, x, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(state), before, strict=True):
        assert one is other


def test_inference_averages_over_the_batches_so_far():
    norm, state = batch_norm(momentum=0.5, batched=True, eps=0.0)
    batches = np.random.default_rng(0).normal(2.0, 5.0, (3, 8, 3)).astype(np.float32)
    step = eqx.filter_jit(norm)
    for batch in batches:
        _, state = step(batch, state)
    mean, variance = (
        np.average(each(batches.astype(np.float64), axis=1), axis=0, weights=[0.25, 0.5, 1.0])
        for each in (np.mean, np.var)
    )
    out, _ = norm(batches[0], state, inference=True)
    expected = (batches[0] - mean[None]) / np.sqrt(variance)[None]
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


def test_after_constant_batches_inference_and_the_gradient_are_finite():
    norm, state = batch_norm(batched=True)

    @eqx.filter_jit
    def run(x, state):
        for _ in range(3):
            _, state = norm(x, state)
        return norm(x, state, inference=True)[0]

    constant = np.full((4, 3), 2, np.float32)
    np.testing.assert_allclose(run(constant, state), 0, atol=0.01)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(norm(x, state)[0] ** 2)))(constant)
    assert np.isfinite(gradient).all()


def test_statistics_of_half_precision_are_computed_in_float32(getkey):
    dtype = jnp.bfloat16
    # In bfloat16 the running mean would not change, because 1% is less than its precision.
    x = (100 + np.asarray(normal(getkey(), (64, 3)))).astype(dtype)
    norm, state = batch_norm(batched=True, dtype=dtype)
    out, state = eqx.filter_jit(norm)(x, state)
    mean, variance = state.get(norm.batch_state_index)
    exact = np.asarray(x, np.float64)
    assert (out.dtype, mean.dtype) == (dtype, jnp.float32)
    np.testing.assert_allclose(mean, 0.01 * exact.mean(0), rtol=1e-4)
    np.testing.assert_allclose(variance, 0.99 + 0.01 * exact.var(0), rtol=1e-4)


def call_with(*shape, **options):
    norm, state = batch_norm(**options)
    return norm(jnp.ones(shape), state)


MISTAKES = {
    ValueError: {
        "'batch' or 'ema', got 'mean'": lambda: nn.BatchNorm(3, "batch", mode="mean"),
        "Pass `axis_name=`.*`batched=True`": lambda: nn.BatchNorm(3, mode="ema"),
        "input_size must .* got -1": lambda: nn.BatchNorm(-1, "batch", mode="ema"),
        r"BatchNorm expected x of shape \(3, \.\.\.\), got shape \(4,\)": (
            lambda: call_with(4, axis_name="batch", inference=True)
        ),
        r"BatchNorm expected x of shape \(batch, 3, \.\.\.\), got shape \(3,\)": (
            lambda: call_with(3, batched=True)
        ),
        "at least two values for each channel": (
            lambda: call_with(1, 3, batched=True, unbiased=True)
        ),
    },
    NameError: {
        r"BatchNorm computes .* axis 'batch'.*in_axes=\(0, None\).*batched=True": (
            lambda: call_with(3, axis_name="batch")
        )
    },
}


@each_mistake(MISTAKES)
def test_mistakes_are_refused(error, words, call):
    with pytest.raises(error, match=words):
        call()
