from eqxlike import nn
from tests.nn.case import Case

CASES = {
    "BayesianLinear": Case(
        lambda **options: nn.BayesianLinear("scalar", "scalar", **options), ((),), ()
    ),
    "BayesianConv": Case(
        lambda **options: nn.BayesianConv(nn.Conv2d(2, 4, 2, **options)), ((2, 3, 3),), (4, 2, 2)
    ),
    "BayesianMLP": Case(lambda **options: nn.BayesianMLP(3, 4, 5, 0, **options), ((3,),), (4,)),
}
