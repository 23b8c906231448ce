"""Short programs that are run on Equinox and on eqxlike, and what each came to."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

Program = Callable[[Any], Any]

PROGRAMS: dict[str, Program] = {}

DIFFERENCES: dict[str, str] = {}
"""Why the two differ on purpose, for those programs on which they do."""


class Output(NamedTuple):
    """What a program returned, or the type of what it raised, and the kinds of its warnings."""

    returned: Any
    raised: type[BaseException] | None
    warned: frozenset[type[Warning]]


def program(function: Any = None, *, differs: str = "") -> Any:
    """Adds to the registry a function that takes the library and returns plain values."""
    if function is None:
        return lambda function: program(function, differs=differs)
    name = function.__name__
    if name in PROGRAMS:
        raise ValueError(f"two programs are named {name}")
    PROGRAMS[name] = function
    if differs:
        DIFFERENCES[name] = differs
    return function


def run(program: Program, library: Any) -> Output:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            returned, raised = program(library), None
        except NameError:
            # Of the program itself: it would come to the same on anything.
            raise
        except Exception as error:
            returned, raised = None, type(error)
    return Output(returned, raised, frozenset(each.category for each in caught))
