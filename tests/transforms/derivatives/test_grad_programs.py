"""Programs with derivatives give the outputs of Equinox."""

import equinox
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike
from tests.beside_equinox import Programs, plain

ONE, TWO, THREE = jnp.float32(1), jnp.float32(2), jnp.float32(3)
PROGRAMS = Programs()
program = PROGRAMS.add


@program
def gradients_of_other_arguments(eqx):
    grad, value_and_grad = eqx.filter_grad, eqx.filter_value_and_grad
    return [
        value_and_grad(lambda t: TWO)(()),
        grad(lambda x: x.sum())(np.ones(3, np.float32)),
        grad(lambda x: x * x)(np.float64(3)),
        value_and_grad(lambda x: x * TWO)(3.0),
        grad(lambda z: abs(z) * TWO)(3j),
        grad(lambda t: t[0] * t[1].astype(float), allow_int=True)([TWO, jnp.int32(3)]),
        value_and_grad(lambda z: z * z, holomorphic=True)(jnp.complex64(1 + 2j)),
    ]


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


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")
def test_program_gives_the_output_of_equinox(name):
    ours, theirs = (plain(PROGRAMS[name](library)) for library in (eqxlike, equinox))
    assert ours == theirs
