"""Networks that are noisy: they are called with a key."""

import inspect
from typing import Any


def takes_key(network: Any) -> bool:
    """Whether a network can be called by `network(x, key=key)`."""
    parameters = inspect.signature(network).parameters.values()
    return any(each.name == "key" or each.kind is each.VAR_KEYWORD for each in parameters)
