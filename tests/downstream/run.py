"""Runs programs on one library, in a process of its own.

`python -m tests.downstream.run LIBRARY FILE TOPIC [NAME ...]` runs the programs of a topic, or
those named, on Equinox or on eqxlike in its place, and writes to the file what each returned: a
pickled dictionary from names to arrays by path, or to the text of what was raised.

`python -m tests.downstream.run list` prints the names by topic, as JSON: the sample and the whole.
"""

import json
import os
import pathlib
import pickle
import sys
import time
import traceback
from typing import Any

from tests.downstream.registry import TOPICS, Run, programs_of

EQUINOX, OURS = "equinox", "eqxlike"


def begin(library: str) -> None:
    """Sees to it that `equinox` is the library asked for from here on, and numbers of 64 bits."""
    os.environ["JAX_ENABLE_X64"] = "1"
    if library == OURS:
        import eqxlike

        eqxlike.install_as_equinox()


def check_library(library: str) -> None:
    """Raises AssertionError if `equinox` was another library after all, or both are there."""
    files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
    found = {EQUINOX, OURS} & {pathlib.Path(file).parent.name for file in files}
    assert found == {library}, f"imported were {found}, not {library} alone"


def arrays_of(tree: Any) -> dict[str, Any]:
    """The leaves of what a program returned, as NumPy arrays by their paths."""
    import jax
    import numpy as np

    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def outcome(run: Run) -> dict[str, Any] | str:
    """What a program returned, or the text of what it raised."""
    try:
        return arrays_of(run())
    except Exception:
        return traceback.format_exc()


def main(library: str, file: str, topic: str, *names: str) -> None:
    begin(library)
    programs = programs_of(topic)
    outcomes = {}
    for name in names or programs:
        start_s = time.perf_counter()
        outcomes[name] = outcome(programs[name].run)
        print(f"{topic}: {name}: {time.perf_counter() - start_s:.1f} s", flush=True)
    check_library(library)
    pathlib.Path(file).write_bytes(pickle.dumps(outcomes))


def names() -> dict[str, dict[str, list[str]]]:
    """The names of the sample and of all programs, by topic."""
    topics = {topic: programs_of(topic) for topic in TOPICS}
    return {
        which: {topic: programs.names(is_whole) for topic, programs in topics.items()}
        for which, is_whole in (("sample", False), ("whole", True))
    }


if __name__ == "__main__":
    if sys.argv[1:] == ["list"]:
        print(json.dumps(names()))
    else:
        main(*sys.argv[1:])
