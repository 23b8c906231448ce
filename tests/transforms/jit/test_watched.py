"""A call warns if an array in a static object was replaced after the trace."""

import functools
import linecache
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxlike import filter_jit


class Plain:
    def __init__(self, scale):
        self.scale = scale

    def loss(self, x):
        return jnp.sum(x * self.scale)

    def __call__(self, x):
        return self.loss(x)

    @filter_jit
    def compiled(self, x):
        return self.loss(x)

    @filter_jit(donate="none")
    def compiled_with_options(self, x):
        return self.loss(x)


def array(number):
    return jnp.full(3, number, jnp.float32)


X = jnp.ones(3)
CALLS = {
    "method": lambda it: filter_jit(it.loss)(X),  # the call
    "callable": lambda it: filter_jit(it)(X),  # the call
    "partial": lambda it: filter_jit(functools.partial(it.loss))(X),  # the call
    "decorated": lambda it: it.compiled(X),  # the call
    "decorated-with-options": lambda it: it.compiled_with_options(X),  # the call
    "gradient-of-jax": lambda it: jax.grad(filter_jit(it.loss))(X),  # the call
    "under-jax-jit": lambda it: jax.jit(lambda x: it.compiled(x))(X),  # the call
}


def test_call_warns_once_at_the_line_of_the_user():
    for call in CALLS.values():
        instance = Plain(array(2))
        for _ in range(2):
            call(instance)
        instance.scale = array(3)
        with warnings.catch_warnings(record=True, action="always") as caught:
            for _ in range(2):
                call(instance)
        [warned] = caught
        assert linecache.getline(warned.filename, warned.lineno).rstrip().endswith("# the call")


CHANGES = {
    "assigned": lambda it: setattr(it, "scale", array(3)),
    "equal-array": lambda it: setattr(it, "scale", array(2)),
    "no-array-any-more": lambda it: setattr(it, "scale", 2.0),
    "deleted": lambda it: delattr(it, "scale"),
}


def test_call_warns_after_a_change():
    for change in CHANGES.values():
        # The other tests use JAX arrays.
        instance = Plain(np.full(3, 2, np.float32))
        instance.compiled(X)
        change(instance)
        with pytest.warns(UserWarning, match="scale` held an array"):
            instance.compiled(X)


NO_CHANGES = {
    "nothing": lambda it: None,
    "assigned-and-back": lambda it: [setattr(it, "scale", each) for each in (array(3), it.scale)],
    "new-attribute": lambda it: setattr(it, "other", array(3)),
    "attribute-that-held-no-array": lambda it: setattr(it, "label", array(3)),
    "another-object": lambda it: setattr(Plain(array(2)), "scale", array(3)),
}


def test_call_does_not_warn_without_a_change():
    for change in NO_CHANGES.values():
        instance = Plain(array(2))
        instance.label = "a"
        for _ in range(2):
            instance.compiled(X)
        change(instance)
        instance.compiled(X)  # Warnings are errors.


def test_compiled_function_uses_the_array_of_its_trace_as_the_warning_says():
    instance = Plain(jnp.float32(2))
    instance.compiled(X)
    instance.scale = jnp.float32(3)
    with pytest.warns(UserWarning, match="scale` held an array") as caught:
        # A trace for another shape uses the array at that time.
        assert instance.compiled(jnp.ones(2)) == 6
    assert instance.compiled(X) == 6
    assert str(caught[0].message) == (
        "`Plain.scale` held an array when `compiled` was traced, and has been assigned since. A "
        "Plain is not a Module: it is static, compared by identity, and the compiled function "
        "still uses the old array. Make it an `eqxlike.Module`, or pass the array as an argument."
    )
