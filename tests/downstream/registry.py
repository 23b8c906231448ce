"""Programs on libraries that are built on Equinox: what one is, and where they are found.

A topic is a file of `programs/`. A program takes nothing and returns a tree of arrays. What it
compiles stands at the level of its file, so that a second call compiles nothing.
"""

import importlib
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

FOLDER = pathlib.Path(__file__).parent / "programs"
TOPICS = tuple(sorted(path.stem for path in FOLDER.glob("*.py")))

Run = Callable[[], Any]


class Program(NamedTuple):
    """A program, and whether it is in the sample that CI runs."""

    run: Run
    is_sampled: bool


class Programs(dict[str, Program]):
    """The programs of a topic by name."""

    def add(self, run: Run, name: str = "", sampled: bool = False) -> Run:
        """Adds a program, under the name of the function unless another is given."""
        name = name or run.__name__
        assert name not in self, f"two programs are named {name}"
        self[name] = Program(run, sampled)
        return run

    def sample(self, run: Run) -> Run:
        """Adds a program to the sample; a decorator, as `add` is."""
        return self.add(run, sampled=True)

    def names(self, is_whole: bool) -> list[str]:
        """Of all programs, or of the sample."""
        return [name for name, program in self.items() if is_whole or program.is_sampled]


def programs_of(topic: str) -> Programs:
    """The programs of a topic. Imports what they are built on."""
    return importlib.import_module(f"tests.downstream.programs.{topic}").programs
