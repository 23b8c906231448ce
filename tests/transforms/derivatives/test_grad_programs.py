"""Programs with derivatives do the same on Equinox and here."""

import functools
import inspect
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqxlike
from tests.beside_equinox import Programs, error_of, plain

ONE, TWO, THREE = jnp.float32(1), jnp.float32(2), jnp.float32(3)
PROGRAMS = Programs()
program = PROGRAMS.add


def model_of(eqx):
    class Model(eqx.Module):
        weight: Any
        count: Any
        number: float
        inner: Any
        power: int = eqx.field(static=True)

        def __call__(self, x):
            return self.weight**self.power * self.number * self.inner["bias"] * x

        def double(self, x):
            return 2 * self.weight * x

        @eqx.filter_grad
        def scale(self, x):
            return self.weight * x

        @eqx.filter_value_and_grad(has_aux=True)
        def scale_with_aux(self, x, *, name):
            return self.weight * x, name

    return Model(TWO, jnp.int32(3), 4.0, {"bias": THREE, "name": "n"}, 2)


def leaves_of(tree):
    return [(str(path), leaf) for path, leaf in jtu.tree_leaves_with_path(tree)]


@program
def gradients_of_modules_and_methods(eqx):
    model = model_of(eqx)
    value_and_aux, gradient = model.scale_with_aux(THREE, name="n")
    bound = eqx.filter_grad(lambda method: method(TWO))(model.double)
    return (
        leaves_of(eqx.filter_grad(lambda model, x: model(x))(model, TWO)),
        leaves_of(model.scale(THREE)),
        (value_and_aux, leaves_of(gradient)),
        bound.__self__.weight,
    )


@program
def gradients_of_functions_with_defaults(eqx):
    @eqx.filter_value_and_grad(has_aux=True)
    def loss(x, y=2.0, *, z=3.0):
        return x * y * z, (y, z)

    partial = functools.partial(lambda y, x: x * y, THREE)
    return loss(TWO), loss(TWO, 3.0), loss(TWO, y=4.0, z=5.0), eqx.filter_grad(partial)(TWO)


@program
def gradients_of_other_arguments(eqx):
    grad, value_and_grad = eqx.filter_grad, eqx.filter_value_and_grad
    return [
        grad(lambda t: t[0] * t[1]["a"] * t[2][0])([TWO, {"a": THREE, "b": "s"}, (TWO, None)]),
        value_and_grad(lambda t: TWO)(()),
        grad(lambda t: t[0] * t[1])((TWO, TWO)),
        grad(lambda x: x.sum())(np.ones(3, np.float32)),
        grad(lambda x: x * x)(np.float64(3)),
        value_and_grad(lambda x: x * TWO)(3.0),
        grad(lambda z: abs(z) * TWO)(3j),
        grad(lambda t: t[0] * t[1].astype(float), allow_int=True)([TWO, jnp.int32(3)]),
        value_and_grad(lambda z: z * z, holomorphic=True)(jnp.complex64(1 + 2j)),
    ]


@program
def gradients_of_other_values(eqx):
    return [
        eqx.filter_value_and_grad(lambda x: 2.5)(TWO),
        eqx.filter_value_and_grad(lambda x: np.float32(2))(TWO),
        eqx.filter_grad(lambda x: (x, None), has_aux=True)(TWO),
        eqx.filter_grad(jax.lax.stop_gradient)(TWO),
    ]


@program
def gradients_with_other_transformations(eqx):
    return [
        eqx.filter_grad(jax.nn.relu)(TWO),
        eqx.filter_jit(
            eqx.filter_value_and_grad(lambda tree, flag: (tree["a"] * 3, flag), has_aux=True)
        )({"a": TWO, "b": "s"}, True),
        eqx.filter_jit(eqx.filter_grad(lambda x: x * x), donate="all")(jnp.float32(2)),
        eqx.filter_vmap(eqx.filter_value_and_grad(lambda x, y: x * y), in_axes=(0, None))(
            jnp.arange(3.0), TWO
        ),
        eqx.filter_grad(lambda x: eqx.filter_jvp(lambda x: x * x * x, (x,), (TWO,))[1])(TWO),
    ]


@program
def tangents(eqx):
    def function(x, y, z):
        outputs = x * y, y * z, jax.lax.stop_gradient(x), np.ones(1, np.float32), x > y, "s", 2.5
        return outputs, z

    model = model_of(eqx)
    empty = jtu.tree_map(lambda _: None, model)
    tangent = eqx.tree_at(lambda model: model.weight, empty, ONE, is_leaf=lambda leaf: leaf is None)
    value, along = eqx.filter_jvp(lambda m, x: (m, m(x)), (model, THREE), (tangent, None))
    return [
        eqx.filter_jvp(function, (TWO, THREE, ONE), (ONE, None, None)),
        eqx.filter_jvp(lambda x, y, z: (x * y, z), [TWO, THREE, "z"], [None, ONE, None]),
        eqx.filter_jvp(lambda x, *, y: x * y, (2.0,), (1.0,), y=THREE),
        (leaves_of(value), leaves_of(along)),
        [
            error_of(eqx.filter_jvp, lambda x: x, primals, tangents)
            for primals, tangents in [
                ((TWO,), (ONE, ONE)),
                ((TWO,), (jnp.ones(2),)),
                ((TWO,), (1,)),
                (("s",), ("s",)),
                (TWO, TWO),
            ]
        ],
    ]


@program
def cotangents(eqx):
    value, pullback = eqx.filter_vjp(lambda x, n, s: (3 * x, n, s, 2.5), TWO, jnp.int32(3), "s")
    model = model_of(eqx)
    _, of_model, aux = eqx.filter_vjp(
        lambda model, x: (model(x), {"x": x, "s": "s"}), model, TWO, has_aux=True
    )
    return [
        (value, pullback((ONE, None, None, None)), pullback((2.0, None, None, None))),
        (leaves_of(of_model(ONE)), aux),
        [error_of(pullback, each) for each in [(ONE,), (jnp.ones(2), None, None, None)]],
        error_of(eqx.filter_vjp, lambda x: x, x=TWO),
    ]


@program
def jacobians(eqx):
    def function(tree, y, *, s):
        return {"product": tree["a"] * tree["b"][0] * y, "number": [2.5]}

    return eqx.filter_jacrev(function)({"a": TWO, "b": (THREE, jnp.int32(2), "s")}, TWO, s="s")


@program
def rules_of_forward_mode(eqx):
    seen = []

    @eqx.filter_custom_jvp
    def scale(model, y, label, *, power):
        return model.weight**power, y, 2.5

    @scale.def_jvp
    def _(primals, tangents, *, power):
        seen.append((leaves_of(tangents), primals[2], power))
        model, y, _ = primals
        return (model.weight**power, y, 2.5), (7 * tangents[0].weight, None, tangents[0].weight)

    model = model_of(eqx)
    gradient = eqx.filter_grad(lambda model: sum(scale(model, THREE, "s", power=3)))(model)
    return scale(model, jnp.int32(1), "s", power=3), leaves_of(gradient), len(seen), seen[0][1:]


@program
def rules_of_reverse_mode(eqx):
    seen = []

    @eqx.filter_custom_vjp
    def scale(tree, y, label, *, z):
        n, numpy = jnp.int32(1), np.ones(1, np.float32)
        return {"x": tree[0] * y, "unused": 2 * y, "s": label, "f": 2.5, "n": n, "np": numpy}

    @scale.def_fwd
    def _(perturbed, tree, y, label, *, z):
        seen.append((perturbed, tree[1:], y, label, z))
        value = scale(tree, y, label, z=z)
        return {**value, "x": 10 * value["x"]}, {"x": tree[0], "s": "s", "array": jnp.int32(1)}

    @scale.def_bwd
    def _(residuals, cotangent, perturbed, tree, y, label, *, z):
        seen.append((residuals, cotangent, perturbed, tree, y, label, z))
        return 7 * cotangent["x"], None, ONE, 7 * cotangent["x"]

    def loss(tree):
        return scale((tree[0] ** 2, *tree[1:]), THREE, "s", z=TWO)["x"]

    tree = (TWO, "t", jnp.int32(1), np.float32(3))
    return scale(tree, THREE, "s", z=TWO), eqx.filter_value_and_grad(loss)(tree), seen


@program
def converted_closures_and_checkpoints(eqx):
    def function(factor):
        converted = eqx.filter_closure_convert(
            lambda x, label, *, scale: ({"x": factor * x * scale}, label), TWO, "s", scale=TWO
        )
        (output, label) = eqx.filter_checkpoint(converted)(TWO, "s", scale=THREE)
        return output["x"], (label, len(converted.consts))

    factor = THREE
    converted = eqx.filter_closure_convert(lambda x, y: (factor * x, y), TWO, y=2.0)
    return (
        eqx.filter_value_and_grad(function, has_aux=True)(THREE),
        (converted.consts, str(converted.in_struct), str(converted.out_struct)),
        [error_of(converted, x, y=y) for x, y in [(jnp.ones(2), 2.0), (TWO, 3.0), (2.0, 2.0)]],
    )


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")
def test_program_does_the_same(name):
    ours, theirs = (plain(PROGRAMS[name](library)) for library in (eqxlike, equinox))
    assert ours == theirs


def test_argnums_is_refused_by_a_decorator_with_arguments_at_once():
    for name in ("filter_grad", "filter_value_and_grad"):
        assert callable(getattr(equinox, name)(argnums=0))
        with pytest.raises(ValueError, match="`argnums` should not be passed"):
            getattr(eqxlike, name)(argnums=0)


def test_parameters_are_those_of_equinox():
    for name in ("filter_jvp", "filter_vjp", "filter_checkpoint", "filter_closure_convert"):
        ours, theirs = (
            list(inspect.signature(getattr(eqx, name)).parameters) for eqx in (eqxlike, equinox)
        )
        assert len(ours) == len(theirs), name
