"""What a user gives along: JSON that comes back as it was."""

from typing import Any


def check_user_data(value: Any, path: str = "data") -> None:
    """Raises `TypeError`, with the path, for what JSON does not have or would change."""
    if value is None or isinstance(value, bool | int | float | str):
        return
    if isinstance(value, list):
        for index, each in enumerate(value):
            check_user_data(each, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, each in value.items():
            if not isinstance(key, str):
                raise TypeError(
                    f"train.save expected strings as keys of `{path}`, and got {key!r}: JSON has "
                    "no others."
                )
            check_user_data(each, f"{path}[{key!r}]")
    else:
        hint = ": make it a list" if isinstance(value, tuple) else ""
        raise TypeError(
            "train.save expected `data` of JSON (None, bool, int, float, str, list, dict), and got "
            f"{type(value).__name__} at {path}{hint}. Arrays belong in `state`."
        )
