"""The way from a call to a profile: sample it, attribute its samples, render it.

A session is a list of samples; a sample is a stack of frames, outermost first, and the seconds that
passed since the sample before it.
"""

import collections
import dataclasses
import functools
import importlib.util
import itertools
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from .._timing import Call, frozen_heap, warmed_up

Session = Any
"""A `pyinstrument.session.Session`."""

OURS = "eqxlike"
JAX = "jax"
OTHER = "other"

GENERATED = "<eqxlike"
"""Functions that eqxlike generates at run time have a file name that begins so."""

NOT_PYTHON = ("<built-in>", "<thread>")
"""pyinstrument gives these as the files of a function in C, and of the thread below a stack."""

_LOOP = pathlib.Path(__file__).parent

_PACKAGES = {
    OURS: (pathlib.Path(__file__).parents[1],),
    JAX: tuple(
        pathlib.Path(folder)
        for name in ("jax", "jaxlib")
        if (spec := importlib.util.find_spec(name)) is not None
        for folder in spec.submodule_search_locations or ()
    ),
}


@dataclasses.dataclass(frozen=True, order=True)
class Frame:
    """One function on a stack."""

    file: str
    line: int
    function: str

    @property
    def owner(self) -> str:
        """The owner of the function: `OURS`, `JAX` or `OTHER`."""
        return _owner(self.file)


def new_profiler(interval_s: float) -> Any:
    """A `pyinstrument.Profiler` that looks at most so often.

    **Raises:** `ImportError` if pyinstrument is not installed.
    """
    try:
        from pyinstrument import Profiler
    except ImportError as error:
        raise ImportError(
            "Sampling needs pyinstrument: pip install 'eqxlike[profile]', or pip install "
            "pyinstrument"
        ) from error
    return Profiler(interval=interval_s, async_mode="disabled")


def sample(call: Call, calls: int, interval_s: float = 1e-4, warm_up: int = 5) -> Session:
    """Samples the stack during warm calls, each waited for.

    **Arguments:**

    - `call`: a call, as `eqxlike._timing.measure` takes it.
    - `calls`: the number of calls.
    - `interval_s`: the least time between two samples, in seconds.
    - `warm_up`: the number of calls before the first sample.

    **Raises:** `ImportError` if pyinstrument is not installed.
    """
    profiler = new_profiler(interval_s)
    wait = warmed_up(call, warm_up)
    with frozen_heap():
        profiler.start()
        for _ in itertools.repeat(None, calls):
            wait(call())
        return profiler.stop()


def self_times(session: Session) -> dict[Frame, float]:
    """The seconds spent in each function of ours and of JAX, and outside both.

    The time of a function includes the C that it calls, compiled programs among it, and the Python
    of other libraries, but neither ours nor JAX's.
    """
    times: dict[Frame, float] = collections.defaultdict(float)
    for stack, seconds in session.frame_records:
        frame = innermost(stack)
        if frame is not None:
            times[frame] += seconds
    return dict(times)


def innermost(stack: Iterable[str]) -> Frame | None:
    """The innermost frame of ours or of JAX; without these, the innermost Python frame.

    **Arguments:**

    - `stack`: frames as pyinstrument writes them, outermost first.
    """
    found = None
    for text in stack:
        # Name, file and first line, parted by \x00; after \x01 come the attributes of one visit.
        function, file, line = text.partition("\x01")[0].split("\x00")
        is_owned = found is not None and found.owner != OTHER
        # What stands around the loop that calls and waits, a command of ours say, has no part.
        is_loop = pathlib.Path(file).parent == _LOOP
        if is_loop or (file not in NOT_PYTHON and not (is_owned and _owner(file) == OTHER)):
            found = Frame(file, int(line), function)
    return found


def shares(times: Mapping[Frame, float]) -> dict[str, float]:
    """The share of the time that each owner's functions took."""
    total = sum(times.values()) or 1.0
    parts: dict[str, float] = {OURS: 0.0, JAX: 0.0, OTHER: 0.0}
    for frame, seconds in times.items():
        parts[frame.owner] += seconds / total
    return parts


def render_text(session: Session) -> str:
    """The tree as text. Every frame is in it: pyinstrument's default hides most of ours."""
    from pyinstrument.renderers import ConsoleRenderer

    return ConsoleRenderer(show_all=True, unicode=True).render(session)


def render_html(session: Session) -> str:
    """A page with the tree and a timeline."""
    from pyinstrument.renderers import HTMLRenderer

    return HTMLRenderer().render(session)


def write(session: Session, path: pathlib.Path) -> list[pathlib.Path]:
    """Writes the tree, the page and the session itself beside each other.

    **Arguments:**

    - `session`: the session to write.
    - `path`: the path of the files, without a suffix.

    **Returns:** the files written.
    """
    text, page, raw = (path.with_name(path.name + end) for end in (".txt", ".html", ".pyisession"))
    text.write_text(render_text(session), encoding="utf-8")
    page.write_text(render_html(session), encoding="utf-8")
    session.save(raw)
    return [text, page, raw]


def hot_frames(times: Mapping[Frame, float], count: int = 6) -> list[str]:
    """A line for each of the functions of ours and of JAX's Python that most samples fell into."""
    total = sum(times.values()) or 1.0
    found = {frame: seconds for frame, seconds in times.items() if frame.owner != OTHER}
    return [
        f"  {seconds / total:4.0%}  {frame.function}  {_short(frame.file)}:{frame.line}"
        for frame, seconds in sorted(found.items(), key=lambda item: -item[1])[:count]
    ]


def _short(file: str) -> str:
    """The last parts of a path, from the package on."""
    parts = pathlib.Path(file).parts
    for package in ("eqxlike", "jax", "jaxlib"):
        if package in parts:
            return "/".join(parts[len(parts) - 1 - parts[::-1].index(package) :])
    return file


@functools.cache
def _owner(file: str) -> str:
    """The owner of the functions of a file."""
    if file.startswith(GENERATED):
        return OURS
    # The loop that calls and waits is no part of what is profiled.
    if pathlib.Path(file).parent == _LOOP:
        return OTHER
    for owner, packages in _PACKAGES.items():
        if any(pathlib.Path(file).is_relative_to(package) for package in packages):
            return owner
    return OTHER
