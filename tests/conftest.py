"""Strict settings: two CPU devices, errors for dtype and rank promotion, for reused keys and for
warnings.
"""

import faulthandler
import gc
import importlib.metadata
import importlib.util
import itertools
import os
import pathlib
import signal
import zlib
from collections.abc import Callable, Iterator
from typing import Any

# Set in the environment before JAX is imported, so that subprocesses of tests inherit the flags.
os.environ.setdefault("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"
# The suite spends most of its time in compilation. These flags halve that time. The last flag
# saves the most, but newer versions of JAX refuse it. An optimisation level in XLA_FLAGS takes
# precedence (`.ci/run` sets one).
if "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

# BLAS uses one thread: on busy cores, two threads took sixty times as long. `threadpoolctl` is
# needed because a pytest plugin imports NumPy earlier, which then ignores the environment.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if importlib.util.find_spec("threadpoolctl"):  # scikit-learn requires it
    importlib.import_module("threadpoolctl").threadpool_limits(1, "blas")

# Workers and later runs share compiled programs. The cache distinguishes versions of JAX. JAX
# compiles a program again, with a warning, if it cannot read the entry.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".pytest_cache/compiled")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault(
    "PYTHONWARNINGS",
    "ignore:Error reading persistent compilation cache entry:UserWarning,"
    "ignore:Error writing persistent compilation cache entry:UserWarning",
)

import hypothesis
import jax
import pytest

from tests.changed import is_to_run

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)

# No deadline, because the first example of a test compiles. In CI every run draws the same
# examples, so that only a change can cause a failure. `.ci/run --whole` passes
# --hypothesis-profile=thorough.
for profile, max_examples in {"quick": 30, "thorough": 100}.items():
    hypothesis.settings.register_profile(
        profile, max_examples=max_examples, deadline=None, derandomize="CI" in os.environ
    )
hypothesis.settings.load_profile("quick")


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run only the tests that the changes since the branch main can break"
    parser.addoption("--changed", action="store_true", help=text)


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Skips the pages and the folders that need their own extra, unless the command names them."""
    if collection_path.parent.name != "tests":
        return None
    name = collection_path.name
    if name in ("pages", "pytorch", "pretrained", "downstream"):
        return None if any(name in arg for arg in config.args) else True
    if config.getoption("changed") and (collection_path.is_dir() or name.startswith("test_")):
        return None if is_to_run(collection_path, config.rootpath) else True
    return None


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if session.config.getoption("changed") and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


# The longest files start first, so that no worker starts one of them at the end.
LONGEST = (
    "tests/pages/test_docstrings.py",
    "tests/pages/test_pages.py",
    "tests/bayes/methods/test_samplers.py",
    "tests/bayes/methods/test_laws.py",
    "tests/bayes/methods/test_laplace.py",
    "tests/pages/demo/test_demo.py",
    "tests/nn/test_laws.py",
    "tests/pages/test_benchmarks.py",
    "tests/pages/types/test_types.py",
)


CRASHES = pytest.StashKey[pathlib.Path]()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Writes the stacks of a crashed process to a file, for the summary of the run."""
    config.stash[CRASHES] = folder = config.rootpath / ".pytest_cache/crashes"
    worker = getattr(config, "workerinput", {}).get("workerid")
    if worker is None:
        folder.mkdir(parents=True, exist_ok=True)
        for each in folder.iterdir():
            each.unlink(missing_ok=True)
    else:
        # The file stays open until the process ends.
        faulthandler.enable(open(folder / worker, "w"))  # noqa: SIM115


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Prints the stacks of crashed processes."""
    runners = ("/_pytest/", "/pluggy/", "/xdist/", "/execnet/", "Extension modules:")
    for path in sorted(config.stash[CRASHES].iterdir()):
        if stacks := path.read_text():
            terminalreporter.section(f"{path.name} crashed")
            lines = stacks.splitlines(keepends=True)
            terminalreporter.write(
                "".join(line for line in lines if not any(name in line for name in runners))
            )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Disables garbage collection, which took a quarter of the time of collecting tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.nodeid.partition("::")[0], len(ranks)))


MOST_PROGRAMS, MOST_SINCE_FROZEN = 300, 1000
programs = {"held": 0, "since frozen": 0}


def count_program(event: str, duration_s: float, **about: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        for name in programs:
            programs[name] += 1


jax.monitoring.register_event_duration_secs_listener(count_program)


def forget_programs() -> None:
    """Clears the programs of JAX and freezes the heap.

    JAX keeps 1.7 MB for each compiled program, and compiles half as fast after a thousand programs.
    Garbage collection skips frozen objects. Without freezing, each collection in a test would take
    half a second. Frozen garbage is collected after `MOST_SINCE_FROZEN` programs.
    """
    programs["held"] = 0
    jax.clear_caches()
    if programs["since frozen"] > MOST_SINCE_FROZEN:
        programs["since frozen"] = 0
        gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def young_heap() -> None:
    # Small files share programs with earlier files, which saves a tenth of all programs.
    if programs["held"] > MOST_PROGRAMS // 2:
        forget_programs()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    if programs["held"] > MOST_PROGRAMS and nextitem:
        forget_programs()


@pytest.fixture
def getkey(request: pytest.FixtureRequest) -> Callable[[], jax.Array]:
    """A function that returns a new key at each call, and the same keys in each run of a test."""
    seeds = itertools.count(zlib.crc32(request.node.nodeid.encode()))
    return lambda: jax.random.key(next(seeds))


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[], None]]:
    """A function that simulates Ctrl-C.

    The fixture restores Python's handler of SIGINT, because a shell disables SIGINT in background
    processes.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def plain_dispatch() -> Iterator[None]:
    """Disables the check for reused keys. The check makes JAX dispatch calls in Python."""
    with jax.debug_key_reuse(False):
        yield


@pytest.fixture
def compiles_alone() -> Iterator[None]:
    """Disables writes to the compilation cache. Writes are not atomic, so another thread could read
    a partial entry.
    """
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e6)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)
