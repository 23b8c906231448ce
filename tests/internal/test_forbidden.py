"""Identities that raise where one transformation meets them, and nowhere else."""

import jax
import jax.numpy as jnp
import pytest

import eqxlike
from eqxlike import internal
from tests.internal.beside_equinox_internal import both

X = jnp.array(2.0)
ALL = ("nontraceable", "nonbatchable", "nondifferentiable", "nondifferentiable_backward")

TRANSFORMATIONS = {
    "vmap": lambda function: jax.vmap(function)(X[None])[0],
    "vmap-jit": lambda function: jax.vmap(jax.jit(function))(X[None])[0],
    "jvp": lambda function: jax.jvp(function, (X,), (X,))[0],
    "grad": lambda function: jax.value_and_grad(function)(X)[0],
    "grad-jit": lambda function: jax.value_and_grad(jax.jit(function))(X)[0],
    "grad-checkpoint": lambda function: jax.value_and_grad(jax.checkpoint(function))(X)[0],
    "grad-of-scan": lambda function: jax.value_and_grad(
        lambda x: jax.lax.scan(lambda c, _: (function(c), None), x, length=1)[0]
    )(X)[0],
    "vmap-of-grad": lambda function: jax.vmap(jax.value_and_grad(function))(X[None])[0][0],
    "jacfwd": lambda function: jax.jacfwd(lambda x: (function(x),) * 2)(X) and function(X),
}
BATCHING = {"vmap", "vmap-jit", "vmap-of-grad", "jacfwd"}
REFUSED = {
    "nontraceable": {*TRANSFORMATIONS},
    "nonbatchable": {*TRANSFORMATIONS},
    "nondifferentiable": {*TRANSFORMATIONS} - {"vmap", "vmap-jit"},
    "nondifferentiable_backward": {
        "grad",
        "grad-jit",
        "grad-checkpoint",
        "grad-of-scan",
        "vmap-of-grad",
    },
}


@both
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("name", ALL)
def test_transformations_are_refused(eqxi, name, transformation):
    function, transform = getattr(eqxi, name), TRANSFORMATIONS[transformation]
    if transformation in REFUSED[name]:
        with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
            transform(function)
    else:
        assert transform(function) == X


@both
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("name", ALL)
def test_what_is_not_transformed_passes(eqxi, name, transformation):
    identity = getattr(eqxi, name)
    assert TRANSFORMATIONS[transformation](lambda x: identity(X) * x) == X * X


@both
@pytest.mark.parametrize("name", ALL)
def test_leaves_that_are_no_arrays_pass(eqxi, name):
    tree = {"a": X, "b": (1.0, "text", None)}
    assert getattr(eqxi, name)(tree) == tree


@both
@pytest.mark.parametrize("name", ALL)
def test_compiled_it_is_the_identity(eqxi, name):
    assert jax.jit(getattr(eqxi, name))(X) == X


@both
@pytest.mark.parametrize("name", ["nondifferentiable", "nondifferentiable_backward"])
def test_a_stopped_gradient_passes(eqxi, name):
    identity = getattr(eqxi, name)
    assert jax.grad(lambda x: identity(jax.lax.stop_gradient(x)) * x)(X) == X


@both
def test_forward_mode_passes_what_refuses_reverse_mode(eqxi):
    tangents = jax.vmap(lambda x: jax.jvp(eqxi.nondifferentiable_backward, (X,), (x,)))(X[None])[1]
    assert tangents == X[None]


@both
@pytest.mark.parametrize("symbolic", [True, False])
def test_an_unused_outcome_has_no_cotangent(eqxi, symbolic):
    def function(x):
        unused, used = eqxi.nondifferentiable_backward((x, 1.0), symbolic=symbolic)
        del unused
        return used * x

    assert jax.grad(function)(X) == 1


@both
def test_cotangents_of_zero_pass_if_values_are_looked_at(eqxi):
    def function(x):
        return 0.0 * eqxi.nondifferentiable_backward(x, symbolic=False) + x

    assert jax.jit(jax.vmap(jax.grad(function)))(X[None]) == 1


def test_cotangents_that_are_not_zero_are_refused_when_the_program_runs():
    function = eqxlike.filter_jit(
        jax.grad(lambda x: internal.nondifferentiable_backward(x, "y", symbolic=False))
    )
    message = "Unexpected cotangent. y cannot be reverse-mode autodifferentiated."
    with pytest.raises(eqxlike.EqxlikeRuntimeError, match=message):
        function(X)


def test_equal_members_of_a_batch_are_one():
    def function(x):
        return internal.nonbatchable(x, allow_constant_across_batch=True)

    assert jax.vmap(function, out_axes=None)(jnp.stack([X, X])) == X


def test_members_of_a_batch_that_differ_are_refused_when_the_program_runs():
    def function(x):
        return internal.nonbatchable(x, allow_constant_across_batch=True)

    with pytest.raises(
        eqxlike.EqxlikeRuntimeError, match=r"Nonconstant batch\. This operation has"
    ):
        eqxlike.filter_jit(jax.vmap(function))(jnp.stack([X, 2 * X]))


MESSAGES = {
    "nontraceable, batched": lambda eqxi: jax.vmap(eqxi.nontraceable)(X[None]),
    "nontraceable, differentiated": lambda eqxi: jax.grad(eqxi.nontraceable)(X),
    "nontraceable, named": lambda eqxi: jax.grad(lambda x: eqxi.nontraceable(x, name="f"))(X),
    "nondifferentiable": lambda eqxi: jax.grad(eqxi.nondifferentiable)(X),
    "nondifferentiable, named": lambda eqxi: jax.grad(
        lambda x: eqxi.nondifferentiable(x, name="x")
    )(X),
    "nondifferentiable, told": lambda eqxi: jax.grad(lambda x: eqxi.nondifferentiable(x, msg="no"))(
        X
    ),
    "nondifferentiable_backward": lambda eqxi: jax.grad(eqxi.nondifferentiable_backward)(X),
    "nondifferentiable_backward, named": lambda eqxi: jax.grad(
        lambda x: eqxi.nondifferentiable_backward(x, "x")
    )(X),
    "nondifferentiable_backward, told": lambda eqxi: jax.grad(
        lambda x: eqxi.nondifferentiable_backward(x, msg="no")
    )(X),
    "nonbatchable": lambda eqxi: jax.vmap(eqxi.nonbatchable)(X[None]),
    "nonbatchable, named": lambda eqxi: jax.vmap(lambda x: eqxi.nonbatchable(x, name="x"))(X[None]),
    "nonbatchable, told": lambda eqxi: jax.vmap(lambda x: eqxi.nonbatchable(x, msg="no"))(X[None]),
}


def message(program, library):
    with pytest.raises((RuntimeError, ValueError)) as raised:
        program(library)
    return type(raised.value), str(raised.value)


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_are_those_of_equinox(name):
    import equinox.internal

    assert message(MESSAGES[name], internal) == message(MESSAGES[name], equinox.internal)
