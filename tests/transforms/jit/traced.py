"""A function that counts its traces, and a Module to pass to it."""

import functools
import inspect

from eqxlike import Module, field, filter_jit


class Traced:
    """A filtered function, and how often it was traced."""

    def __init__(self, function, **options):
        self.count = 0

        @functools.wraps(function)
        def counting(*args, **kwargs):
            self.count += 1
            return function(*args, **kwargs)

        # Said outright: `functools.wraps` alone tells nothing of how a decorator may be called.
        counting.__signature__ = inspect.signature(function)
        self.jitted = filter_jit(counting, **options)

    def __call__(self, *args, **kwargs):
        return self.jitted(*args, **kwargs)


class Affine(Module):
    scale: object
    shift: object = None
    mode: object = field(static=True, default="plain")

    def __call__(self, x):
        return self.scale * x
