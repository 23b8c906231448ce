"""How often is traced, ahead of time compilation, donation."""

import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.beside_equinox import error_of
from tests.transforms.programs.registry import program

X = jnp.arange(3.0)


def count_traces(eqx, calls):
    traces = []

    @eqx.filter_jit
    def function(*args, **kwargs):
        traces.append(args)

    numbers = []
    for args, kwargs in calls:
        function(*args, **kwargs)
        numbers.append(len(traces))
    return numbers


@program
def traces_for_arrays(eqx):
    arrays = [X, 2 * X, np.asarray(X), X[:2], X.astype(jnp.int32), X]
    return count_traces(eqx, [((array,), {}) for array in arrays])


@program
def traces_for_statics(eqx):
    statics = ["a", "b", "a", 1, 2, 1, None, jnp.sin, jnp.cos, jnp.sin]
    return count_traces(eqx, [((static,), {}) for static in statics])


@program
def traces_for_structures(eqx):
    trees = [(X, X), [X, X], {"a": X}, {"b": X}, (X, (X,)), (X, X)]
    return count_traces(eqx, [((tree,), {}) for tree in trees])


@program
def traces_for_equal_modules(eqx):
    class Model(eqx.Module):
        weight: Any
        name: str = eqx.field(static=True)

    models = [Model(X, "n"), Model(2 * X, "n"), Model(X, "m"), Model(X, "n")]
    return count_traces(eqx, [((model,), {}) for model in models])


# --- ahead of time ---


@program
def lowered_compiled_and_called(eqx):
    compiled = eqx.filter_jit(lambda x, s: (2 * x, s)).lower(X, "s").compile()
    return compiled(X, "s"), compiled(3 * X, "s")


@program
def lowered_method_and_module(eqx):
    class Model(eqx.Module):
        weight: Any

        @eqx.filter_jit
        def scale(self, x):
            return self.weight * x

        def __call__(self, x):
            return self.weight + x

    model = Model(X)
    jitted = eqx.filter_jit(model)
    return Model.scale.lower(model, X).compile()(model, X), jitted.lower(X).compile()(X)


@program
def text_of_lowered(eqx):
    text = eqx.filter_jit(lambda x: jnp.sin(x)).lower(X).as_text()
    return "stablehlo.sine" in text


@program
def compiled_for_another_shape(eqx):
    return error_of(eqx.filter_jit(lambda x: x).lower(X).compile(), X[:2])


# --- donation ---


def donate(eqx, word):
    """Which arguments were deleted, and how often JAX warned that a buffer was of no use."""
    x, y, z = jnp.ones(4), jnp.ones(5), jnp.ones(6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        eqx.filter_jit(lambda x, y, z: (x + 1, y + 1), donate=word)(x, y, z)
    return [x.is_deleted(), y.is_deleted(), z.is_deleted(), len(caught)]


@program
def donation_of_nothing(eqx):
    return donate(eqx, "none")


@program
def donation_of_all(eqx):
    return donate(eqx, "all")


@program
def donation_of_all_except_the_first(eqx):
    return donate(eqx, "all-except-first")


@program
def donation_with_warnings(eqx):
    return donate(eqx, "warn")


@program
def donation_of_all_except_the_first_with_warnings(eqx):
    return donate(eqx, "warn-except-first")


@program
def donation_by_an_unknown_word(eqx):
    return error_of(lambda: eqx.filter_jit(lambda x: x, donate="some"))


@program
def donated_argument_used_again(eqx):
    x = jnp.ones(4)
    increment = eqx.filter_jit(lambda x: x + 1, donate="all")
    increment(x)
    return error_of(increment, x)
