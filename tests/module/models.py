"""Modules that several tests of this folder use."""

import typing
from typing import Any

import eqxlike

# A test with the parameter `eqx` runs on Equinox too, and both must agree.


@typing.runtime_checkable
class HasWeight(typing.Protocol):
    weight: Any


class Inner(eqxlike.Module):
    weight: Any
    name: str = eqxlike.field(static=True, default="inner")


class StaticAny(eqxlike.Module):
    option: Any = eqxlike.field(static=True)
