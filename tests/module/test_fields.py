"""Messages of errors and warnings about fields, and the line to which a warning points.

`programs/fields.py` and `programs/mistakes.py` compare their classes with Equinox.
"""

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqxlike
from eqxlike import Module, field
from tests.module.models import Inner, StaticAny


class Scale(Module):
    weight: Any

    def __call__(self, x):
        return self.weight * x


def containing_itself():
    value = [1]
    value.append(value)
    return value


class RaisesInHash:
    def __hash__(self):
        raise TypeError("no hash today")


class Initialises(Module):
    x: int
    y: int = field(converter=str)
    z: int = field(static=True)

    def __init__(self, *names):
        for name in names:
            setattr(self, name, 1)


class HoldsMethod(Module):
    function: Any = None
    static: Any = field(static=True, default=None)

    def __init__(self, name):
        setattr(self, name, self.method)

    def method(self):
        return 1


class ReturnsOne(Module):
    def __init__(self):
        return 1


# Tuples (value, path, reason why a value that is no array has no hash).
STATIC_VALUES = [
    (jnp.ones((2, 3)), "", ""),
    (np.ones((2, 3), np.float32), "", ""),
    ((1, jnp.ones((2, 3))), r"\[1\]", ""),
    (Scale(jnp.ones((2, 3))), r"\.weight", ""),
    ({"a": (1, RaisesInHash())}, r"\['a'\]\[1\]", "no hash today"),
    (containing_itself(), r"\[1\]", "it contains itself"),
    (memoryview(bytearray(2)), "", "cannot hash writable memoryview object"),
]


@pytest.mark.parametrize(("value", "path", "why"), STATIC_VALUES)
def test_array_or_opaque_value_in_a_static_field_is_an_error_with_its_path(value, path, why):
    array = r"an array of shape \(2, 3\) and dtype float32"
    place = path and rf" at StaticAny\.option{path}"
    expected = (
        rf".*{place}, which is not hashable \({why}\)" if why else rf"{array}{place}\. A static"
    )
    with pytest.raises(TypeError, match=rf"StaticAny\.option is a .*{expected}"):
        StaticAny(value)


ERRORS = [
    (lambda: Initialises("y", "z"), TypeError, "Field 'x' of Initialises not initialized by"),
    (lambda: Initialises("z"), TypeError, "Fields 'x', 'y' of Initialises not initialized"),
    (ReturnsOne, TypeError, r"ReturnsOne\.__init__\(\) should assign fields and return"),
    (lambda: HoldsMethod("function"), ValueError, r"function was given .* calls `self\.method"),
    (lambda: HoldsMethod("static"), ValueError, r"static was given .* calls `self\.method"),
    (lambda: jax.eval_shape(StaticAny, jnp.ones(2)), TypeError, "StaticAny.option is a static"),
    (lambda: Module.register(int), ValueError, r"Write `class int\(Module\)`"),
    (lambda: field(metadata={"static": 1}), ValueError, "name 'static': `field` takes `static=`"),
    (
        lambda: field(metadata={"converter": 1}),
        ValueError,
        "'converter': `field` takes `converter=",
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), ERRORS)
def test_error_names_the_field_and_the_fix(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_unassigned_default_is_a_leaf_and_a_numpy_scalar_may_be_static():
    class Model(Module):
        x: int = 3
        y: int = field(init=False, default=4)

        def __init__(self):
            pass

    assert jtu.tree_leaves(Model()) == [3, 4]
    assert jtu.tree_leaves(StaticAny(np.float32(1))) == []


# --- warnings -----------------------------------------------------------------------------------


def warning_of(make):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    (warning,) = caught
    assert (warning.filename, warning.category) == (__file__, UserWarning)
    return str(warning.message)


def make_with_init_and_post_init():
    class Model(Module):
        def __init__(self):
            pass

        def __post_init__(self):
            pass


def test_converter_none_in_the_metadata_means_no_converter():
    class Model(Module):
        x: int = dataclasses.field(metadata={"converter": None})

    assert Model(1).x == 1


def test_warnings_point_to_the_line_to_change():
    jitted = jax.jit(Scale(jnp.ones(2)))
    for value in (jitted, [jitted], (1, jitted), {"a": jitted}):
        found = warning_of(lambda value=value: Inner(value))
        assert found.startswith("Inner.weight was given a JAX-transformed callable around a Module")
    assert "write `eqxlike.field(static=True)`" in warning_of(eqxlike.static_field)
    assert "Model has both an `__init__` method and a `__post" in warning_of(
        make_with_init_and_post_init
    )
