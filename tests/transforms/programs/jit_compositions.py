"""`filter_jit` under and around other transformations."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from tests.transforms.programs.registry import program

X = jnp.arange(3.0)


@program
def nested(eqx):
    inner = eqx.filter_jit(lambda x, how: (x + 1, how))
    outer = eqx.filter_jit(lambda x, how: (inner(x, how), inner(2 * x, "inner")))
    return outer(X, "outer")


@program
def under_jax_jit_vmap_grad_and_jvp(eqx):
    square = eqx.filter_jit(lambda x, power: x**power)
    return (
        jax.jit(lambda x: square(x, 2))(X),
        jax.vmap(lambda x: square(x, 2))(X),
        jax.grad(lambda x: square(x, 2).sum())(X),
        jax.jvp(lambda x: square(x, 2), (X,), (X,)),
    )


@program
def under_scan_and_while(eqx):
    step = eqx.filter_jit(lambda x, how: (x + 1 if how == "up" else x - 1, how))
    return (
        jax.lax.scan(lambda x, y: (step(x, "up")[0], y), X, X),
        jax.lax.while_loop(lambda x: x[0] > -2, lambda x: step(x, "down")[0], X),
        jax.lax.cond(True, lambda x: step(x, "up")[0], lambda x: step(x, "down")[0], X),
    )


@program
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


@program
def jit_is_disabled(eqx):
    with jax.disable_jit():
        return eqx.filter_jit(lambda x, s: (2 * x if x.sum() > 0 else x, s))(X, "s")


@program
def shape_is_evaluated(eqx):
    struct, text = eqx.filter_eval_shape(eqx.filter_jit(lambda x, s: (x[None], s)), X, "s")
    return struct.shape, text
