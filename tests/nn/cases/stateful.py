import copy

import jax.random as jr

from eqxlike import nn
from tests.nn.case import Case


def with_state(make):
    return lambda **options: nn.make_with_state(make)(**options)


def call(layer_and_state, x, *, key):
    layer, state = layer_and_state
    return layer(x, copy.copy(state), key=key)[0]


def norm(key, dtype):
    return nn.BatchNorm(3, axis_name="batch", mode="batch", dtype=dtype)


def spectral(key, dtype):
    linear_key, norm_key = jr.split(key)
    return nn.SpectralNorm(nn.Linear(3, 4, key=linear_key, dtype=dtype), "weight", key=norm_key)


CASES = {
    "BatchNorm": Case(with_state(norm), ((3, 4),), (3, 4), call, batch_axis="batch"),
    "SpectralNorm": Case(with_state(spectral), ((3,),), (4,), call),
    "WeightNorm": Case(lambda **options: nn.WeightNorm(nn.Linear(3, 4, **options)), ((3,),), (4,)),
}
