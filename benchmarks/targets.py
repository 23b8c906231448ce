"""The targets of a benchmark, and the results of one run."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple


class Target(NamedTuple):
    """A target, the result, and whether the result reaches the target."""

    aim: str
    found: str
    is_reached: bool


def at_most(aim: str, limit: float, found: Mapping[str, float]) -> Iterator[Target]:
    """Yields the target that no number is above the limit, if there are numbers."""
    if found:
        worst = max(found, key=lambda name: found[name])
        text = _with_median(worst, found)
        yield Target(f"{aim}: at most {limit:g}", text, found[worst] <= limit)


def at_least(aim: str, limit: float, found: Mapping[str, float]) -> Iterator[Target]:
    """Yields the target that no number is below the limit, if there are numbers."""
    if found:
        worst = min(found, key=lambda name: found[name])
        text = _with_median(worst, found)
        yield Target(f"{aim}: at least {limit:g}", text, found[worst] >= limit)


def render(found: Sequence[Target]) -> str:
    """A heading, and a line for each target."""
    return "Targets\n\n" + "\n".join(map(_line, found))


def _with_median(worst: str, found: Mapping[str, float]) -> str:
    numbers = sorted(found.values())
    middle = f", median {numbers[len(numbers) // 2]:.2f}" if len(numbers) > 2 else ""
    return f"{found[worst]:.2f} ({worst}){middle}"


def _line(target: Target) -> str:
    return f"- {'reached' if target.is_reached else 'missed'}: {target.aim}: {target.found}"
