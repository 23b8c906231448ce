import jax.numpy as jnp
import numpy as np
import pytest

from eqxlike.train import all_finite, tree_where


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32, jnp.complex64])
def test_one_number_that_is_not_finite_is_found(bad, dtype):
    good = {"ones": jnp.ones((2, 3)), "count": jnp.arange(2), "empty": jnp.ones((0, 2)), "no": None}
    assert all_finite(good | {"last": jnp.ones(4, dtype)})
    assert not all_finite(good | {"last": jnp.ones(4, dtype).at[2].set(bad)})


def test_largest_numbers_are_finite():
    assert all_finite([jnp.finfo(dtype).max * jnp.ones(3, dtype) for dtype in ("f2", "f4")])


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
