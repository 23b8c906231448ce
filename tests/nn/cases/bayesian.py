import jax.random as jr

from eqxlike import nn
from tests.nn.case import Case


def call_with_perturbation(layer, x, *, key):
    return nn.with_perturbation(layer, jr.key(7))(x, key=key)


def conv(estimator, **options):
    return nn.BayesianConv(nn.Conv2d(2, 4, 2, groups=2, **options), estimator=estimator)


CASES = {
    "BayesianLinear": Case(lambda **options: nn.BayesianLinear(3, 4, **options), ((3,),), (4,)),
    "BayesianLinear-scalar": Case(
        lambda **options: nn.BayesianLinear("scalar", "scalar", **options), ((),), ()
    ),
    "BayesianConv": Case(
        lambda **options: nn.BayesianConv(nn.Conv2d(2, 4, 2, **options)), ((2, 3, 3),), (4, 2, 2)
    ),
    "BayesianConv-flipout": Case(
        lambda **options: conv("flipout", **options),
        ((2, 3, 3),),
        (4, 2, 2),
        call_with_perturbation,
    ),
    "BayesianMLP": Case(lambda **options: nn.BayesianMLP(3, 4, 5, 1, **options), ((3,),), (4,)),
}
