"""Programs with `filter_grad` and `filter_value_and_grad` come to the same on Equinox and here."""

import functools
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqxlike
from tests.beside_equinox import plain

TWO, THREE = jnp.float32(2), jnp.float32(3)


def of_bound_method(eqx):
    class Model(eqx.Module):
        weight: Any

        def scale(self, x):
            return self.weight * x

    return eqx.filter_grad(lambda method: method(TWO))(Model(THREE).scale).__self__.weight


def of_a_module_with_all_sorts_of_fields(eqx):
    class Model(eqx.Module):
        weight: Any
        count: Any
        number: float
        key: Any
        inner: Any
        power: int = eqx.field(static=True)

        def __call__(self, x):
            return self.weight**self.power * self.number * self.inner["bias"] * x

    model = Model(TWO, jnp.int32(3), 4.0, jax.random.key(0), {"bias": THREE, "name": "n"}, 2)
    gradient = eqx.filter_grad(lambda model, x: model(x))(model, TWO)
    return (
        jtu.tree_leaves(gradient),
        gradient.count,
        gradient.number,
        gradient.inner,
        gradient.power,
    )


def of_a_model_as_auxiliary_output(eqx):
    class Model(eqx.Module):
        weight: Any
        activation: Any

    model = Model(TWO, jnp.tanh)
    gradient, aux = eqx.filter_grad(lambda model: (model.weight, model), has_aux=True)(model)
    return gradient.weight, aux.weight, aux.activation


def of_a_method_that_is_decorated(eqx):
    class Model(eqx.Module):
        weight: Any

        @eqx.filter_grad
        def scale(self, x):
            return self.weight * x

        @eqx.filter_value_and_grad(has_aux=True)
        def scale_with_aux(self, x, *, name):
            return self.weight * x, name

    model = Model(TWO)
    value_and_aux, gradient = model.scale_with_aux(THREE, name="n")
    return model.scale(THREE).weight, value_and_aux, gradient.weight


def of_a_function_with_defaults(eqx):
    @eqx.filter_value_and_grad(has_aux=True)
    def loss(x, y=2.0, *, z=3.0):
        return x * y * z, (y, z)

    return loss(TWO), loss(TWO, 3.0), loss(TWO, y=4.0, z=5.0)


PROGRAMS = {
    "of bound method": of_bound_method,
    "of a module with all sorts of fields": of_a_module_with_all_sorts_of_fields,
    "of a model as auxiliary output": of_a_model_as_auxiliary_output,
    "of a method that is decorated": of_a_method_that_is_decorated,
    "of a function with defaults": of_a_function_with_defaults,
    "of list, dict and tuple": lambda eqx: eqx.filter_grad(lambda t: t[0] * t[1]["a"] * t[2][0])(
        [TWO, {"a": THREE, "b": "s"}, (TWO, None)]
    ),
    "of the empty tuple": lambda eqx: eqx.filter_value_and_grad(lambda t: TWO)(()),
    "of one array in two places": lambda eqx: eqx.filter_grad(lambda t: t[0] * t[1])((TWO, TWO)),
    "of NumPy arrays": lambda eqx: eqx.filter_grad(lambda x: x.sum())(np.ones(3, np.float32)),
    "of a NumPy scalar of double precision": lambda eqx: eqx.filter_grad(lambda x: x * x)(
        np.float64(3)
    ),
    "of a Python float": lambda eqx: eqx.filter_value_and_grad(lambda x: x * TWO)(3.0),
    "of a Python complex": lambda eqx: eqx.filter_grad(lambda z: abs(z) * TWO)(3j),
    "of integers that JAX is allowed": lambda eqx: eqx.filter_grad(
        lambda tree: tree[0] * tree[1].astype(float), allow_int=True
    )([TWO, jnp.int32(3)]),
    "holomorphic value": lambda eqx: eqx.filter_value_and_grad(lambda z: z * z, holomorphic=True)(
        jnp.complex64(1 + 2j)
    ),
    "value that is a Python float": lambda eqx: eqx.filter_value_and_grad(lambda x: 2.5)(TWO),
    "value that is a NumPy scalar": lambda eqx: eqx.filter_value_and_grad(lambda x: np.float32(2))(
        TWO
    ),
    "aux that is None": lambda eqx: eqx.filter_grad(lambda x: (x, None), has_aux=True)(TWO),
    "aux by keyword": lambda eqx: eqx.filter_grad(lambda x, *, k, s: (x * k, (s, k)), has_aux=True)(
        TWO, k=THREE, s="s"
    ),
    "of a partial": lambda eqx: eqx.filter_grad(functools.partial(lambda y, x: x * y, THREE))(TWO),
    "of a rule of JAX": lambda eqx: eqx.filter_grad(jax.nn.relu)(TWO),
    "of checkpoint": lambda eqx: eqx.filter_grad(jax.checkpoint(lambda x: x * x))(TWO),
    "of stop_gradient": lambda eqx: eqx.filter_grad(jax.lax.stop_gradient)(TWO),
    "of scan": lambda eqx: eqx.filter_grad(
        lambda x: jax.lax.scan(lambda c, _: (c * x, None), TWO, None, length=3)[0]
    )(TWO),
    "of filter_jit": lambda eqx: eqx.filter_grad(
        eqx.filter_jit(lambda tree, flag: tree["a"] * (3 if flag else 1))
    )({"a": TWO, "b": "s"}, True),
    "in filter_jit": lambda eqx: eqx.filter_jit(
        eqx.filter_value_and_grad(lambda tree, flag: (tree["a"] * 3, flag), has_aux=True)
    )({"a": TWO, "b": "s"}, True),
    "in filter_jit that donates": lambda eqx: eqx.filter_jit(
        eqx.filter_grad(lambda x: x * x), donate="all"
    )(jnp.float32(2)),
    "in filter_vmap with axes": lambda eqx: eqx.filter_vmap(
        eqx.filter_value_and_grad(lambda x, y: x * y), in_axes=(0, None)
    )(jnp.arange(3.0), TWO),
    "of a gradient": lambda eqx: eqx.filter_grad(
        lambda tree: eqx.filter_grad(lambda inner: inner["a"] ** 3 * tree["a"])(tree)["a"]
    )({"a": TWO, "b": 1}),
    "of a tangent": lambda eqx: eqx.filter_grad(
        lambda x: eqx.filter_jvp(lambda x: x * x * x, (x,), (TWO,))[1]
    )(TWO),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")
def test_program_comes_to_the_same(program):
    assert plain(program(eqxlike)) == plain(program(equinox))


@pytest.mark.parametrize("name", ["filter_grad", "filter_value_and_grad"])
def test_argnums_is_refused_by_a_decorator_with_arguments_at_once(name):
    assert callable(getattr(equinox, name)(argnums=0))
    with pytest.raises(ValueError, match="`argnums` should not be passed"):
        getattr(eqxlike, name)(argnums=0)
