"""What errors and warnings say of the values of fields, and where a warning points.

Of which class they are is compared with Equinox in `programs/fields.py` and `programs/mistakes.py`.
"""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqxlike
from eqxlike import Module
from tests.module.models import Inner, StaticAny


class Scale(Module):
    weight: Any

    def __call__(self, x):
        return self.weight * x


# --- static fields ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (jnp.ones((2, 3), jnp.float32), ""),
        (np.ones((2, 3), np.float32), ""),
        ((1, jnp.ones((2, 3))), r" at StaticAny\.option\[1\]"),
        (Scale(jnp.ones((2, 3))), r" at StaticAny\.option\.weight"),
    ],
    ids=["jax", "numpy", "tuple", "module"],
)
def test_an_array_in_a_static_field_is_an_error_with_field_shape_and_dtype(value, path):
    expected = rf"StaticAny\.option is a .* shape \(2, 3\) and dtype float32{path}\. A static"
    with pytest.raises(TypeError, match=expected):
        StaticAny(value)


def test_a_numpy_scalar_in_a_static_field_is_a_static_value():
    assert jtu.tree_leaves(StaticAny(np.float32(1))) == []


def containing_itself():
    value = [1]
    value.append(value)
    return value


class RaisesInHash:
    def __hash__(self):
        raise TypeError("no hash today")


@pytest.mark.parametrize(
    ("value", "path", "why"),
    [
        ({"a": (1, RaisesInHash())}, r" at StaticAny\.option\['a'\]\[1\]", "no hash today"),
        (containing_itself(), r" at StaticAny\.option\[1\]", "it contains itself"),
        (memoryview(bytearray(2)), "", "cannot hash writable memoryview object"),
    ],
    ids=["hash-raises", "cycle", "no-attributes"],
)
def test_a_static_value_that_nothing_can_be_compared_by_is_an_error_with_its_path(value, path, why):
    expected = rf"StaticAny\.option is a static field .*{path}, which is not hashable \({why}\)"
    with pytest.raises((TypeError, ValueError), match=expected):
        StaticAny(value)


# --- what a class or its `__init__` may not do --------------------------------------------------


class Initialises(Module):
    x: int
    y: int = eqxlike.field(converter=str)
    z: int = eqxlike.field(static=True)

    def __init__(self, *names):
        for name in names:
            setattr(self, name, 1)


class HoldsMethod(Module):
    function: Any = None
    static: Any = eqxlike.field(static=True, default=None)

    def __init__(self, name):
        setattr(self, name, self.method)

    def method(self):
        return 1


class ReturnsOne(Module):
    def __init__(self):
        return 1


@pytest.mark.parametrize(
    ("make", "error", "expected"),
    [
        (lambda: Initialises("y", "z"), TypeError, "Field 'x' of Initialises not initialized by"),
        (lambda: Initialises("z"), TypeError, "Fields 'x', 'y' of Initialises not initialized"),
        (ReturnsOne, TypeError, r"ReturnsOne\.__init__\(\) should assign fields and return"),
        (lambda: HoldsMethod("function"), ValueError, r"function was given .* calls `self\.method"),
        (lambda: HoldsMethod("static"), ValueError, r"static was given .* calls `self\.method"),
        (
            lambda: jax.eval_shape(StaticAny, jnp.ones(2)),
            TypeError,
            r"StaticAny\.option is a static field",
        ),
        (lambda: Module.register(int), ValueError, r"Write `class int\(Module\)`"),
        (
            lambda: eqxlike.field(metadata={"static": 1}),
            ValueError,
            "metadata with name 'static': `field` takes `static=`",
        ),
        (
            lambda: eqxlike.field(metadata={"converter": 1}),
            ValueError,
            "metadata with name 'converter': `field` takes `converter=`",
        ),
    ],
)
def test_error_says_what_to_write_instead(make, error, expected):
    with pytest.raises(error, match=expected):
        make()


def test_a_default_that_init_never_assigned_is_a_leaf():
    class Model(Module):
        x: int = 3
        y: int = eqxlike.field(init=False, default=4)

        def __init__(self):
            pass

    assert jtu.tree_leaves(Model()) == [3, 4]


# --- likely slips -------------------------------------------------------------------------------


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


def test_warnings_point_to_the_line_that_is_to_be_changed():
    jitted = jax.jit(Scale(jnp.ones(2)))
    for value in (jitted, [jitted], (1, jitted), {"a": jitted}):
        found = warning_of(lambda value=value: Inner(value))
        assert found.startswith("Inner.weight was given a JAX-transformed callable around a Module")
    assert "write `eqxlike.field(static=True)`" in warning_of(eqxlike.static_field)
    assert "Model has both an `__init__` method and a `__post" in warning_of(
        make_with_init_and_post_init
    )
