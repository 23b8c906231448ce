"""One function written in C++, Numba and NumPy, called from JAX in every available way.

The function is a fused kernel, `silu(x) = x / (1 + exp(-beta x))`, with another kernel for its
gradient. The script writes the C++ to a folder, compiles it with the system's compiler against the
headers that come with JAX, and calls it

- with `jax.ffi`: XLA calls the kernel on its own buffers, in the compiled program;
- with `eqxlike.filter_pure_callback`, through Python: as NumPy, as Numba, and as the same C++ with
  ctypes and cffi.

All ways have a gradient, by `jax.custom_vjp`, and a batching rule, by `vmap_method`. The table
compares the cost of a call with the cost of the same formula in `jax.numpy`, which XLA fuses. All
calls are measured interleaved. A line names each package that is not installed and is left out.
"""

import argparse
import ctypes
import dataclasses
import importlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eqxlike as eqx
from benchmarks.timing import Measurement, measure
from eqxlike._tables import align

BETA = 1.5
SMALL, LARGE = 1_000, 1_000_000
ROUNDS, QUICK_ROUNDS = 50, 2
BASELINE = "jax.numpy"

SOURCE = r"""
#include <cmath>
#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

// The kernels as C functions, which ctypes and cffi call.

extern "C" void silu(const float* x, float* y, int64_t size, float beta) {
  for (int64_t i = 0; i < size; ++i) y[i] = x[i] / (1.0f + std::exp(-beta * x[i]));
}

extern "C" void silu_gradient(const float* x, const float* cotangent, float* gradient,
                              int64_t size, float beta) {
  for (int64_t i = 0; i < size; ++i) {
    const float s = 1.0f / (1.0f + std::exp(-beta * x[i]));
    gradient[i] = cotangent[i] * (s + beta * x[i] * s * (1.0f - s));
  }
}

// Handlers, which XLA calls.

static ffi::Error Silu(float beta, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  silu(x.typed_data(), y->typed_data(), x.element_count(), beta);
  return ffi::Error::Success();
}

static ffi::Error SiluGradient(float beta, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> cotangent,
                               ffi::ResultBuffer<ffi::F32> gradient) {
  silu_gradient(x.typed_data(), cotangent.typed_data(), gradient->typed_data(), x.element_count(),
                beta);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(SiluHandler, Silu,
                              ffi::Ffi::Bind()
                                  .Attr<float>("beta")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SiluGradientHandler, SiluGradient,
                              ffi::Ffi::Bind()
                                  .Attr<float>("beta")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
"""

Function = Callable[..., Any]


class LeftOut(Exception):
    """Raised if this machine lacks something that a way of calling needs. The message names it."""


def build(folder: pathlib.Path) -> pathlib.Path:
    """Compiles the shared library.

    **Raises:** `LeftOut` if there is no compiler, or the compiler fails.
    """
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    compiler = next((path for name in names if name and (path := shutil.which(name))), None)
    if compiler is None:
        raise LeftOut("there is no C++ compiler: install g++ or clang++, or set CXX")
    source, library = folder / "silu.cc", folder / "libsilu.so"
    source.write_text(SOURCE)
    command = [compiler, "-O3", "-std=c++17", "-shared", "-fPIC", f"-I{jax.ffi.include_dir()}"]
    if sys.platform == "darwin":
        command += ["-undefined", "dynamic_lookup"]
    built = subprocess.run(
        [*command, str(source), "-o", str(library)], capture_output=True, text=True, check=False
    )
    if built.returncode:
        first = next((line for line in built.stderr.splitlines() if "error" in line), built.stderr)
        raise LeftOut(f"{compiler} cannot build the library: {first.strip()}")
    return library


def differentiable(forward: Function, gradient: Function) -> Function:
    """`forward(x)` with the gradient `gradient(x, cotangent)`."""
    function = jax.custom_vjp(forward)
    function.defvjp(lambda x: (forward(x), x), lambda x, cotangent: (gradient(x, cotangent),))
    return function


def by_ffi(library: pathlib.Path) -> Function:
    """Makes the kernels operations of the compiled program. The kernels process a batch in one
    call.
    """
    symbols = ctypes.cdll.LoadLibrary(str(library))
    for name in ("SiluHandler", "SiluGradientHandler"):
        jax.ffi.register_ffi_target(
            f"eqxlike_{name}", jax.ffi.pycapsule(getattr(symbols, name)), platform="cpu"
        )

    def call(name: str, x: jax.Array, *others: jax.Array) -> Any:
        result = jax.ShapeDtypeStruct(x.shape, x.dtype)
        function = jax.ffi.ffi_call(f"eqxlike_{name}", result, vmap_method="broadcast_all")
        return function(x, *others, beta=np.float32(BETA))

    return differentiable(
        lambda x: call("SiluHandler", x),
        lambda x, cotangent: call("SiluGradientHandler", x, cotangent),
    )


def by_callback(forward: Function, gradient: Function) -> Function:
    """Makes a function that calls functions of NumPy arrays through Python."""

    def call(function: Function, x: jax.Array, *others: jax.Array) -> Any:
        result = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return eqx.filter_pure_callback(
            function, x, *others, result_shape_dtypes=result, vmap_method="broadcast_all"
        )

    return differentiable(
        lambda x: call(forward, x), lambda x, cotangent: call(gradient, x, cotangent)
    )


def with_numpy() -> Function:
    beta = np.float32(BETA)

    def gradient(x: np.ndarray, cotangent: np.ndarray) -> np.ndarray:
        x, cotangent = np.asarray(x), np.asarray(cotangent)
        s = 1 / (1 + np.exp(-beta * x))
        return cotangent * (s + beta * x * s * (1 - s))

    def forward(x: np.ndarray) -> np.ndarray:
        x = np.asarray(x)
        return x / (1 + np.exp(-beta * x))

    return by_callback(forward, gradient)


def with_numba() -> Function:
    numba = imported("numba")
    beta = np.float32(BETA)

    @numba.vectorize(["float32(float32)"])
    def forward(x: Any) -> Any:
        return x / (np.float32(1) + np.exp(-beta * x))

    @numba.vectorize(["float32(float32, float32)"])
    def gradient(x: Any, cotangent: Any) -> Any:
        s = np.float32(1) / (np.float32(1) + np.exp(-beta * x))
        return cotangent * (s + beta * x * s * (np.float32(1) - s))

    return by_callback(
        lambda x: forward(np.asarray(x)),
        lambda x, cotangent: gradient(np.asarray(x), np.asarray(cotangent)),
    )


def with_ctypes(library: pathlib.Path) -> Function:
    symbols = ctypes.cdll.LoadLibrary(str(library))
    pointer = np.ctypeslib.ndpointer(np.float32, flags="C_CONTIGUOUS")
    symbols.silu.argtypes = [pointer] * 2 + [ctypes.c_int64, ctypes.c_float]
    symbols.silu_gradient.argtypes = [pointer] * 3 + [ctypes.c_int64, ctypes.c_float]
    return with_pointers(symbols.silu, symbols.silu_gradient, lambda array: array)


def with_cffi(library: pathlib.Path) -> Function:
    ffi = imported("cffi").FFI()
    ffi.cdef(
        "void silu(const float*, float*, int64_t, float);"
        "void silu_gradient(const float*, const float*, float*, int64_t, float);"
    )
    symbols = ffi.dlopen(str(library))
    return with_pointers(
        symbols.silu, symbols.silu_gradient, lambda array: ffi.from_buffer("float[]", array)
    )


def with_pointers(forward: Function, gradient: Function, pointer: Function) -> Function:
    """Wraps C functions of pointers to the arrays, a size and beta."""

    def call(function: Function, *arrays: Any) -> np.ndarray:
        inputs = [np.ascontiguousarray(array) for array in arrays]
        result = np.empty_like(inputs[0])
        function(*map(pointer, inputs), pointer(result), result.size, BETA)
        return result

    return by_callback(
        lambda x: call(forward, x), lambda x, cotangent: call(gradient, x, cotangent)
    )


def imported(name: str) -> Any:
    """Imports a package. Raises `LeftOut` if the package is not installed."""
    if importlib.util.find_spec(name) is None:
        raise LeftOut(f"{name} is not installed: pip install {name}")
    return importlib.import_module(name)


def ways(folder: pathlib.Path) -> tuple[dict[str, Function], list[str]]:
    """The function in each way that works on this machine, and a line for each other way."""
    found: dict[str, Function] = {BASELINE: lambda x: x / (1 + jnp.exp(-BETA * x))}
    left_out: list[str] = []

    def add(name: str, make: Callable[[], Function]) -> None:
        try:
            found[name] = make()
        except LeftOut as reason:
            left_out.append(f"left out: {name}: {reason}")

    try:
        library = build(folder)
    except LeftOut as reason:
        left_out.append(f"left out: C++ by jax.ffi, ctypes and cffi: {reason}")
        library = None
    if library is not None:
        add("C++ by jax.ffi", lambda: by_ffi(library))
    add("callback, NumPy", with_numpy)
    add("callback, Numba", with_numba)
    if library is not None:
        add("callback, C++ by ctypes", lambda: with_ctypes(library))
        add("callback, C++ by cffi", lambda: with_cffi(library))
    return found, left_out


@dataclasses.dataclass(frozen=True)
class Job:
    """A function to measure, and the size of its argument. `make` returns the function."""

    title: str
    make: Callable[[Function], Function]
    size: int


JOBS = (
    Job(f"{SMALL:,} numbers", lambda function: function, SMALL),
    Job(f"{LARGE:,} numbers", lambda function: function, LARGE),
    Job(f"gradient, {LARGE:,}", lambda function: jax.grad(lambda x: function(x).sum()), LARGE),
)


def errors(functions: dict[str, Function]) -> dict[str, float]:
    """The largest difference from `jax.numpy` in values, gradients and batched values."""
    x = jax.random.normal(jax.random.key(0), (6, 5))

    def results(function: Function) -> list[jax.Array]:
        gradient = jax.grad(lambda x: jnp.sin(function(x)).sum())
        return [eqx.filter_jit(each)(x) for each in (function, jax.vmap(function), gradient)]

    expected = results(functions[BASELINE])
    return {
        name: max(
            float(jnp.abs(one - other).max())
            for one, other in zip(results(function), expected, strict=True)
        )
        for name, function in functions.items()
    }


def measured(functions: dict[str, Function], rounds: int) -> list[Measurement]:
    """The times of each job, all ways interleaved."""
    found = []
    for job in JOBS:
        x = jax.random.normal(jax.random.key(0), (job.size,))
        jitted = {name: eqx.filter_jit(job.make(each)) for name, each in functions.items()}
        calls = {name: lambda each=each, x=x: each(x) for name, each in jitted.items()}
        found.append(measure(calls, baseline=BASELINE, rounds=rounds))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds, checks, measures and prints; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a quick look; do not quote its times")
    options = parser.parse_args(arguments)
    if jax.default_backend() != "cpu":
        print("The kernel is for the CPU: set JAX_PLATFORMS=cpu", file=sys.stderr)
        return 2
    # Some systems cannot delete the file of a loaded library, so ignore errors.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        functions, left_out = ways(pathlib.Path(folder))
        differences = errors(functions)
        columns = [each.columns for each in measured(functions, _rounds(options.quick))]
    header = ("microseconds a call", *(job.title for job in JOBS), "largest difference")
    rows = [
        (
            name,
            *(f"{each[name].completion_us:,.0f}" for each in columns),
            f"{differences[name]:.0e}",
        )
        for name in functions
    ]
    print(align(header, rows))
    print("\n".join(left_out))
    return 0


def _rounds(is_quick: bool) -> int:
    return QUICK_ROUNDS if is_quick else ROUNDS


if __name__ == "__main__":
    sys.exit(main())
