"""What errors and warnings say, and where a warning points.

Of which class they are is compared with Equinox in `programs/mistakes.py`.
"""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import eqxlike
from eqxlike import Module
from tests.module.models import StaticAny


class Scale(Module):
    weight: jax.Array

    def __call__(self, x):
        return self.weight * x


class Holder(Module):
    function: Any


def warning_of(make):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    (warning,) = caught
    return warning


@pytest.mark.parametrize(
    "wrap",
    [
        lambda function: function,
        lambda function: [function],
        lambda function: (1, function),
        lambda function: {"a": function},
    ],
    ids=["alone", "list", "tuple", "dict"],
)
def test_a_transformed_module_in_a_field_warns_where_the_instance_is_made(wrap):
    warning = warning_of(lambda: Holder(wrap(jax.jit(Scale(jnp.ones(2))))))
    assert str(warning.message).startswith("Holder.function was given a JAX-transformed callable")
    assert (warning.filename, warning.category) == (__file__, UserWarning)


def test_the_old_name_of_a_static_field_warns_where_it_is_used():
    warning = warning_of(eqxlike.static_field)
    assert "write `eqxlike.field(static=True)`" in str(warning.message)
    assert (warning.filename, warning.category) == (__file__, UserWarning)


@pytest.mark.parametrize("value", [(jnp.ones(2),), Scale(jnp.ones(2))], ids=["tuple", "module"])
def test_an_array_inside_a_static_value_is_named(value):
    message = r"array of shape \(2,\) and dtype float32 at StaticAny\.option(\[0\]|\.\w+)\. "
    with pytest.raises(TypeError, match=message):
        StaticAny(value)


def test_a_method_of_self_in_a_static_field_is_refused():
    class Model(Module):
        function: Any = eqxlike.field(static=True)

        def __init__(self):
            self.function = self.method

        def method(self):
            return 1

    with pytest.raises(ValueError, match=r"Model\.function was given a method of the same inst"):
        Model()


def test_a_virtual_subclass_is_an_error_that_says_what_to_write():
    class Other:
        pass

    with pytest.raises(ValueError, match=r"Write `class Other\(Module\)`"):
        Module.register(Other)


def test_an_init_that_returns_something_is_an_error_that_names_the_class():
    class Model(Module):
        def __init__(self):
            return 1

    with pytest.raises(TypeError, match=r"Model\.__init__\(\) should assign fields and return"):
        Model()
