"""Compiled programs kept in a folder from one process to the next, and what that saved."""

import collections
import dataclasses
import json
import os
import pathlib
import tempfile
import threading
from typing import Any

import jax
import jax.monitoring
from jax.experimental.compilation_cache import compilation_cache

from ._check_numbers import real_number

RECORD = "compilations.jsonl"
"""The file, beside those of JAX, that says what it cost to compile what they hold."""

_HIT = "/jax/compilation_cache/cache_hits"
_COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A program that was compiled, or read instead.

    - `name`: as JAX calls it, as in `jit(step)`.
    - `seconds`: what it took now.
    - `cost_s`: the seconds that compiling takes; of one that was read, the mean of what those of
      its name took when they were compiled, and `None` if nobody noted that.
    """

    name: str
    seconds: float
    cost_s: float | None


class CompilationCache:
    """What was read from the folder and what was compiled, since `cache_compilations` was called.

    - `folder`: where compiled programs are kept.
    - `read`: the programs that were found there.
    - `compiled`: those that were not.
    """

    def __init__(self, folder: pathlib.Path, settings: dict[str, Any]):
        self.folder = folder
        self.read: tuple[Compilation, ...] = ()
        self.compiled: tuple[Compilation, ...] = ()
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._costs = _read_costs(folder)
        self._before = _change_settings(settings)
        self._is_open = True
        jax.monitoring.register_event_listener(self._on_event)
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)

    @property
    def compile_s(self) -> float:
        """The seconds that were spent on compiling."""
        return sum(each.seconds for each in self.compiled)

    @property
    def saved_s(self) -> float:
        """The seconds that reading saved, so far as it is known what compiling had cost."""
        return sum(each.cost_s - each.seconds for each in self.read if each.cost_s is not None)

    def close(self) -> None:
        """Stops counting, and sets JAX as it was before."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
        jax.monitoring.unregister_event_listener(self._on_event)
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        _change_settings(self._before)

    def __enter__(self) -> "CompilationCache":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        read_s = sum(each.seconds for each in self.read)
        costliest = sorted(self.compiled, key=lambda each: -each.seconds)[:3]
        names = ", ".join(f"{each.name} {each.seconds:.2f} s" for each in costliest)
        return (
            f"{self.folder}: {_count(self.read)} read in {read_s:.2f} s, which to compile took "
            f"{self.saved_s + read_s:.2f} s; {_count(self.compiled)} compiled in "
            f"{self.compile_s:.2f} s{f' (most: {names})' if names else ''}"
        )

    def _on_event(self, event: str, **_: Any) -> None:
        # JAX tells first that a program was found, and then, in the same thread, how long it took.
        if event == _HIT:
            self._thread.is_hit = True

    def _on_duration(self, event: str, duration_secs: float, **details: Any) -> None:
        # Within another context, programs are kept in its folder.
        if event != _COMPILED or _current_folder() != str(self.folder):
            return
        name = str(details.get("fun_name", "?"))
        is_hit, self._thread.is_hit = getattr(self._thread, "is_hit", False), False
        with self._lock:
            if is_hit:
                costs = self._costs.get(name)
                cost_s = None if not costs else sum(costs) / len(costs)
                self.read += (Compilation(name, duration_secs, cost_s),)
            else:
                self.compiled += (Compilation(name, duration_secs, duration_secs),)
                self._costs.setdefault(name, []).append(duration_secs)
                _append_cost(self.folder, name, duration_secs)


def cache_compilations(
    folder: str | os.PathLike[str], *, min_compile_s: float = 0.0
) -> CompilationCache:
    """Keeps what JAX compiles in a folder, where the next process finds it.

    This is JAX's persistent cache, with thresholds at which small programs are kept too: a start is
    made of many of them. It holds for the whole process from now on, or, used as a context manager,
    as long as the context is open. Tracing and lowering are done again in each process; in jax 0.10
    programs that call back to Python are compiled again too.

    **Arguments:**

    - `folder`: on a disk of this machine; made if it is not there. Several processes may share it.
      Programs of other versions of JAX, or for other devices, do no harm there.
    - `min_compile_s`: programs that were compiled in less seconds are not kept.

    **Returns:** a `CompilationCache`, which counts what was read and what was compiled, and says so
    when it is printed.

    **Raises:** `OSError`, with the folder, if nothing can be written there; `ValueError` for the
    address of another machine, for `""`, and for a negative number of seconds; `TypeError` for a
    folder that is not a path, or seconds that are not a number.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with eqx.cache_compilations(folder) as cache:
        ...         _ = jax.jit(lambda x: jnp.sin(x) + 41)(1.0)
        ...     len(cache.read), len(cache.compiled)
        (0, 1)
    """
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"cache_compilations expects the path of a folder, got {folder!r}.")
    path = os.fspath(folder)
    if not path or "://" in path:
        raise ValueError(
            f"cache_compilations expects a folder on this machine, got {path!r}: for others set "
            "`jax.config.update('jax_compilation_cache_dir', ...)`."
        )
    least_s = real_number(min_compile_s, "min_compile_s")
    if not least_s >= 0:
        raise ValueError(f"min_compile_s must be at least 0 seconds, got {min_compile_s!r}.")
    place = pathlib.Path(path).absolute()
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        reason = f"cache_compilations cannot write there ({error.strerror}): give another folder"
        raise OSError(error.errno, reason, str(place)) from error
    return CompilationCache(
        place,
        {
            "jax_enable_compilation_cache": True,
            "jax_compilation_cache_dir": str(place),
            "jax_persistent_cache_min_compile_time_secs": least_s,
            # By default JAX keeps no small ones on some file systems.
            "jax_persistent_cache_min_entry_size_bytes": -1,
        },
    )


def _current_folder() -> str | None:
    return jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]


def _change_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Changes settings of JAX, and returns what they were."""
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    # JAX looks at them once.
    compilation_cache.reset_cache()
    return before


def _read_costs(folder: pathlib.Path) -> dict[str, list[float]]:
    """The seconds that programs took to compile, by name; what cannot be read is left out."""
    costs = collections.defaultdict(list)
    try:
        lines = (folder / RECORD).read_text(errors="replace").splitlines()
    except OSError:
        return {}
    for line in lines:
        try:
            name, seconds = json.loads(line)
            costs[name].append(float(seconds))
        except (ValueError, TypeError):
            # Written by something else, or in part.
            continue
    return dict(costs)


def _append_cost(folder: pathlib.Path, name: str, seconds: float) -> None:
    line = json.dumps([name, round(seconds, 6)]) + "\n"
    try:
        # In one write, so that lines of several processes do not mix.
        with open(folder / RECORD, "ab", buffering=0) as file:
            file.write(line.encode())
    except OSError:
        # A full disk, or a folder that is gone, is no reason to stop: JAX too goes on.
        return


def _count(compilations: tuple[Compilation, ...]) -> str:
    return f"{len(compilations)} {'program' if len(compilations) == 1 else 'programs'}"
