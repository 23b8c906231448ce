"""Identities that raise only under one transformation, or only if their value is used."""

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
def test_identity_refuses_only_its_transformations(name):
    identity = getattr(internal, name)
    for transformation, transform in TRANSFORMATIONS.items():
        if transformation in REFUSED[name]:
            with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
                transform(identity)
        else:
            assert transform(identity) == X
        assert transform(lambda x: identity(X) * x) == X * X


def test_identity_may_be_compiled_and_nondifferentiable_backward_allows_forward_mode():
    tree = {"a": X, "b": (1.0, "text", None)}
    for name in ALL:
        identity = getattr(internal, name)
        assert jax.jit(identity)(X) == X
        assert identity(tree) == tree
        if "differentiable" in name:
            of_constant = lambda x, identity=identity: identity(jax.lax.stop_gradient(x)) * x
            assert jax.grad(of_constant)(X) == X
    forward = lambda x: jax.jvp(internal.nondifferentiable_backward, (X,), (x,))[1]
    assert jax.vmap(forward)(X[None]) == X[None]


def test_unused_outputs_and_zero_cotangents_are_accepted():
    def of_unused(symbolic):
        return lambda x: internal.nondifferentiable_backward((x, 1.0), symbolic=symbolic)[1] * x

    def of_zero(x):
        return 0.0 * internal.nondifferentiable_backward(x, symbolic=False) + x

    assert [jax.grad(of_unused(symbolic))(X) for symbolic in (True, False)] == [1, 1]
    assert jax.jit(jax.vmap(jax.grad(of_zero)))(X[None]) == 1


def test_nonzero_cotangent_is_an_error_when_the_program_runs():
    function = eqxlike.filter_jit(
        jax.grad(lambda x: internal.nondifferentiable_backward(x, "y", symbolic=False))
    )
    message = "Unexpected cotangent. y cannot be reverse-mode autodifferentiated."
    with pytest.raises(eqxlike.EqxlikeRuntimeError, match=message):
        function(X)


def test_batch_of_equal_values_is_accepted_and_others_are_an_error_at_run_time():
    def function(x):
        return internal.nonbatchable(x, allow_constant_across_batch=True)

    assert jax.vmap(function, out_axes=None)(jnp.stack([X, X])) == X
    with pytest.raises(eqxlike.EqxlikeRuntimeError, match=r"Nonconstant batch\. This operation"):
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


def test_messages_match_equinox():
    for name, (_, *options) in TRANSFORMED.items():
        for given in ({}, *({option: "text"} for option in options)):
            assert message(internal, name, given) == message(equinox.internal, name, given)


def test_assert_dce_is_checked_in_compiled_programs_only():
    unused = jax.jit(lambda x: (internal.assert_dce(x, "used"), 2 * x)[1])
    assert unused(X) == 4
    assert jax.jit(lambda x: internal.assert_dce(x, "used", on_error="off"))(X) == X
    assert internal.assert_dce((X, "text"), "used")[1] == "text"


def test_assert_dce_refuses_a_used_value_and_accepts_an_unused_one():
    with pytest.raises(eqxlike.EqxlikeRuntimeError, match="x was used"):
        eqxlike.filter_jit(lambda x: internal.assert_dce(x, "x was used"))(X)

    def function(x):
        return x**2 + 0 * len(internal.assert_dce(x[None], "used"))

    assert jax.jit(jax.grad(function))(X) == 4
