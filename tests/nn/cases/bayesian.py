import jax.random as jr

from eqxlike import nn
from tests.nn.case import Case


def call_with_perturbation(layer, x, *, key):
    return nn.with_perturbation(layer, jr.key(7))(x, key=key)


def case_of(make, in_shape, out_shape, estimator):
    return Case(
        lambda **options: make(estimator, **options), (in_shape,), out_shape, call_with_perturbation
    )


def linear(estimator, **options):
    return nn.BayesianLinear(3, 4, estimator=estimator, **options)


def scalar_linear(estimator, **options):
    return nn.BayesianLinear("scalar", "scalar", estimator=estimator, **options)


def conv(estimator, **options):
    return nn.BayesianConv(nn.Conv2d(2, 4, 2, groups=2, **options), estimator=estimator)


CASES = {
    "BayesianLinear": Case(lambda **options: nn.BayesianLinear(3, 4, **options), ((3,),), (4,)),
    "BayesianLinear-no-bias": Case(
        lambda **options: nn.BayesianLinear(3, 4, False, **options), ((3,),), (4,)
    ),
    "BayesianLinear-scalar": Case(
        lambda **options: nn.BayesianLinear("scalar", "scalar", **options), ((),), ()
    ),
    "BayesianLinear-flipout": case_of(linear, (3,), (4,), "flipout"),
    "BayesianLinear-flipout-scalar": case_of(scalar_linear, (), (), "flipout"),
    "BayesianLinear-weights": Case(lambda **options: linear("weights", **options), ((3,),), (4,)),
    "BayesianConv": Case(
        lambda **options: nn.BayesianConv(nn.Conv2d(2, 4, 2, **options)), ((2, 3, 3),), (4, 2, 2)
    ),
    "BayesianConv-flipout": case_of(conv, (2, 3, 3), (4, 2, 2), "flipout"),
    "BayesianConv-weights": case_of(conv, (2, 3, 3), (4, 2, 2), "weights"),
    "BayesianMLP": Case(lambda **options: nn.BayesianMLP(3, 4, 5, 2, **options), ((3,),), (4,)),
}
