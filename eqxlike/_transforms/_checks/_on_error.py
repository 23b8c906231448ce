"""The choice of what happens when a check fails, by the caller or by the environment."""

import os
from typing import Literal, get_args

OnError = Literal["default", "raise", "breakpoint", "nan", "off"]

_WORDS = tuple(word for word in get_args(OnError) if word != "default")


def _setting(name: str, default: str) -> tuple[str, str]:
    """The name and the value of an environment variable of ours, or else of Equinox's."""
    names = (f"EQXLIKE_{name}", f"EQX_{name}")
    name = next((name for name in names if name in os.environ), names[0])
    return name, os.environ.get(name, default)


def resolve_on_error(on_error: str) -> str:
    """The word `on_error`, or for `"default"` the word that the environment has.

    **Raises:** `RuntimeError` if `on_error` is none of the words; `ValueError` if the environment
    has none of them.
    """
    if on_error in _WORDS:
        return on_error
    if on_error != "default":
        raise RuntimeError(
            f"`on_error` is {on_error!r}; expected is one of {', '.join(get_args(OnError))}."
        )
    name, word = _setting("ON_ERROR", "raise")
    if word not in _WORDS:
        raise ValueError(
            f"The environment variable {name} is {word!r}; expected is one of {', '.join(_WORDS)}."
        )
    return word


def num_breakpoint_frames() -> int:
    """The number of frames that the debugger shows; the innermost is that of the check.

    **Raises:** `ValueError` if the environment has anything but a positive number.
    """
    name, number = _setting("ON_ERROR_BREAKPOINT_FRAMES", "1")
    if not number.isdecimal() or int(number) < 1:
        raise ValueError(
            f"The environment variable {name} is {number!r}; expected is how many frames the "
            "debugger shows, 1 or more."
        )
    return int(number)
