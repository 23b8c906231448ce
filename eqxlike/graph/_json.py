"""A report as JSON."""

import dataclasses
import json
from typing import Any

import jax

_LEFT_OUT = frozenset({"jaxpr", "stablehlo", "hlo", "program"})
"""The programs, which have forms of their own."""


def as_json(report: Any, indent: int | None = None) -> str:
    """The numbers and names of a report."""
    return json.dumps({"jax": jax.__version__, **_plain(report)}, indent=indent)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.name not in _LEFT_OUT
        }
    if (names := getattr(value, "_fields", None)) is not None:
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    return value
