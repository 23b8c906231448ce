"""`make test ARGS=--changed`: the tests that the changes since the branch `main` can break."""

import functools
import importlib
import pathlib
import subprocess
from typing import Any

FOLDERS = {"export": "ship", "transfers": "ship", "compilation_cache": "ship"}
"""Maps a part of the package to the folder of its tests, if their names differ."""


def is_to_run(path: pathlib.Path, root: pathlib.Path) -> bool:
    """Whether the changes can break the tests at `path`, a file or a folder of `tests/`."""
    names = _names(root)
    return names is None or path.name in names


@functools.cache
def _names(root: pathlib.Path) -> set[str] | None:
    return folders_to_run(_changed_files(root))


def folders_to_run(files: list[str]) -> set[str] | None:
    """The folders and files of `tests/` that changes to `files` can break. `None` means all.

    A change can break the changed part of the package, and every part that imports it directly or
    indirectly.
    """
    grimp: Any = importlib.import_module("grimp")
    graph = grimp.build_graph("eqxlike", exclude_type_checking_imports=True)
    names: set[str] = set()
    for file in files:
        match pathlib.PurePosixPath(file).parts:
            case ("eqxlike", name, *_):
                part = f"eqxlike.{name.removesuffix('.py')}"
                if part not in graph.modules:
                    return None
                changed = {part, *graph.find_downstream_modules(part, as_package=True)}
                parts = {each.split(".")[1].lstrip("_") for each in changed if "." in each}
                names |= {FOLDERS.get(each, each) for each in parts}
                names |= {f"test_{each}.py" for each in parts}
            case ("tests", name, _, *_):
                names.add(name)
            case ("tests", name) if name.startswith("test_"):
                names.add(name)
            case ("tests", *_) | ("pyproject.toml",):
                return None
    return names


def _changed_files(root: pathlib.Path) -> list[str]:
    tracked = ["git", "diff", "--name-only", "main"]
    others = ["git", "ls-files", "--others", "--exclude-standard"]
    outputs = [
        subprocess.check_output(each, cwd=root, text=True, stderr=subprocess.PIPE)
        for each in (tracked, others)
    ]
    return "".join(outputs).splitlines()
