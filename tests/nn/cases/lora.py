import jax
import jax.random as jr

from eqxlike import nn, tree_at
from tests.nn.case import Case


def make(key, dtype):
    """With a correction that is not zero, as it is at first."""
    linear_key, layer_key, up_key = jr.split(key, 3)
    linear = nn.Linear("scalar", "scalar", dtype=dtype, key=linear_key)
    layer = nn.LoRALinear(linear, 2, alpha=3.0, key=layer_key)
    up = jax.nn.initializers.normal(1.0)(up_key, layer.up.shape, dtype)
    return tree_at(lambda layer: layer.up, layer, up)


CASES = {
    "LoRALinear": Case(make, ((),), ()),
}
