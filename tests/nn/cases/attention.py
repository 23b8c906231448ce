from eqxlike import nn
from tests.nn.case import Case

CASES = {
    "MultiheadAttention": Case(
        lambda **options: nn.MultiheadAttention(2, 4, **options), ((3, 4), (5, 4), (5, 4)), (3, 4)
    ),
    "FusedAttention": Case(
        lambda **options: nn.fuse(nn.MultiheadAttention(2, 4, use_key_bias=True, **options)),
        ((3, 4),),
        (3, 4),
        lambda layer, x, key: layer(x, x, x, key=key),
    ),
}
