"""What several of the tests of `filter_jit` wrap and pass."""

import jax.numpy as jnp
import numpy as np

from eqxlike import Module, field, filter_jit


class Affine(Module):
    scale: object
    shift: object = 0.0
    mode: object = field(static=True, default="plain")

    def __call__(self, x):
        return self.scale * x + self.shift

    def apply(self, x, factor=1.0):
        return factor * self(x)

    @filter_jit
    def jitted(self, x):
        return self(x)


class Pair(Module):
    left: object
    right: object = None
    mode: object = field(static=True, default="a")


def double(x, /, how="double"):
    """Twice the argument."""
    return 2 * x


X = np.arange(3.0, dtype=np.float32)


def equal(first, second):
    return bool(jnp.array_equal(first, second))


def scaled(x, scale=1.0):
    return x * scale
