"""Which arguments give their buffers away: five words, or names."""

from collections.abc import Iterable
from typing import Literal

from ._spelling import Spelling

Donate = (
    Literal["all", "all-except-first", "warn", "warn-except-first", "none"] | str | tuple[str, ...]
)

_WORDS = ("all", "all-except-first", "warn", "warn-except-first", "none")


def check_donate(donate: Donate | Iterable[str], spelling: Spelling) -> Donate:
    """`donate` as a word or a tuple of names of parameters of the function.

    **Raises:** `ValueError` for any other word, or a name that is no parameter.
    """
    if isinstance(donate, str):
        if donate in _WORDS:
            return donate
        donate_names: tuple[str, ...] = (donate,)
    else:
        donate_names = tuple(donate)
    parameters = spelling.parameter_names()
    for name in donate_names:
        if name not in parameters:
            words = ", ".join(map(repr, _WORDS))
            raise ValueError(
                f"`filter_jit(..., donate=...)` must be one of {words}, or names of parameters of "
                f"the function. {spelling.function_name} has no parameter named {name!r}; it has "
                f"{', '.join(map(repr, parameters)) or 'none'}."
            )
    return donate_names


def is_silent(donate: Donate) -> bool:
    """Whether buffers that could not be reused are none of the user's concern."""
    return donate in ("all", "all-except-first")


def donated_places(
    donate: Donate, spelling: Spelling, num_bound: int, names: tuple[str, ...], num_args: int
) -> tuple[int, ...]:
    """The places in a spelled call whose arrays are donated.

    **Arguments:**

    - `num_bound`: how many places at the front belong to what was wrapped, such as a Module that
        is called. As in Equinox, "first" means the first argument after these.
    - `names`, `num_args`: of the spelled call.
    """
    if isinstance(donate, tuple):
        return tuple(place for name in donate for place in spelling.places(name, names, num_args))
    if donate == "none":
        return ()
    spared = num_bound if donate.endswith("-except-first") else None
    return tuple(place for place in range(num_args) if place != spared)
