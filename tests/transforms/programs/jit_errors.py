"""Programs with `filter_jit` that fail."""

import jax.numpy as jnp
import numpy as np

from tests.beside_equinox import error_of
from tests.transforms.programs.registry import program

X = jnp.arange(3.0)


@program
def exceptions_pass_through(eqx):
    class Mine(Exception):
        pass

    def fail(x, error):
        raise error

    jitted = eqx.filter_jit(fail)
    return [error_of(jitted, X, error) for error in (Mine(), KeyError("k"), StopIteration())]


@program
def exception_leaves_the_function_usable(eqx):
    @eqx.filter_jit
    def function(x):
        if x.ndim == 2:
            raise ValueError
        return 2 * x

    return function(X), error_of(function, X[None]), function(X)


@program
def interrupt_passes_through(eqx):
    def interrupt():
        raise KeyboardInterrupt

    try:
        eqx.filter_jit(interrupt)()
    except KeyboardInterrupt:
        return "interrupted"


@program
def call_that_does_not_fit_the_signature(eqx):
    function = eqx.filter_jit(lambda x, y: x)
    return [
        error_of(function, X),
        error_of(function, X, X, X),
        error_of(function, X, z=X),
        error_of(function, X, x=X),
    ]


@program
def value_is_asked_for(eqx):
    return [
        error_of(eqx.filter_jit(lambda x: x if x.sum() > 0 else -x), X),
        error_of(eqx.filter_jit(lambda x: float(x.sum())), X),
        error_of(eqx.filter_jit(lambda x: np.asarray(x)), X),
        error_of(eqx.filter_jit(lambda x: jnp.ones(x.astype(int))), jnp.ones(())),
    ]


@program
def tracer_that_leaked(eqx):
    leaked = []
    eqx.filter_jit(leaked.append)(X)
    return error_of(lambda: leaked[0] + 1)


@program
def options_of_jax_that_make_no_sense(eqx):
    function = lambda x: x
    return [
        error_of(lambda option=option: eqx.filter_jit(function, **option)(X))
        for option in ({"static_argnums": 0}, {"static_argnames": "x"}, {"donate_argnums": 0})
    ]


@program
def option_that_is_unknown(eqx):
    return error_of(lambda: eqx.filter_jit(lambda x: x, foo=1)(X))


@program
def shapes_that_do_not_fit(eqx):
    return error_of(eqx.filter_jit(lambda x, y: x + y), X, X[:2])
