"""The way from a call to a profile: sample it, attribute its samples, render it.

A session is a list of samples; a sample is a stack of frames, outermost first, and the seconds that
passed since the sample before it.
"""

import collections
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Iterable, Mapping

import jax
import jaxlib

import eqxlike
from eqxlike._timing import Call, frozen_heap, warmed_up

try:
    from pyinstrument import Profiler
    from pyinstrument.renderers import ConsoleRenderer, HTMLRenderer
    from pyinstrument.session import Session
except ImportError as error:
    raise ImportError(
        "profiling needs pyinstrument: pip install 'eqxlike[profile]', or pip install pyinstrument"
    ) from error

OURS = "eqxlike"
JAX = "jax"
OTHER = "other"

GENERATED = "<eqxlike"
"""Functions that eqxlike generates at run time have a file name that begins so."""

NOT_PYTHON = ("<built-in>", "<thread>")
"""pyinstrument gives these as the files of a function in C, and of the thread below a stack."""

_PACKAGES = {
    OURS: (pathlib.Path(eqxlike.__file__).parent,),
    JAX: (pathlib.Path(jax.__file__).parent, pathlib.Path(jaxlib.__file__).parent),
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


def sample(call: Call, calls: int, interval_s: float = 1e-4) -> Session:
    """Samples the stack during warm calls, each waited for.

    **Arguments:**

    - `call`: a call, as `eqxlike._timing.measure` takes it.
    - `calls`: the number of calls.
    - `interval_s`: the least time between two samples, in seconds.
    """
    wait = warmed_up(call, 5)
    profiler = Profiler(interval=interval_s, async_mode="disabled")
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
        if file not in NOT_PYTHON and not (is_owned and _owner(file) == OTHER):
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
    return ConsoleRenderer(show_all=True, unicode=True).render(session)


def render_html(session: Session) -> str:
    """A page with the tree and a timeline."""
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


@functools.cache
def _owner(file: str) -> str:
    """The owner of the functions of a file."""
    if file.startswith(GENERATED):
        return OURS
    for owner, packages in _PACKAGES.items():
        if any(pathlib.Path(file).is_relative_to(package) for package in packages):
            return owner
    return OTHER
