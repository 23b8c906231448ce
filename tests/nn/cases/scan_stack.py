from eqxlike import nn
from tests.nn.case import Case

CASES = {
    "ScanStack": Case(
        lambda key, dtype: nn.ScanStack(
            lambda key: nn.Linear(3, 3, dtype=dtype, key=key), 4, key=key
        ),
        ((3,),),
        (3,),
    ),
}
