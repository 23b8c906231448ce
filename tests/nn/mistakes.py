"""Tables of mistakes: an error, words of its message, and the call that raises the error."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest


def each_mistake(
    table: Mapping[type[Exception], Mapping[str, Callable[..., Any]]],
) -> pytest.MarkDecorator:
    """Runs a test for each `call`, with its `error` and the `words` of the message."""
    rows = [
        pytest.param(error, words, call, id=words)
        for error, calls in table.items()
        for words, call in calls.items()
    ]
    return pytest.mark.parametrize(("error", "words", "call"), rows)
