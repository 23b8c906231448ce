from eqxlike import nn
from tests.nn.case import Case

CASES = {
    "MultiheadAttention": Case(
        lambda **options: nn.MultiheadAttention(2, 4, **options), ((3, 4), (5, 4), (5, 4)), (3, 4)
    ),
    "MultiheadAttention-dropout": Case(
        lambda **options: nn.MultiheadAttention(2, 4, dropout_p=0.2, vo_size=3, **options),
        ((3, 4), (5, 4), (5, 4)),
        (3, 4),
    ),
}
