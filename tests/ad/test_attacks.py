"""Former mistakes of `ad.compare`."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from eqxlike import ad

compare = functools.partial(ad.compare, rounds=1, modes=[ad.Reverse()])
X = jnp.array([0.3, -1.2, 2.0])


class Scaled(ad.Mode):
    """Reverse mode, whose gradient is multiplied by a factor."""

    factor: Any

    def value_and_grad(self, function, arrays):
        output, gradient = ad.Reverse().value_and_grad(function, arrays)
        return output, [self.factor * each for each in gradient]


def energy(x):
    return jnp.sum(jnp.sin(x) ** 2)


# Random numbers, which differ in float64


def noisy(x, key):
    return jnp.sum(x**2 * jax.random.normal(key, x.shape))


def named_dtype(x, key):
    return jnp.sum(x**2 * jax.random.normal(key, x.shape, jnp.float32).astype(x.dtype))


def test_reference_that_draws_other_random_numbers_is_refused():
    message = (
        "`ad.compare`: The reference, Reverse(), is computed in float64, where the function draws "
        "other random numbers, because `jax.random` uses more bits. Draw them outside of the "
        "function, or pass their dtype, such as `jax.random.normal(key, shape, jnp.float32)`. "
        "Pass another `reference`, such as `ad.Reverse()`, or `reference=None`."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        compare(noisy, X, jax.random.key(0), reference=ad.Reverse())


def test_random_numbers_of_a_fixed_dtype_equal_numbers_of_the_reference():
    # Reusing the key in each call is no error.
    with jax.debug_key_reuse(True):
        (row,) = compare(named_dtype, X, jax.random.key(0)).rows
    assert (row.verdict, row.explanation) == ("ok", "")


# Underflow


@pytest.mark.parametrize(
    ("function", "dtype", "factor", "verdict"),
    [
        (lambda x: jnp.exp(-120 - x), "float32", 1.0, "ok"),
        (lambda x: jnp.exp(-120 - x), "float64", 1.5, "wrong"),
        (lambda x: jnp.sin(x) * 1e-7, "float16", 1.0, "ok"),
        (lambda x: jnp.sin(x) * 2e-5, "float16", 1.5, "wrong"),
    ],
)
def test_gradient_may_differ_by_numbers_that_underflow(function, dtype, factor, verdict):
    with jax.enable_x64(dtype == "float64"):
        x = jnp.asarray(X, dtype)
        (row,) = compare(lambda x: jnp.sum(function(x)), x, modes=[Scaled(factor)]).rows
    assert row.verdict == verdict
    assert dtype != "float32" or row.max_relative_error == 0
