"""`filter_vmap`: axes by name and by function, ensembles, methods, collective operations."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from tests.beside_equinox import Programs, error_of

X = jnp.arange(3.0)
MATRIX = jnp.arange(6.0).reshape(2, 3)
ONE, TWO, THREE = jnp.array(1.0), jnp.array(2.0), jnp.array(3.0)
PROGRAMS = Programs()


def of_each_leaf(condition, axis):
    """The axis of the leaves of which `condition` holds; the others have none."""
    return lambda leaf: axis if hasattr(leaf, "ndim") and condition(leaf) else None


def fail(x):
    raise KeyError("mine")


COLLECTIVE = lambda x: (jax.lax.psum(x, "i"), jax.lax.pmean(x, "i"), jax.lax.all_gather(x, "i"))

# Each a function, the options of `filter_vmap`, and the arguments of the call.
MAPPED = {
    # --- axes by the names of parameters ---
    "by_name": (lambda x, y, s: (x + y, s), {"in_axes": {"y": None}}, (X, THREE, "s")),
    "by_name_the_others_along_the_first": (
        lambda x, y: x.sum() + y.sum(),
        {"in_axes": {"y": 1}},
        (MATRIX.T, MATRIX),
    ),
    "by_name_as_prefixes": (
        lambda tree, y: tree["a"] + tree["b"][0] + y,
        {"in_axes": {"tree": {"a": 0, "b": (None, None)}, "y": lambda leaf: None}},
        ({"a": X, "b": (ONE, "s")}, TWO),
    ),
    "by_name_of_a_partial": (
        functools.partial(lambda x, y: x + y, ONE),
        {"in_axes": {"y": 0}},
        (X,),
    ),
    "by_a_name_that_is_not_there": (lambda x, y=1: x, {"in_axes": {"z": None}}, (X,)),
    "by_the_name_of_a_default": (lambda x, y=1: x, {"in_axes": {"y": None}}, (X,)),
    # --- axes ---
    "function_of_each_leaf": (
        lambda tree, s: {"sum": tree["m"] + tree["x"], "x": tree["x"], "s": s},
        {
            "in_axes": of_each_leaf(lambda leaf: leaf.ndim == 2, 0),
            "out_axes": of_each_leaf(lambda leaf: True, 0),
        },
        ({"m": MATRIX, "x": X}, "s"),
    ),
    "function_of_each_leaf_of_the_output": (
        lambda x: {"x": x, "one": jnp.ones(()), "s": "s"},
        {"out_axes": of_each_leaf(lambda leaf: leaf.ndim, -1)},
        (MATRIX,),
    ),
    "counted_from_the_end": (
        lambda x, y: (x + y, y),
        {"in_axes": (-1, -2), "out_axes": (-1, -2)},
        (MATRIX, MATRIX.T),
    ),
    "numpy_scalar_that_is_not_mapped": (
        lambda x, y: (x, y),
        {"in_axes": (0, None)},
        (X, np.float32(1)),
    ),
    "unmapped_numpy_array_stays_one": (
        lambda x, y: type(y).__name__,
        {"in_axes": (0, None)},
        (X, np.ones(2)),
    ),
    "numbers_are_stacked": (lambda x: (1, 2.5, True, 1j), {"out_axes": 0}, (X,)),
    "axis_size_alone": (
        lambda x: (x, jax.lax.axis_index("i")),
        {"in_axes": None, "axis_size": 3, "axis_name": "i"},
        (TWO,),
    ),
    "axis_size_and_axis": (lambda x: x, {"axis_size": 2}, (MATRIX,)),
    "defaults_by_keyword": (lambda x, *, y=MATRIX: x * y.sum(), {}, (X,)),
    # --- collective operations, errors ---
    "collective_operations": (COLLECTIVE, {"axis_name": "i", "out_axes": (0, None, 0)}, (X,)),
    "mapped_exception": (fail, {}, (X,)),
}


REFUSED = ("by_a_name_that_is_not_there", "by_the_name_of_a_default", "mapped_exception")
for name, (function, options, args) in MAPPED.items():
    PROGRAMS[name] = lambda eqx, name=name, function=function, options=options, args=args: (
        error_of(eqx.filter_vmap(function, **options), *args)
        if name in REFUSED
        else eqx.filter_vmap(function, **options)(*args)
    )


@PROGRAMS.add
def module_as_prefix(eqx):
    class Pair(eqx.Module):
        x: Any
        y: Any

    pair = eqx.filter_vmap(
        lambda pair: Pair(pair.x + pair.y, pair.y), in_axes=(Pair(0, None),), out_axes=Pair(1, None)
    )(Pair(MATRIX, jnp.ones(3)))
    return pair.x, pair.y


# --- what is wrapped ----------------------------------------------------------------------------


@PROGRAMS.add
def ensemble(eqx):
    class Model(eqx.Module):
        weight: Any
        activation: Any
        name: str = eqx.field(static=True)

        def __init__(self, key):
            self.weight = jax.random.uniform(key, (2,))
            self.activation = jnp.tanh
            self.name = "n"

        def __call__(self, x):
            return self.activation(self.weight * x)

    models = eqx.filter_vmap(lambda key: Model(key))(jax.random.split(jax.random.key(0), 3))
    shared = eqx.filter_vmap(lambda model, x: model(x), in_axes=(eqx.if_array(0), None))
    each = eqx.filter_vmap(lambda model, x: model(x))
    return models.weight, models.name, shared(models, TWO), each(models, X)


@PROGRAMS.add
def modules_and_their_methods(eqx):
    class Model(eqx.Module):
        weight: Any

        @eqx.filter_vmap
        def each(self, x):
            return self.weight * x

        @eqx.filter_vmap(in_axes={"x": None})
        def each_by_name(self, x):
            return self.weight * x

        @eqx.filter_vmap(in_axes=(None, 0))
        def shared(self, x):
            return self.weight * x

        @eqx.filter_vmap(in_axes={"self": None})
        def shared_by_name(self, x):
            return self.weight * x

        @staticmethod
        @eqx.filter_vmap
        def static(x):
            return x + 1

        @classmethod
        @eqx.filter_vmap(in_axes=(None, 0))
        def of_class(cls, x):
            return x + 2

        def plain(self, x, y=2.0):
            return self.weight * x * y

        def __call__(self, x):
            return self.weight.sum() * x

    model = Model(jnp.ones(3))
    arrays = jtu.tree_leaves(eqx.filter(eqx.filter_vmap(model), eqx.is_array))
    plain = eqx.filter_vmap(model.plain, in_axes={"y": None})
    return (
        [method(X) for method in (model.each, model.each_by_name, model.shared)],
        [method(X) for method in (model.shared_by_name, model.static, model.of_class)],
        [Model.static(X), Model.shared(model, X), eqx.filter_vmap(model)(X), arrays],
        [eqx.filter_vmap(model.plain)(X), plain(X, jnp.ones(3))],
        eqx.filter_vmap(eqx.filter_vmap(Model(TWO)))(MATRIX),
    )


# --- nested, and with other transformations -----------------------------------------------------


@PROGRAMS.add
def nested(eqx):
    inner = eqx.filter_vmap(lambda w, x: w * x, in_axes=(None, 0))
    outer = eqx.filter_vmap(inner, in_axes=(0, None), out_axes=1)
    summed = eqx.filter_vmap(lambda x: jax.lax.psum(x, ("i", "j")), axis_name="j")
    return outer(jnp.arange(2.0), X), eqx.filter_vmap(summed, axis_name="i")(MATRIX)


@PROGRAMS.add
def gradients_in_and_around(eqx):
    inner = eqx.filter_vmap(eqx.filter_grad(lambda x, s: (x**2).sum()))
    outer = eqx.filter_grad(lambda w: eqx.filter_vmap(lambda x: w * x)(X).sum())
    return inner(MATRIX, "s"), outer(ONE)


@PROGRAMS.add
def jit_in_and_around(eqx):
    mapped = eqx.filter_vmap(eqx.filter_jit(lambda x, s: (2 * x, s)))
    function = eqx.filter_jit(eqx.filter_vmap(lambda x, y=MATRIX, *, z=2.0: x * y.sum() * z))
    by_prefix = eqx.filter_jit(eqx.filter_vmap(lambda x, y=2: x * y, in_axes=(0,)))
    return (
        [mapped(X, "s"), eqx.filter_jit(mapped)(X, "s")],
        [function(X), function(X, X), function(X, y=X), by_prefix(X)],
    )


@PROGRAMS.add
def mapped_shape(eqx):
    struct = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    output, text = eqx.filter_eval_shape(eqx.filter_vmap(lambda x, s: (x, s)), struct, "s")
    return output.shape, text
