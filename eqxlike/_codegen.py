"""Turning generated source into functions that tracebacks and profilers can show."""

import collections
import contextlib
import itertools
import linecache
import weakref
from collections.abc import Callable, Iterable
from typing import Any

_serial = itertools.count()
_gone: collections.deque[str] = collections.deque()
"""The file names of functions that are no longer there wait here.

Garbage collection comes at any moment, also while `linecache` walks over its table: taking a source
out of it then would raise a KeyError there.
"""


def tuple_of(parts: Iterable[str]) -> str:
    """The source of a tuple of these expressions."""
    return "(" + "".join(f"{part}, " for part in parts) + ")"


def forget_sources() -> None:
    """Takes the sources of the functions that are no longer there out of `linecache`."""
    # Asking first whether there are any would not do: another thread may take the last of them.
    with contextlib.suppress(IndexError):
        while True:
            linecache.cache.pop(_gone.popleft(), None)


def compile_function(lines: Iterable[str], namespace: dict[str, Any], origin: str) -> Callable:
    """Compiles `lines`, which define one function, and returns that function.

    **Arguments:**

    - `lines`: the source, without line ends; the first line is the `def`.
    - `namespace`: the globals of the function; copied.
    - `origin`: the purpose of the function, shown as the file name `<eqxlike ORIGIN>`.

    The source is in `linecache` for as long as the function lives, and until another is compiled.
    """
    forget_sources()
    source = "\n".join(lines) + "\n"
    filename = f"<eqxlike {origin} #{next(_serial)}>"
    scope = dict(namespace)
    exec(compile(source, filename, "exec"), scope)
    name = source[len("def ") : source.index("(")]
    function = scope.pop(name)
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    weakref.finalize(function, _gone.append, filename)
    return function


def replace_body(function: Any, by: Any) -> Any:
    """Makes `function` do what `by` does; both come from `compile_function`. Returns `function`."""
    function.__globals__.update(by.__globals__)
    function.__code__ = by.__code__
    vars(function)["source"] = by  # The source of the new body is there for as long as it is.
    return function
