"""Tests that take the library as `eqxi` run on Equinox too, whose behaviour is the measure."""

import functools
import inspect

import equinox.internal

import eqxlike.internal


def both(test):
    """The test for each of the two libraries, Equinox first."""

    @functools.wraps(test)
    def on_both(*args, **kwargs):
        for eqxi in (equinox.internal, eqxlike.internal):
            test(*args, eqxi=eqxi, **kwargs)

    signature = inspect.signature(test)
    others = [each for each in signature.parameters.values() if each.name != "eqxi"]
    on_both.__signature__ = signature.replace(parameters=others)  # pyright: ignore
    return on_both
