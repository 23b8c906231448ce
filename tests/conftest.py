"""The strict run: two CPU devices, no silent dtype or rank promotion, no key used twice, warnings
are errors.
"""

import gc
import importlib.metadata
import itertools
import os
import pathlib
import zlib
from collections.abc import Callable, Iterator

# Before JAX starts a backend. Set in the environment, so that processes which a test starts have it too.
flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in flags:
    flags += " --xla_force_host_platform_device_count=2"
# Most of the time of the suite is LLVM's, which here compiles more than it runs: a level of optimisation is the
# default of XLA_FLAGS only. JAX 0.10 spends half of the rest on fusions, which newer ones have no flag for.
if "xla_backend_optimization_level" not in flags:
    flags += " --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        flags += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = flags

# What one process compiled, no other compiles again: not the next worker, nor the next run.
ROOT = pathlib.Path(__file__).parents[1]
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "compiled"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)

# No deadline: the first example of a test compiles, the others do not. Under CI every run draws the
# same examples, so that a failure belongs to the change at hand.
hypothesis.settings.register_profile("eqxlike", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("eqxlike")


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Leaves out `tests/pytorch`, which needs an extra of its own, unless it is asked for."""
    is_asked_for = any("pytorch" in arg for arg in config.args)
    return True if collection_path.name == "pytorch" and not is_asked_for else None


def pytest_collection_finish() -> None:
    """Leaves what collecting made out of later garbage collections: 0.2 s each, and tests ask for hundreds."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def getkey(request: pytest.FixtureRequest) -> Callable[[], jax.Array]:
    """A function that returns a fresh key at each call; the same ones each time a test runs."""
    seeds = itertools.count(zlib.crc32(request.node.nodeid.encode()))
    return lambda: jax.random.key(next(seeds))


@pytest.fixture
def plain_dispatch() -> Iterator[None]:
    """Where JAX looks for keys that are used twice, it takes calls another way, in Python."""
    with jax.debug_key_reuse(False):
        yield
