import jax
import jax.numpy as jnp

from eqxlike import nn
from tests.nn.case import Case, without_options

CASES = {
    "Linear": Case(lambda **options: nn.Linear("scalar", "scalar", **options), ((),), ()),
    "Identity": Case(without_options(nn.Identity), ((3,),), (3,)),
    "MLP": Case(lambda **options: nn.MLP(3, 4, 5, 1, **options), ((3,),), (4,)),
    "Dropout": Case(without_options(nn.Dropout), ((3, 4),), (3, 4)),
    "Lambda": Case(without_options(lambda: nn.Lambda(jnp.tanh)), ((3,),), (3,)),
    "Sequential": Case(
        lambda **options: nn.Sequential(
            [nn.Linear(3, 4, **options), nn.Lambda(jax.nn.relu), nn.Dropout(0.1)]
        ),
        ((3,),),
        (4,),
    ),
}
