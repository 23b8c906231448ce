from eqxlike import nn
from tests.nn.case import Case


def without_key(make):
    return lambda key, dtype: make(dtype=dtype)


CASES = {
    "LayerNorm": Case(
        without_key(lambda **options: nn.LayerNorm((2, 3), **options)), ((2, 3),), (2, 3)
    ),
    "RMSNorm": Case(without_key(lambda **options: nn.RMSNorm(3, **options)), ((3,),), (3,)),
    "GroupNorm": Case(
        without_key(lambda **options: nn.GroupNorm(2, 4, **options)), ((4, 3),), (4, 3)
    ),
}
