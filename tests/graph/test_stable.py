"""Formulas that lose digits: which are found, and what is computed in their place."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np

from eqxlike import graph
from eqxlike.graph._stable._rewrite import StableProgram
from tests.graph.spellings import SPELLINGS

FAR = jnp.array([-300.0, -100.0, -20.0, -1.0, 0.5, 3.0, 90.0, 300.0])
NEAR = jnp.array([-4.0, -2.5, -1.0, -0.3, 0.2, 0.9, 2.0, 3.5])


def names_in(function, *args, rules=graph.RULES):
    return [each.name for each in graph.unstable(function, *args, rules=rules)]


def test_each_spelling_is_found_and_gone_once_it_is_rewritten():
    for name, function in SPELLINGS:
        program = StableProgram(jax.make_jaxpr(function)(FAR), graph.RULES)
        assert name in [match.rule.name for match in program.matches], inspect.getsource(function)
        again = StableProgram(program.rewritten(), graph.RULES)
        assert not again.is_rewritten, inspect.getsource(function)


def test_values_and_gradients_are_the_same_where_nothing_is_lost():
    is_wide = [name not in ("sum in low precision", "cast to float16") for name, _ in SPELLINGS]
    functions = [f for (_, f), wide in zip(SPELLINGS, is_wide, strict=True) if wide][::4]

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
            # Where the naive value is infinite, its gradient is zero.
            is_known = np.isfinite(naive) & np.isfinite(theirs[0])
            text = inspect.getsource(function)
            np.testing.assert_allclose(
                np.where(is_known, mine, 0), np.where(is_known, naive, 0), 1e-3, 2e-5, err_msg=text
            )
