"""Programs with `filter_jit`: arguments, outputs, what is wrapped, errors, traces and donation."""

import collections
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from tests.beside_equinox import Programs, error_of

X = jnp.arange(3.0)
PROGRAMS = Programs()

Pair = collections.namedtuple("Pair", ["x", "y"])


def types_of(seen, leaves):
    seen.append([type(leaf).__name__ if isinstance(leaf, int | float) else "" for leaf in leaves])
    return leaves


def are_traced(seen, leaves):
    seen.append([isinstance(leaf, jax.core.Tracer) for leaf in leaves])
    return leaves


def noted(eqx, note, *args):
    """The output of a function under `filter_jit`, and what `note` found in its arguments."""
    seen = []
    return eqx.filter_jit(lambda *args: note(seen, args))(*args), seen


# Functions, each with calls of it.
CALLS = {
    "keywords": (
        lambda x, y: x - y,
        [((), {"x": X, "y": 2 * X}), ((X,), {"y": 2 * X}), ((), {"y": X, "x": 2 * X})],
    ),
    "defaults": (
        lambda x, factor=2.0, *, offset=X, name="n": (factor * x + offset, name),
        [((X,), {}), ((X, 3.0), {}), ((X,), {"offset": 1.0}), ((X,), {"name": "m"})],
    ),
    "variadic_arguments": (
        lambda first, *others, **named: (first, others, named),
        [((X,), {}), ((X, 1, "a"), {}), ((X, X), {"b": 2, "a": X})],
    ),
    "containers": (
        lambda tree: tree,
        [
            (({"list": [X, 1, [None]], "tuple": (X, "s"), "pair": Pair(X, 2)},), {}),
            ((collections.OrderedDict(b=X, a=1),), {}),
        ],
    ),
    "outputs": (
        lambda x: ((2 * x,) * 2, np.ones(2, np.float32), np.float32(3)),
        [((X,), {})],
    ),
    "dtype_and_function": (
        lambda dtype, activation: (jnp.zeros(2, dtype), activation(X)),
        [((jnp.int32, jnp.tanh), {}), ((np.dtype("float16"), jnp.sin), {})],
    ),
}
for name, (function, calls) in CALLS.items():
    PROGRAMS[name] = lambda eqx, function=function, calls=calls: [
        eqx.filter_jit(function)(*args, **kwargs) for args, kwargs in calls
    ]
PROGRAMS |= {
    "numbers_of_python_stay": lambda eqx: noted(eqx, types_of, 1, 2.5, True, 1j),
    "arrays_of_numpy_are_traced": lambda eqx: noted(
        eqx, are_traced, np.ones(2, np.float32), np.float32(3), np.int32(3), np.bool_(True)
    ),
}


@PROGRAMS.add
def argument_is_returned_as_an_equal_tree(eqx):
    passed = {"x": [X, "s"]}
    returned = eqx.filter_jit(lambda tree: tree)(passed)
    return returned, returned is passed, returned["x"] is passed["x"]


# --- what is wrapped ----------------------------------------------------------------------------


@PROGRAMS.add
def methods(eqx):
    class Model(eqx.Module):
        weight: Any
        name: str = eqx.field(static=True)

        @eqx.filter_jit
        def scale(self, x, times=2):
            return times * self.weight * x, self.name

        @classmethod
        @eqx.filter_jit
        def make(cls, x):
            return cls(x, "made").weight, cls.__name__

        @staticmethod
        @eqx.filter_jit
        def double(x):
            return 2 * x

        @property
        @eqx.filter_jit
        def total(self):
            return self.weight.sum()

        @eqx.filter_jit
        def __call__(self, x):
            return self.scale(x)

    model = Model(X, "n")
    return (
        [model.scale(X), model.scale(X, times=3), Model.scale(model, X), model(X), model.total],
        [Model.make(X), model.make(X), Model.double(X), model.double(X)],
    )


@PROGRAMS.add
def partials(eqx):
    def function(x, y, *, name):
        return x - y, name

    bound = functools.partial(function, X, name="n")
    call = eqx.filter_jit(lambda call, y: call(y))
    return (
        [eqx.filter_jit(bound)(2 * X), eqx.filter_jit(bound)(2 * X, name="m")],
        [
            (eqx.filter_jit(kind(function, X, name="n"))(X), call(kind(function, X, name="n"), X))
            for kind in (jtu.Partial, eqx.Partial)
        ],
    )


@PROGRAMS.add
def gradient_and_update_of_a_model(eqx):
    class Model(eqx.Module):
        weight: Any
        bias: Any
        activation: Any
        name: str = eqx.field(static=True)

        def __call__(self, x):
            return self.activation(self.weight @ x + self.bias)

    @eqx.filter_jit
    def step(model, x):
        value, gradient = eqx.filter_value_and_grad(lambda model: model(x).sum())(model)
        updates = jtu.tree_map(lambda g: -0.1 * g, gradient)
        return value, eqx.apply_updates(model, updates)

    model = Model(jnp.ones((2, 3)), np.zeros(2, np.float32), jnp.tanh, "n")
    values = []
    for _ in range(3):
        value, model = step(model, X)
        values.append(value)
    return values, model.weight, model.bias, model.name


# --- errors -------------------------------------------------------------------------------------


class Mine(Exception):
    pass


def fail(x, error):
    raise error


# Functions, each with arguments by place and by keyword.
FAILING = [
    *((fail, (X, error), {}) for error in (Mine(), KeyError("k"), StopIteration())),
    (lambda x, y: x, (X,), {}),
    (lambda x, y: x, (X, X, X), {}),
    (lambda x, y: x, (X,), {"z": X}),
    (lambda x, y: x, (X,), {"x": X}),
    (lambda x: x if x.sum() > 0 else -x, (X,), {}),
    (lambda x: float(x.sum()), (X,), {}),
    (lambda x: np.asarray(x), (X,), {}),
    (lambda x: jnp.ones(x.astype(int)), (jnp.ones(()),), {}),
]
PROGRAMS["errors"] = lambda eqx: [
    *(error_of(eqx.filter_jit(function), *args, **kwargs) for function, args, kwargs in FAILING),
    error_of(eqx.filter_jit(lambda x: x).lower(X).compile(), X[:2]),
]

# --- how often is traced, donation --------------------------------------------------------------


def count_traces(eqx, arguments):
    traces, numbers = [], []
    function = eqx.filter_jit(traces.append)
    for argument in arguments:
        function(argument)
        numbers.append(len(traces))
    return numbers


def donate(eqx, word):
    """Which arguments were deleted, and how often JAX warned that a buffer was of no use."""
    x, y, z = jnp.ones(4), jnp.ones(5), jnp.ones(6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        eqx.filter_jit(lambda x, y, z: (x + 1, y + 1), donate=word)(x, y, z)
    return [x.is_deleted(), y.is_deleted(), z.is_deleted(), len(caught)]


TRACED = [
    [X, 2 * X, np.asarray(X), X[:2], X.astype(jnp.int32), X],
    ["a", "b", "a", 1, 2, 1, None, jnp.sin, jnp.cos, jnp.sin],
    [(X, X), [X, X], {"a": X}, {"b": X}, (X, (X,)), (X, X)],
]
PROGRAMS |= {
    "traces": lambda eqx: [count_traces(eqx, arguments) for arguments in TRACED],
    "donation": lambda eqx: [
        donate(eqx, word)
        for word in ("none", "all", "all-except-first", "warn", "warn-except-first")
    ],
}
