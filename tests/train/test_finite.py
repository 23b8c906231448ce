import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxlike import nn, tree_at
from eqxlike.train import all_finite, tree_where


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32, jnp.complex64])
def test_one_number_that_is_not_finite_is_found(bad, dtype):
    good = {"ones": jnp.ones((2, 3)), "count": jnp.arange(2), "empty": jnp.ones((0, 2)), "no": None}
    assert all_finite(good | {"last": jnp.ones(4, dtype)})
    assert not all_finite(good | {"last": jnp.ones(4, dtype).at[2].set(bad)})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_largest_numbers_are_finite(dtype):
    largest = jnp.full(3, jnp.finfo(dtype).max, dtype)
    assert all_finite([largest, -largest])


def test_largest_complex_numbers_are_finite_though_their_absolute_value_is_not():
    largest = jnp.full(3, jnp.finfo("float32").max)
    numbers = [jax.lax.complex(*pair) for pair in ((largest, largest), (-largest, largest))]
    assert jnp.isinf(jnp.abs(numbers[0])).all()
    assert all_finite(numbers)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_either_part_of_a_complex_number_counts(bad):
    for parts in ((bad, 1.0), (1.0, bad), (bad, jnp.nan)):
        assert not all_finite(jax.lax.complex(*map(jnp.asarray, parts)))


def test_what_is_frozen_counts():
    layer = nn.freeze(nn.Linear(2, 2, key=jax.random.key(0)))
    assert all_finite(layer)
    assert not all_finite(tree_at(lambda layer: layer.bias, layer, jnp.full(2, jnp.nan)))


def test_keys_are_chosen_and_stay_usable():
    def choose(condition, key):
        new, other = jax.random.split(key)
        jax.random.normal(other)
        return tree_where(condition, {"key": new}, {"key": key})["key"]

    with jax.debug_key_reuse(True):
        key = jax.random.key(0)
        kept = jax.jit(choose)(False, jax.random.clone(key))
        new = jax.jit(choose)(True, jax.random.clone(key))
        np.testing.assert_array_equal(*map(jax.random.key_data, (kept, key)))
        expected = jax.random.split(key)[0]
        np.testing.assert_array_equal(*map(jax.random.key_data, (new, expected)))
        jax.random.normal(kept), jax.random.normal(new)


@pytest.mark.parametrize("condition", [True, False])
def test_one_of_two_trees_is_taken_whole(condition):
    # What is not taken may be NaN.
    one = {"a": jnp.ones(2), "b": np.arange(2), "c": "x"}
    other = {"a": jnp.full(2, jnp.nan), "b": np.arange(2, 4), "c": "x"}
    chosen = tree_where(jnp.array(condition), one, other)
    expected = one if condition else other
    np.testing.assert_array_equal(chosen["a"], expected["a"])
    np.testing.assert_array_equal(chosen["b"], expected["b"])
    assert chosen["c"] == "x"


def test_two_structures_are_refused():
    with pytest.raises(ValueError, match="different pytree"):
        tree_where(jnp.array(True), {"a": jnp.ones(2)}, {"b": jnp.ones(2)})
