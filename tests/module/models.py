"""What several of the tests beside it take."""

import typing
from typing import Any

import eqxlike

# Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure.


@typing.runtime_checkable
class HasWeight(typing.Protocol):
    weight: Any


class Inner(eqxlike.Module):
    weight: Any
    name: str = eqxlike.field(static=True, default="inner")


class StaticAny(eqxlike.Module):
    option: Any = eqxlike.field(static=True)
