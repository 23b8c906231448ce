from eqxlike import nn
from tests.nn.case import Case

CASES = {
    "Conv2d": Case(
        lambda **options: nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2, **options),
        ((2, 5, 6),),
        (4, 3, 3),
    ),
    "ConvTranspose1d": Case(
        lambda **options: nn.ConvTranspose1d(
            2, 3, 3, stride=2, padding=1, output_padding=1, padding_mode="CIRCULAR", **options
        ),
        ((2, 5),),
        (3, 10),
    ),
}
