"""The initial state of a training, loss scales, and checks for finite numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eqxlike import filter_jit, is_array, nn, tree_at, tree_equal
from eqxlike.train import DynamicLossScale, TrainState, all_finite, tree_where


@pytest.fixture
def model():
    weight = jnp.asarray(1.0)
    assert weight.weak_type
    arrays = {"weight": weight, "again": weight, "count": jnp.arange(3)}
    return arrays | {"constant": np.ones(2, np.float32), "name": "not an array"}


def test_starts_at_step_zero_with_strongly_typed_arrays_of_the_model(model, getkey):
    key, adam = getkey(), optax.adam(0.1)
    state = TrainState.create(model, adam, key=key)
    assert (state.step, state.step.dtype, bool(state.is_halted)) == (0, jnp.int32, False)
    assert state.key == key
    assert (state.loss_scale, state.model_state) == (None, None)
    assert tree_equal(state.model["count"], model["count"])
    assert state.model["name"] == model["name"]
    leaves = [leaf for leaf in jax.tree.leaves(state) if is_array(leaf)]
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert not any(jax.typeof(leaf).weak_type for leaf in leaves)
    assert state.model["weight"].dtype == model["weight"].dtype
    # The optimiser only gets floating-point arrays.
    moments = state.optimiser_state[0].mu
    assert (moments["weight"], moments["count"], moments["name"]) == (0, None, None)
    old_style = jax.random.PRNGKey(0)
    assert (TrainState.create(model, adam, key=old_style).key == old_style).all()


def test_no_array_is_shared(model, getkey):
    optimiser, model = optax.lookahead(optax.sgd(0.1), 5, 0.5), optax.LookaheadParams(model, model)
    key, options = getkey(), {"model_state": {"a": jnp.ones(2)}, "loss_scale": DynamicLossScale()}
    state = TrainState.create(model, optimiser, key=key, **options)
    leaves = [leaf for leaf in jax.tree.leaves(state) if is_array(leaf)]
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    numbers = [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in leaves]
    assert len({each.unsafe_buffer_pointer() for each in numbers}) == len(numbers)
    for leaf in leaves:
        leaf.delete()
    given = jax.tree.leaves((key, model, options))
    assert not any(leaf.is_deleted() for leaf in given if hasattr(leaf, "is_deleted"))


def test_array_with_two_paths_warns_unless_it_is_shared_or_not_trained():
    layers = [nn.Linear(2, 2, use_bias=False, key=jax.random.key(0))] * 2
    tied = r"model\[0\]\.weight = model\[1\]\.weight\. .* Tie them with `nn\.Shared`"
    with pytest.warns(UserWarning, match=tied):
        TrainState.create(layers, optax.sgd(0.1), key=jax.random.key(0))
    shared = nn.Shared(layers, lambda pair: pair[1].weight, lambda pair: pair[0].weight)
    integers = jnp.arange(3)
    for model in (shared, nn.freeze(layers), [integers] * 2):
        TrainState.create(model, optax.sgd(0.1), key=jax.random.key(0))


def test_committed_arrays_stay_and_uncommitted_arrays_may_be_moved():
    ones = np.ones(2, np.float32)
    placed, free = jax.device_put(ones, jax.devices()[1]), jax.device_put(ones)
    first, second = TrainState.create((placed, free), optax.sgd(0.1), key=jax.random.key(0)).model
    assert (first.sharding, first.committed, second.committed) == (placed.sharding, True, False)


def test_bad_arguments_are_refused(model):
    adam, key = optax.adam(0.1), jax.random.key(0)
    no_key = r"create expected a key, such as `jax.random.key\(0\)`; got"
    old_key, keys = np.zeros(2, np.int32), jax.random.split(key, 3)
    one_key = r"expected one key, of shape \(\); got .* shape \(3,\)"
    strings = {"a": [np.array(["b"])]}
    transformation = r"create expected the optimiser .* optax.GradientTransformation, .* 0\.1\."
    scale = r"loss_scale to be a train.DynamicLossScale .* got 1024"
    for given, optimiser, options, error, message in [
        (model, adam, {"key": 0}, TypeError, no_key),
        (model, adam, {"key": old_key}, TypeError, no_key),
        (model, adam, {"key": keys}, ValueError, one_key),
        (nn.Linear, adam, {}, TypeError, r"got <class .*Linear'>: call it, `Linear\("),
        (strings, adam, {}, TypeError, r"got model\['a'\]\[0\] \(<U1\)\. Keep"),
        (model, 0.1, {}, TypeError, transformation),
        (model, adam, {"loss_scale": 1024}, TypeError, scale),
    ]:
        with pytest.raises(error, match=message):
            TrainState.create(given, optimiser, **{"key": key, **options})
    model["count"].delete()
    deleted = r"create got a model with arrays that were donated .* deleted: model\['count'\]\."
    with pytest.raises(RuntimeError, match=deleted):
        TrainState.create(model, adam, key=key)


# --- finite numbers ---


def test_single_nonfinite_number_is_found():
    good = {"ones": np.ones((2, 3)), "count": np.arange(2), "empty": np.ones((0, 2)), "no": None}
    cases = []
    for dtype in (np.float16, np.float32, np.complex64):
        spoilt = np.ones(4, dtype)
        spoilt[2] = np.nan
        # The largest finite numbers.
        largest = np.full(4, np.finfo(dtype).max, dtype)
        cases += [(np.ones(4, dtype), True), (spoilt, False), (largest, True), (-largest, True)]
        # For large arrays, XLA's maximum on a CPU ignores NaN.
        many = np.ones(10_000, dtype)
        many[7_000] = np.nan
        cases += [(many, False), (np.full(10_000, np.finfo(dtype).max, dtype), True)]
    for bad in (np.inf, -np.inf):
        cases.append((np.array([1, 1, bad, 1], np.float32), False))
    for parts in ((np.inf, 1.0), (1.0, np.nan), (1.0, -np.inf), (np.inf, np.nan)):
        cases.append((np.array(complex(*parts), np.complex64), False))
    # These numbers are finite, although their absolute value overflows.
    largest = np.full(4, complex(*[np.finfo("float32").max] * 2), np.complex64)
    cases += [(largest, True), (-largest, True)]
    # Frozen arrays are checked too.
    layer = nn.freeze(nn.Linear(2, 2, key=jax.random.key(0)))
    spoilt = tree_at(lambda layer: layer.bias, layer, np.full(2, np.nan, np.float32))
    cases += [(layer, True), (spoilt, False), ((), True)]
    trees = [good | {"last": tree} for tree, _ in cases]
    found = filter_jit(lambda trees: [all_finite(tree) for tree in trees])(trees)
    assert list(map(bool, found)) == [expected for _, expected in cases]
    assert all_finite(())


def test_tree_where_returns_one_of_two_trees():
    # The other tree may contain NaN.
    one = {"a": jnp.ones(2), "b": np.arange(2), "c": "x"}
    other = {"a": jnp.full(2, jnp.nan), "b": np.arange(2, 4), "c": "x"}
    for condition, expected in ((True, one), (False, other)):
        chosen = tree_where(jnp.array(condition), one, other)
        np.testing.assert_array_equal(chosen["a"], expected["a"])
        np.testing.assert_array_equal(chosen["b"], expected["b"])
        assert chosen["c"] == "x"
    with pytest.raises(ValueError, match="different pytree"):
        tree_where(jnp.array(True), {"a": jnp.ones(2)}, {"b": jnp.ones(2)})


# --- the scale of a loss ---


def test_losses_are_scaled_in_float32_and_gradients_are_unscaled_exactly():
    for dtype in ("float16", "float32"):
        scaled = DynamicLossScale(2.0**15).scale_loss(jnp.array(3, dtype))
        assert (scaled.dtype, scaled) == (jnp.float32, 3 * 2**15)
    assert DynamicLossScale(4.0).scale_loss(1.5) == 6
    # Losses without a derivative are not changed, because the gradient refuses them.
    for loss in (None, jnp.array(1), jnp.array(1j)):
        assert DynamicLossScale().scale_loss(loss) is loss
    float32 = np.random.default_rng(0).normal(size=100).astype(np.float32)
    pairs = [
        (float32 * np.float32(2**10), float32),
        (np.array([2.0**10, 2.0**-14, np.inf], "f2"), np.array([1, 2.0**-24, np.inf], "f2")),
        (np.array([2**10 + 2**9 * 1j], np.complex64), np.array([1 + 0.5j], np.complex64)),
        (None, None),
        (np.arange(2, dtype=np.int32), np.arange(2, dtype=np.int32)),
    ]
    unscaled = filter_jit(DynamicLossScale(2.0**10).unscale)([scaled for scaled, _ in pairs])
    assert tree_equal(unscaled, [expected for _, expected in pairs])


def test_scale_decreases_at_an_overflow_and_increases_after_a_period_without_overflow():
    period, factor, minimum, maximum = 3, 4.0, 1.0, 64.0
    are_finite = np.random.default_rng(0).random(200) < 0.7
    scale, num_good, expected = 16.0, 0, []
    for is_finite in are_finite:
        num_good = num_good + 1 if is_finite else 0
        if not is_finite:
            scale = max(scale / factor, minimum)
        elif num_good == period:
            scale, num_good = min(scale * factor, maximum), 0
        expected.append(scale)
    limits = {"minimum": minimum, "maximum": maximum}
    loss_scale = DynamicLossScale(16, period=period, factor=factor, **limits)

    def adjust(loss_scale, is_finite):
        adjusted = loss_scale.adjust(is_finite)
        return adjusted, (adjusted.scale, adjusted.is_smallest)

    _, (scales, are_smallest) = jax.lax.scan(adjust, loss_scale, are_finite)
    np.testing.assert_array_equal(scales, expected)
    np.testing.assert_array_equal(are_smallest, np.array(expected) == 1)
    assert set(expected) == {1, 4, 16, 64}


def test_bad_settings_of_a_loss_scale_are_refused():
    order = "0 < minimum <= scale <= maximum"
    period = "period must be an integer of at least 1"
    for options, message in [
        ({"scale": 0.5}, f"{order}.*scale=0.5"),
        ({"scale": 2.0**25}, order),
        ({"scale": float("nan")}, order),
        ({"minimum": 0}, f"{order}.*minimum=0"),
        ({"maximum": float("inf")}, "maximum=inf"),
        ({"factor": 1}, "a factor above 1, got 1"),
        ({"factor": float("inf")}, "a factor above 1, got inf"),
        ({"period": 0}, f"{period}, got 0"),
        ({"period": 2.5}, f"{period}, got 2.5"),
    ]:
        with pytest.raises(ValueError, match=message):
            DynamicLossScale(**options)
    ends = DynamicLossScale(1.0, minimum=1.0, maximum=1.0)
    assert (ends.scale, ends.counter, ends.period, ends.factor) == (1, 0, 2000, 2)
    assert (DynamicLossScale().scale, DynamicLossScale().maximum) == (2**15, 2**24)
