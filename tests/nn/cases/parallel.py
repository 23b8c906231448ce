import jax.random as jr

from eqxlike import nn
from tests.nn.case import Case


def linears(key, dtype):
    return [nn.Linear(3, 4, dtype=dtype, key=each) for each in jr.split(key, 3)]


CASES = {
    "Parallel": Case(
        lambda key, dtype: nn.Parallel(linears(key, dtype), "concatenate"), ((3,),), (12,)
    ),
}
