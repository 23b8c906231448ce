"""What a generator of documentation is told. Nothing here generates any, so nothing is done."""

from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


def doc_repr(obj: Value, string: str) -> Value:
    """`obj` as it is. In documentation `string` would stand for it."""
    return obj


def doc_remove_args(*args: str) -> Callable[[Value], Value]:
    """A decorator that changes nothing. Documentation would leave out the parameters `args`."""
    return lambda fn: fn
