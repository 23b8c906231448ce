import jax.numpy as jnp

from eqxlike import nn
from tests.nn.case import Case


def look_up(layer, x, *, key):
    return layer(jnp.argmax(x), key=key)


CASES = {
    "Embedding": Case(lambda **options: nn.Embedding(5, 3, **options), ((5,),), (3,), look_up),
    "RotaryPositionalEmbedding": Case(
        lambda key, dtype: nn.RotaryPositionalEmbedding(6), ((4, 6),), (4, 6)
    ),
    "PReLU": Case(lambda key, dtype: nn.PReLU(jnp.full(3, 0.1, dtype)), ((2, 3),), (2, 3)),
}
