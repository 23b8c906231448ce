import functools

import jax
import jax.random as jr

from eqxlike import nn, tree_at
from tests.nn.case import Case


def make(*sizes, key, dtype):
    """With a correction that is not zero, as it is at first."""
    layer = nn.LoRALinear(nn.Linear(*sizes, dtype, key=key), 2, alpha=3.0, key=key)
    up = jax.nn.initializers.normal(1.0)(jr.fold_in(key, 1), layer.up.shape, dtype)
    return tree_at(lambda layer: layer.up, layer, up)


CASES = {
    "LoRALinear": Case(functools.partial(make, 3, 4, True), ((3,),), (4,)),
    "LoRALinear-scalar": Case(functools.partial(make, "scalar", "scalar", False), ((),), ()),
}
