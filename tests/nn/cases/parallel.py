import jax.numpy as jnp
import jax.random as jr

from eqxlike import nn
from tests.nn.case import Case
from tests.nn.cases.stateful import call, make_norm, with_state


def linears(key, dtype):
    return [nn.Linear(3, 4, dtype=dtype, key=each) for each in jr.split(key, 3)]


def mixed(key, dtype):
    key, mlp_key = jr.split(key)
    dropouts = [nn.Sequential([linear, nn.Dropout(0.5)]) for linear in linears(key, dtype)]
    mlp = nn.MLP(3, 4, 5, 1, dtype=dtype, key=mlp_key)
    return nn.Parallel([dropouts[0], mlp, dropouts[1]], "sum")


def normalised(key, dtype):
    return nn.Parallel(
        [nn.Sequential([linear, make_norm(dtype, 4)]) for linear in linears(key, dtype)],
        "concatenate",
    )


CASES = {
    "Parallel": Case(
        lambda key, dtype: nn.Parallel(linears(key, dtype), "concatenate"), ((3,),), (12,)
    ),
    "Parallel-mixed": Case(mixed, ((3,),), (4,)),
    "Parallel-function": Case(
        lambda key, dtype: nn.Parallel(linears(key, dtype), jnp.stack), ((3,),), (3, 4)
    ),
    "Parallel-stateful": Case(with_state(normalised), ((3,),), (12,), call, "batch"),
}
