from eqxlike import nn
from tests.nn.case import Case, without_options

CASES = {
    "AvgPool2d": Case(
        without_options(lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False)),
        ((2, 5, 6),),
        (2, 3, 3),
    ),
    "MaxPool1d": Case(without_options(lambda: nn.MaxPool1d(2, padding=1)), ((2, 5),), (2, 6)),
    "AdaptiveAvgPool1d": Case(without_options(lambda: nn.AdaptiveAvgPool1d(3)), ((2, 5),), (2, 3)),
}
