"""Identities that raise where one transformation, or a use, meets them, and nowhere else."""

from functools import partial

import equinox.internal
import jax
import jax.numpy as jnp
import pytest

import eqxlike
from eqxlike import internal

X = jnp.array(2.0)
ALL = ("nontraceable", "nonbatchable", "nondifferentiable", "nondifferentiable_backward")

TRANSFORMATIONS = {
    "vmap": lambda function: jax.vmap(function)(X[None])[0],
    "jvp": lambda function: jax.jvp(function, (X,), (X,))[0],
    "grad": lambda function: jax.value_and_grad(function)(X)[0],
    "vmap-of-grad": lambda function: jax.vmap(jax.value_and_grad(function))(X[None])[0][0],
}
REFUSED = {
    "nontraceable": {*TRANSFORMATIONS},
    "nonbatchable": {*TRANSFORMATIONS},
    "nondifferentiable": {*TRANSFORMATIONS} - {"vmap"},
    "nondifferentiable_backward": {"grad", "vmap-of-grad"},
}


@pytest.mark.parametrize("name", ALL)
def test_transformations_are_refused_but_of_what_does_not_depend_on_them(name):
    identity = getattr(internal, name)
    for transformation, transform in TRANSFORMATIONS.items():
        if transformation in REFUSED[name]:
            with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
                transform(identity)
        else:
            assert transform(identity) == X
        assert transform(lambda x: identity(X) * x) == X * X


def test_compiled_it_is_the_identity_and_forward_mode_passes_what_refuses_reverse_mode():
    tree = {"a": X, "b": (1.0, "text", None)}
    for name in ALL:
        identity = getattr(internal, name)
        assert jax.jit(identity)(X) == X
        assert identity(tree) == tree
        if "differentiable" in name:
            of_constant = lambda x, identity=identity: identity(jax.lax.stop_gradient(x)) * x
            assert jax.grad(of_constant)(X) == X
    tangents = jax.vmap(lambda x: jax.jvp(internal.nondifferentiable_backward, (X,), (x,)))(
        X[None]
    )[1]
    assert tangents == X[None]


def test_unused_outcomes_have_no_cotangent_and_zeros_pass_if_values_are_looked_at():
    def of_unused(symbolic):
        return lambda x: internal.nondifferentiable_backward((x, 1.0), symbolic=symbolic)[1] * x

    def of_zero(x):
        return 0.0 * internal.nondifferentiable_backward(x, symbolic=False) + x

    assert [jax.grad(of_unused(symbolic))(X) for symbolic in (True, False)] == [1, 1]
    assert jax.jit(jax.vmap(jax.grad(of_zero)))(X[None]) == 1


def test_cotangents_that_are_not_zero_are_refused_when_the_program_runs():
    function = eqxlike.filter_jit(
        jax.grad(lambda x: internal.nondifferentiable_backward(x, "y", symbolic=False))
    )
    message = "Unexpected cotangent. y cannot be reverse-mode autodifferentiated."
    with pytest.raises(eqxlike.EqxlikeRuntimeError, match=message):
        function(X)


def test_members_of_a_batch_that_are_equal_are_one_and_others_refused_when_the_program_runs():
    def function(x):
        return internal.nonbatchable(x, allow_constant_across_batch=True)

    assert jax.vmap(function, out_axes=None)(jnp.stack([X, X])) == X
    with pytest.raises(
        eqxlike.EqxlikeRuntimeError, match=r"Nonconstant batch\. This operation has"
    ):
        eqxlike.filter_jit(jax.vmap(function))(jnp.stack([X, 2 * X]))


TRANSFORMED = {
    "nontraceable": (jax.grad, "name"),
    "nondifferentiable": (jax.grad, "name", "msg"),
    "nondifferentiable_backward": (jax.grad, "name", "msg"),
    "nonbatchable": (lambda function: lambda x: jax.vmap(function)(x[None]), "name", "msg"),
}


def message(library, name, given):
    transform = TRANSFORMED[name][0]
    with pytest.raises((RuntimeError, ValueError)) as raised:
        transform(partial(getattr(library, name), **given))(X)
    return type(raised.value), str(raised.value)


def test_messages_are_those_of_equinox():
    for name, (_, *options) in TRANSFORMED.items():
        for given in ({}, *({option: "text"} for option in options)):
            assert message(internal, name, given) == message(equinox.internal, name, given)


def test_what_must_be_of_no_use_to_a_program_is_checked_in_a_jit_alone():
    unused = jax.jit(lambda x: (internal.assert_dce(x, "used"), 2 * x)[1])
    assert unused(X) == 4
    assert jax.jit(lambda x: internal.assert_dce(x, "used", on_error="off"))(X) == X
    assert internal.assert_dce((X, "text"), "used")[1] == "text"


def test_a_program_that_uses_it_fails_and_a_gradient_that_does_not_runs():
    with pytest.raises(eqxlike.EqxlikeRuntimeError, match="x was used"):
        eqxlike.filter_jit(lambda x: internal.assert_dce(x, "x was used"))(X)

    def function(x):
        return x**2 + 0 * len(internal.assert_dce(x[None], "used"))

    assert jax.jit(jax.grad(function))(X) == 4
