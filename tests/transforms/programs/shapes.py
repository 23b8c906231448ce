"""`filter_eval_shape` and `filter_make_jaxpr`: what is known before anything is computed."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from tests.beside_equinox import Programs, error_of

X = jnp.arange(3.0)
STRUCT = jax.ShapeDtypeStruct((3,), jnp.float32)
PROGRAMS = Programs()


def shown(tree):
    """Structs as text: two of one shape need not be equal."""
    return jtu.tree_map(
        lambda leaf: str(leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf, tree
    )


def shown_jaxpr(eqx, function, *args, **kwargs):
    jaxpr, structs, static = eqx.filter_make_jaxpr(function)(*args, **kwargs)
    return str(jaxpr), len(jaxpr.consts), shown(structs), static


def models(eqx):
    class Model(eqx.Module):
        weight: Any
        activation: Any
        name: str = eqx.field(static=True, default="n")

        def __call__(self, x):
            return self.activation(self.weight * x)

    model = Model(X, jnp.tanh)
    _, structs, static = eqx.filter_make_jaxpr(lambda x: Model(2 * x, 3))(X)
    return (
        shown_jaxpr(eqx, model, X),
        shown_jaxpr(eqx, lambda model, x: model(x), model, X),
        [shown(structs.weight), structs.activation, static.weight, static.activation],
    )


PROGRAMS |= {
    "struct_that_is_returned": lambda eqx: shown(eqx.filter_eval_shape(lambda x: STRUCT, X)),
    "parameter_named_twice": lambda eqx: error_of(eqx.filter_eval_shape, lambda fun: fun, fun=X),
    "statics": lambda eqx: shown_jaxpr(eqx, lambda x, n: (n * x, n, "s"), X, 2.0),
    "structs_and_numpy_arrays": lambda eqx: shown_jaxpr(
        eqx, lambda x, *, y: {"sum": [x + y]}, STRUCT, y=np.ones(3, np.float32)
    ),
    "constants": lambda eqx: shown_jaxpr(eqx, lambda x: (x * X, np.ones(2, np.float32)), X),
    "models": models,
    "gradient": lambda eqx: shown_jaxpr(eqx, eqx.filter_grad(lambda x, s: (x**2).sum()), X, "s"),
    "mapping": lambda eqx: shown_jaxpr(eqx, eqx.filter_vmap(lambda x, s: (jnp.sin(x), s)), X, "s"),
}
