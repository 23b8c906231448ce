"""Enumerations whose members are arrays."""

from ._enumeration import Enumeration as Enumeration
