"""Settings of hypothesis for tests with fewer examples than the profile."""

import math
from typing import Any

import hypothesis


def at_most(number: int, **options: Any) -> hypothesis.settings:
    """Settings with `number` examples in the profile `thorough`, and proportionally fewer in other
    profiles.
    """
    share = hypothesis.settings.default.max_examples / 100
    return hypothesis.settings(max_examples=math.ceil(number * share), **options)
