"""Formulas that lose digits: which are found, and what is computed in their place."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np

from eqxlike import graph
from tests.graph.spellings import SPELLINGS

FAR = jnp.array([-300.0, -100.0, -20.0, -1.0, 0.5, 3.0, 90.0, 300.0])
NEAR = jnp.array([-4.0, -2.5, -1.0, -0.3, 0.2, 0.9, 2.0, 3.5])


def names_in(function, *args):
    return [each.name for each in graph.unstable(function, *args)]


def test_each_spelling_is_found_and_gone_once_it_is_rewritten():
    for name, function in SPELLINGS:
        assert name in names_in(function, FAR), inspect.getsource(function)
        left = graph.unstable(graph.stabilise(function), FAR)
        assert not [each for each in left if each.is_rewritten], inspect.getsource(function)


def test_values_and_gradients_are_the_same_where_nothing_is_lost():
    functions = [f for name, f in SPELLINGS if "float16" not in name and "precision" not in name]

    def run(x, functions):
        totals = [lambda x, f=f: jnp.sum(f(x)) for f in functions]
        return [jax.value_and_grad(total)(x) for total in totals]

    # As one program: most of these formulas are short.
    found, right = (
        jax.jit(functools.partial(run, functions=each))(NEAR)
        for each in (list(map(graph.stabilise, functions)), functions)
    )
    for function, ours, theirs in zip(functions, found, right, strict=True):
        for mine, naive in zip(ours, theirs, strict=True):
            is_known = np.isfinite(naive)
            text = inspect.getsource(function)
            np.testing.assert_allclose(
                np.where(is_known, mine, 0), np.where(is_known, naive, 0), 1e-3, 2e-5, err_msg=text
            )
