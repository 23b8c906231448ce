"""`filter_eval_shape` and `filter_make_jaxpr`: what is known before anything is computed."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from tests.beside_equinox import error_of
from tests.transforms.programs.registry import program

X = jnp.arange(3.0)
STRUCT = jax.ShapeDtypeStruct((3,), jnp.float32)


def shown(tree):
    """Structs as text: two of one shape need not be equal."""
    return jtu.tree_map(
        lambda leaf: str(leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf, tree
    )


def shown_jaxpr(eqx, function, *args, **kwargs):
    jaxpr, structs, static = eqx.filter_make_jaxpr(function)(*args, **kwargs)
    return str(jaxpr), len(jaxpr.consts), shown(structs), static


# --- filter_eval_shape --------------------------------------------------------------------------


@program
def shape_of_a_model_that_is_made(eqx):
    class Layer(eqx.Module):
        weight: Any

        def __init__(self, size, *, key):
            self.weight = jax.random.normal(key, (size, 2))

    class Model(eqx.Module):
        layers: list
        activation: Any
        name: str = eqx.field(static=True)

        def __init__(self, size, *, key):
            keys = jax.random.split(key)
            self.layers = [Layer(size, key=keys[0]), Layer(2, key=keys[1])]
            self.activation = jnp.tanh
            self.name = "n"

    model = eqx.filter_eval_shape(Model, 3, key=jax.random.key(0))
    weights = [layer.weight for layer in model.layers]
    return shown(weights), model.activation is jnp.tanh, model.name


@program
def shape_of_a_call_of_a_model_of_structs(eqx):
    class Model(eqx.Module):
        weight: Any

        def __call__(self, x):
            return self.weight @ x

    return shown(eqx.filter_eval_shape(Model(jax.ShapeDtypeStruct((2, 3), jnp.float32)), X))


@program
def shapes_with_statics(eqx):
    return shown(eqx.filter_eval_shape(lambda x, *, n: {"x": n * x, "n": [n, None]}, STRUCT, n=2))


@program
def struct_that_is_returned(eqx):
    return shown(eqx.filter_eval_shape(lambda x: STRUCT, X))


@program
def shape_of_a_numpy_scalar(eqx):
    return shown(eqx.filter_eval_shape(lambda x: x, np.float32(1)))


@program
def shape_where_the_parameter_fun_is_named_twice(eqx):
    return error_of(eqx.filter_eval_shape, lambda fun: fun, fun=X)


# --- filter_make_jaxpr --------------------------------------------------------------------------


@program
def jaxpr_with_statics(eqx):
    return shown_jaxpr(eqx, lambda x, n: (n * x, n, "s"), X, 2.0)


@program
def jaxpr_of_structs_and_numpy_arrays(eqx):
    return shown_jaxpr(eqx, lambda x, *, y: {"sum": [x + y]}, STRUCT, y=np.ones(3, np.float32))


@program
def jaxpr_with_constants(eqx):
    return shown_jaxpr(eqx, lambda x: (x * X, np.ones(2, np.float32)), X)


@program
def jaxpr_of_a_model(eqx):
    class Model(eqx.Module):
        weight: Any
        activation: Any
        name: str = eqx.field(static=True)

        def __call__(self, x):
            return self.activation(self.weight * x)

    model = Model(X, jnp.tanh, "n")
    as_constant = shown_jaxpr(eqx, model, X)
    return as_constant, shown_jaxpr(eqx, lambda model, x: model(x), model, X)


@program
def jaxpr_and_the_model_that_is_returned(eqx):
    class Model(eqx.Module):
        weight: Any
        size: int

    _, structs, static = eqx.filter_make_jaxpr(lambda x: Model(2 * x, 3))(X)
    return [shown(structs.weight), structs.size], [static.weight, static.size]


@program
def jaxpr_of_nothing_but_statics(eqx):
    return shown_jaxpr(eqx, lambda n: n, 3)


@program
def jaxpr_of_weak_types(eqx):
    _, struct, _ = eqx.filter_make_jaxpr(lambda x: 2 * x)(jnp.array(1.0))
    return struct.weak_type


@program
def jaxpr_of_other_transformations(eqx):
    return (
        shown_jaxpr(eqx, eqx.filter_grad(lambda x, s: (x**2).sum()), X, "s"),
        shown_jaxpr(eqx, eqx.filter_vmap(lambda x, s: (jnp.sin(x), s)), X, "s"),
    )


@program
def jaxpr_inside_jit(eqx):
    return jax.jit(lambda x: (str(eqx.filter_make_jaxpr(jnp.sin)(x)[0]) != "", x)[1])(X)


@program
def jaxpr_of_a_function_that_fails(eqx):
    def fail(x):
        raise KeyError("mine")

    return error_of(eqx.filter_make_jaxpr(fail), X)


@program
def jaxpr_function_shows_what_it_wraps(eqx):
    def function(x):
        """Does."""

    wrapped = eqx.filter_make_jaxpr(function)
    return wrapped.__name__, wrapped.__doc__, wrapped.__wrapped__ is function
