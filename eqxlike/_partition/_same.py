"""Whether two static values are one to a trace."""

from typing import Any

from ._static_key import StaticKey, is_hashable


def is_same_static(first: Any, second: Any) -> bool:
    """Whether two static leaves are interchangeable in a trace at this moment.

    They are told apart as `filter_jit` tells them apart: by type and value, and functions and what
    is not hashable by identity.

    >>> import jax
    >>> is_same_static(1, 1), is_same_static(1, True), is_same_static(1, 1.0)
    (True, False, False)
    >>> is_same_static(lambda x: x, lambda x: x), is_same_static(jax.nn.relu, jax.nn.relu)
    (False, True)
    """
    if first is second:
        return True
    # Both are held while their keys are compared: those name objects by their `id`.
    keys = [StaticKey(each, by_identity=not is_hashable(each)) for each in (first, second)]
    return keys[0].key == keys[1].key
