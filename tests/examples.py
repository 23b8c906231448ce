"""How many examples a test with hypothesis takes where 100, or a third of it, are too many."""

import math
from typing import Any

import hypothesis


def at_most(number: int, **options: Any) -> hypothesis.settings:
    """Settings for a test of `number` examples in the profile `thorough`, in others for as large a
    part of it as the profile takes of 100.
    """
    share = hypothesis.settings.default.max_examples / 100
    return hypothesis.settings(max_examples=math.ceil(number * share), **options)
