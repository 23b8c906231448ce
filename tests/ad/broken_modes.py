"""Correct modes, and modes with each kind of error that a comparison must find."""

import functools

import jax.numpy as jnp

import eqxlike as eqx
from eqxlike import ad

compare = functools.partial(ad.compare, rounds=1)


def loss(parameters, power):
    return jnp.sum(jnp.sin(parameters["w"]) ** power) + jnp.sum(parameters["b"] * 3)


PARAMETERS = {"b": jnp.array([0.5, -1.0]), "n": jnp.arange(2), "w": jnp.array([1.0, 2.0, 3.0])}


class Broken(ad.Mode):
    """Reverse mode, whose gradient is changed by `change`."""

    change: object = eqx.field(static=True)

    def value_and_grad(self, function, arrays):
        output, gradient = ad.Reverse().value_and_grad(function, arrays)
        return output, self.change(gradient)


class Elsewhere(ad.Mode):
    """Evaluates the function at a wrong point."""

    def value_and_grad(self, function, arrays):
        return ad.Reverse().value_and_grad(function, [array + 1 for array in arrays])


def refuse(gradient):
    error = ValueError("no rule for this")
    error.add_note("Use another mode.")
    raise error


MODES = {
    "right": ad.Reverse(),
    "off": Broken(lambda found: [found[0], found[1] * 1.253]),
    "nan": Broken(lambda found: [found[0], found[1].at[1].set(jnp.nan)]),
    "inf": Broken(lambda found: [found[0] / 0, found[1]]),
    "raises": Broken(refuse),
    "shape": Broken(lambda found: [found[0], found[1][None]]),
    "dtype": Broken(lambda found: [found[0].astype(jnp.float16), found[1]]),
    "missing": Broken(lambda found: [None, found[1]]),
    "structure": Broken(lambda found: [found[0], (found[1], found[1])]),
    "elsewhere": Elsewhere(),
    "also right": ad.Forward(),
}


def row_of(comparison, name):
    (row,) = (row for row in comparison.rows if row.mode == name)
    return row
