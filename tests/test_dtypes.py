"""What the package asks of a dtype."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from eqxlike._dtypes import is_key


@pytest.mark.parametrize("make", [jr.key, lambda seed: jr.split(jr.key(seed), 3)])
def test_typed_keys_are_known_as_arrays_structs_and_tracers(make):
    keys = make(0)
    seen = []
    jax.eval_shape(lambda traced: seen.append(is_key(traced)), keys)
    assert is_key(keys)
    assert is_key(jax.eval_shape(lambda: keys))
    assert seen == [True]


@pytest.mark.parametrize(
    "value", [jr.PRNGKey(0), jnp.zeros(2), np.zeros(2, np.uint32), 0, None, "key", jr.key]
)
def test_nothing_else_is_a_key(value):
    assert not is_key(value)
