"""Modules for several tests of this folder."""

import typing
from typing import Any

import eqxlike

# A test with the parameter `eqx` runs on Equinox and on eqxlike, which must agree.


@typing.runtime_checkable
class HasWeight(typing.Protocol):
    weight: Any


class Inner(eqxlike.Module):
    weight: Any
    name: str = eqxlike.field(static=True, default="inner")


class StaticAny(eqxlike.Module):
    option: Any = eqxlike.field(static=True)
