"""`filter_vmap`: axes by name and by function, ensembles, methods, collective operations."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from tests.beside_equinox import error_of
from tests.transforms.programs.registry import program

X = jnp.arange(3.0)
MATRIX = jnp.arange(6.0).reshape(2, 3)


# --- axes by the names of parameters ------------------------------------------------------------


@program
def axes_by_name(eqx):
    added = eqx.filter_vmap(lambda x, y, s: (x + y, s), in_axes={"y": None})
    return added(X, jnp.array(3.0), "s")


@program
def axes_by_name_leave_the_others_mapped_along_the_first(eqx):
    return eqx.filter_vmap(lambda x, y: x.sum() + y.sum(), in_axes={"y": 1})(MATRIX.T, MATRIX)


@program
def axes_by_name_are_prefixes_of_their_arguments(eqx):
    added = eqx.filter_vmap(
        lambda tree, y: tree["a"] + tree["b"][0] + y,
        in_axes={"tree": {"a": 0, "b": (None, None)}, "y": lambda leaf: None},
    )
    return added({"a": X, "b": (jnp.array(1.0), "s")}, jnp.array(2.0))


@program
def axes_by_name_of_a_method(eqx):
    class Model(eqx.Module):
        weight: Any

        @eqx.filter_vmap(in_axes={"self": None})
        def shared(self, x):
            return self.weight * x

        @eqx.filter_vmap(in_axes={"x": None})
        def each(self, x):
            return self.weight * x

        def plain(self, x, y):
            return self.weight * x * y

    model = Model(jnp.ones(2))
    plain = eqx.filter_vmap(model.plain, in_axes={"y": None})
    return model.shared(X), model.each(X), plain(X, jnp.ones(2))


@program
def axes_by_name_of_a_partial(eqx):
    bound = functools.partial(lambda x, y: x + y, jnp.array(1.0))
    return eqx.filter_vmap(bound, in_axes={"y": 0})(X)


@program
def axes_by_a_name_that_is_not_there(eqx):
    function = lambda x, y=1: x
    return [
        error_of(eqx.filter_vmap(function, in_axes={"z": None}), X),
        error_of(eqx.filter_vmap(function, in_axes={"y": None}), X),
    ]


# --- axes ---------------------------------------------------------------------------------------


@program
def module_as_prefix(eqx):
    class Pair(eqx.Module):
        x: Any
        y: Any

    pair = eqx.filter_vmap(
        lambda pair: Pair(pair.x + pair.y, pair.y), in_axes=(Pair(0, None),), out_axes=Pair(1, None)
    )(Pair(MATRIX, jnp.ones(3)))
    return pair.x, pair.y


@program
def function_of_each_leaf(eqx):
    def axis(leaf):
        return 0 if eqx.is_array(leaf) and leaf.ndim == 2 else None

    output = eqx.filter_vmap(
        lambda tree, s: {"sum": tree["m"] + tree["x"], "x": tree["x"], "s": s},
        in_axes=axis,
        out_axes=eqx.if_array(0),
    )
    return output({"m": MATRIX, "x": X}, "s")


@program
def function_of_each_leaf_of_the_output(eqx):
    def axis(leaf):
        return -1 if eqx.is_array(leaf) and leaf.ndim else None

    return eqx.filter_vmap(lambda x: {"x": x, "one": jnp.ones(()), "s": "s"}, out_axes=axis)(MATRIX)


@program
def axes_counted_from_the_end(eqx):
    swapped = eqx.filter_vmap(lambda x, y: (x + y, y), in_axes=(-1, -2), out_axes=(-1, -2))
    return swapped(MATRIX, MATRIX.T)


@program
def numpy_scalar_that_is_not_mapped(eqx):
    return eqx.filter_vmap(lambda x, y: (x, y), in_axes=(0, None))(X, np.float32(1))


@program
def unmapped_numpy_array_stays_one(eqx):
    return eqx.filter_vmap(lambda x, y: type(y).__name__, in_axes=(0, None))(X, np.ones(2))


@program
def numbers_are_stacked(eqx):
    return eqx.filter_vmap(lambda x: (1, 2.5, True, 1j), out_axes=0)(X)


@program
def axis_size_alone(eqx):
    sample = eqx.filter_vmap(
        lambda x: (x, jax.lax.axis_index("i")), in_axes=None, axis_size=3, axis_name="i"
    )
    return sample(jnp.array(2.0)), eqx.filter_vmap(lambda x: x, axis_size=2)(MATRIX)


@program
def keyword_only_parameters_keep_their_defaults(eqx):
    return eqx.filter_vmap(lambda x, *, y=MATRIX: x * y.sum())(X)


# --- what is wrapped ----------------------------------------------------------------------------


@program
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
    return models.weight, models.name, shared(models, jnp.array(2.0)), each(models, X)


@program
def methods_that_are_mapped(eqx):
    class Model(eqx.Module):
        weight: Any

        @eqx.filter_vmap
        def each(self, x):
            return self.weight * x

        @eqx.filter_vmap(in_axes=(None, 0))
        def shared(self, x):
            return self.weight * x

        @staticmethod
        @eqx.filter_vmap
        def static(x):
            return x + 1

        @classmethod
        @eqx.filter_vmap(in_axes=(None, 0))
        def of_class(cls, x):
            return x + 2

        @eqx.filter_vmap(in_axes=(None, 0))
        def __call__(self, x):
            return self.weight.sum() * x

    model = Model(jnp.ones(3))
    outputs = [model.each(X), model.shared(X), model(X), model.static(X), model.of_class(X)]
    return outputs, Model.static(X), Model.shared(model, X)


@program
def modules_and_their_methods(eqx):
    class Model(eqx.Module):
        weight: Any

        def __call__(self, x):
            return self.weight.sum() * x

        def scale(self, x):
            return self.weight * x

    model = Model(jnp.ones(2))
    arrays = jtu.tree_leaves(eqx.filter(eqx.filter_vmap(model), eqx.is_array))
    return eqx.filter_vmap(model)(X), eqx.filter_vmap(model.scale)(X), arrays


@program
def nested_over_a_module(eqx):
    class Model(eqx.Module):
        weight: Any

        def __call__(self, x):
            return self.weight * x

    return eqx.filter_vmap(eqx.filter_vmap(Model(jnp.array(2.0))))(MATRIX)


@program
def nested_over_models_and_data(eqx):
    inner = eqx.filter_vmap(lambda w, x: w * x, in_axes=(None, 0))
    return eqx.filter_vmap(inner, in_axes=(0, None), out_axes=1)(jnp.arange(2.0), X)


# --- collective operations, other transformations -----------------------------------------------


@program
def collective_operations(eqx):
    @eqx.filter_vmap(axis_name="i", out_axes=(0, None, 0))
    def function(x):
        return jax.lax.psum(x, "i"), jax.lax.pmean(x, "i"), jax.lax.all_gather(x, "i")

    return function(X)


@program
def collective_operations_over_two_axes(eqx):
    inner = eqx.filter_vmap(lambda x: jax.lax.psum(x, ("i", "j")), axis_name="j")
    return eqx.filter_vmap(inner, axis_name="i")(MATRIX)


@program
def gradients_in_and_around(eqx):
    inner = eqx.filter_vmap(eqx.filter_grad(lambda x, s: (x**2).sum()))
    outer = eqx.filter_grad(lambda w: eqx.filter_vmap(lambda x: w * x)(X).sum())
    return inner(MATRIX, "s"), outer(jnp.array(1.0))


@program
def jit_in_and_around(eqx):
    mapped = eqx.filter_vmap(eqx.filter_jit(lambda x, s: (2 * x, s)))
    return mapped(X, "s"), eqx.filter_jit(mapped)(X, "s")


@program
def jit_around_leaves_defaults_out(eqx):
    function = eqx.filter_jit(eqx.filter_vmap(lambda x, y=MATRIX, *, z=2.0: x * y.sum() * z))
    by_prefix = eqx.filter_jit(eqx.filter_vmap(lambda x, y=2: x * y, in_axes=(0,)))
    return function(X), function(X, X), function(X, y=X), by_prefix(X)


@program
def mapped_shape(eqx):
    struct = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    output, text = eqx.filter_eval_shape(eqx.filter_vmap(lambda x, s: (x, s)), struct, "s")
    return output.shape, text


@program
def mapped_exception(eqx):
    def fail(x):
        raise KeyError("mine")

    return error_of(eqx.filter_vmap(fail), X)
