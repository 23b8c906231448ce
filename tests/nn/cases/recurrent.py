from eqxlike import nn
from tests.nn.case import Case


def hidden_of(layer, x, hidden, memory, *, key):
    return layer(x, (hidden, memory), key=key)[0]


CASES = {
    "GRUCell": Case(lambda **options: nn.GRUCell(3, 4, **options), ((3,), (4,)), (4,)),
    "LSTMCell": Case(
        lambda **options: nn.LSTMCell(3, 4, **options), ((3,), (4,), (4,)), (4,), hidden_of
    ),
}
