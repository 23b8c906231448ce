import equinox
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from eqxlike import nn


@pytest.mark.parametrize("slope", [0.25, 1, jnp.array([0.1, 0.2, 0.3]), jnp.ones((2, 3))])
def test_output_is_that_of_equinox(slope, getkey):
    x = jr.normal(getkey(), (2, 3))
    np.testing.assert_allclose(nn.PReLU(slope)(x), equinox.nn.PReLU(slope)(x) * 1.0, rtol=1e-6)


def test_none_is_refused():
    with pytest.raises(ValueError, match="a number or an array"):
        nn.PReLU(None)


def test_other_number_of_channels_is_named():
    with pytest.raises(ValueError, match=r"expected x of shape \(\.\.\., 3\), got shape \(4,\)"):
        nn.PReLU(jnp.ones(3))(jnp.ones(4))
