"""The registry of programs that use libraries built on Equinox.

A topic is a file of `programs/`. A program is a function without arguments that returns a tree of
arrays. Its compiled functions are at the top level of the file, so that a second call compiles
nothing.
"""

import importlib
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

FOLDER = pathlib.Path(__file__).parent / "programs"
TOPICS = tuple(sorted(path.stem for path in FOLDER.glob("*.py")))

Run = Callable[[], Any]


class Program(NamedTuple):
    """A program. CI only runs sampled programs."""

    run: Run
    is_sampled: bool


class Programs(dict[str, Program]):
    """The programs of a topic by name."""

    def add(self, run: Run, name: str = "", sampled: bool = False) -> Run:
        """Adds a program. The default of `name` is the name of the function."""
        name = name or run.__name__
        assert name not in self, f"two programs are named {name}"
        self[name] = Program(run, sampled)
        return run

    def sample(self, run: Run) -> Run:
        """Adds a program to the sample. Used as a decorator, like `add`."""
        return self.add(run, sampled=True)

    def names(self, is_whole: bool) -> list[str]:
        """The names of all programs or of the sample."""
        return [name for name, program in self.items() if is_whole or program.is_sampled]


def programs_of(topic: str) -> Programs:
    """The programs of a topic. Imports their libraries."""
    return importlib.import_module(f"tests.downstream.programs.{topic}").programs
