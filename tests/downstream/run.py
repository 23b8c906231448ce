"""Runs programs on one library, in a separate process.

`python -m tests.downstream.run LIBRARY FILE TOPIC [NAME ...]` runs programs of a topic on LIBRARY,
which is `equinox` or `eqxlike`. Without NAME, it runs all programs of the topic. It writes a
pickled dictionary to FILE. The dictionary maps the name of a program to its arrays by path, or to
its traceback if the program raised an error.

`python -m tests.downstream.run list` prints the names of the sample and of all programs by topic,
as JSON.
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
    """Makes `import equinox` import `library`, and enables 64-bit numbers."""
    os.environ["JAX_ENABLE_X64"] = "1"
    if library == OURS:
        import eqxlike

        eqxlike.install_as_equinox()


def check_library(library: str) -> None:
    """Asserts that `library` was imported and the other library was not."""
    files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
    found = {EQUINOX, OURS} & {pathlib.Path(file).parent.name for file in files}
    assert found == {library}, f"expected only {library} to be imported, got {found}"


def arrays_of(tree: Any) -> dict[str, Any]:
    """The leaves of `tree` as NumPy arrays, by path."""
    import jax
    import numpy as np

    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def outcome(run: Run) -> dict[str, Any] | str:
    """The arrays that a program returns, by path, or its traceback if it raises an error."""
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
