"""Functions and Modules for several tests of `filter_jit`."""

import gc
import sys

import jax.numpy as jnp
import numpy as np

from eqxlike import Module, field, filter_jit


class Affine(Module):
    scale: object
    shift: object = 0.0
    mode: object = field(static=True, default="plain")

    def __call__(self, x):
        return self.scale * x + self.shift

    def apply(self, x, factor=1.0):
        return factor * self(x)

    @filter_jit
    def jitted(self, x):
        return self(x)


def double(x, /, how="double"):
    """Twice the argument."""
    return 2 * x


X = np.arange(3.0, dtype=np.float32)


def equal(first, second):
    return bool(jnp.array_equal(first, second))


def scaled(x, scale=1.0):
    return x * scale


def calls_of(function, *args):
    """The Python and C functions that a call runs, as pairs of file and name."""
    calls = []

    def note(frame, event, called):
        if event == "call":
            calls.append((frame.f_code.co_filename.split("#")[0], frame.f_code.co_name))
        elif event == "c_call":
            calls.append(("C", called.__name__))

    before = sys.getprofile()
    # Garbage collection, which may run at any time, calls Python functions.
    gc.disable()
    sys.setprofile(note)
    try:
        function(*args)
    finally:
        sys.setprofile(before)
        gc.enable()
    return calls
