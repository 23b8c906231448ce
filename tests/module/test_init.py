"""A custom `__init__`, and `__check_init__` after it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

import eqxlike
from tests.beside_equinox import both

# --- a custom __init__ --------------------------------------------------------------------------


@both
def test_a_custom_init_may_read_what_it_assigned(eqx):
    class Model(eqx.Module):
        x: int
        y: int

        def __init__(self, x):
            self.x = x
            self.y = self.x + 1

    assert Model(1).y == 2


@both
def test_a_custom_init_may_assign_a_field_twice(eqx):
    class Model(eqx.Module):
        x: int

        def __init__(self):
            self.x = 1
            self.x = 2

    assert Model().x == 2


@both
def test_a_custom_init_is_inherited(eqx):
    class Base(eqx.Module):
        x: int

        def __init__(self, *, x):
            self.x = x

    class Model(Base):
        y: int = 3

    model = Model(x=1)
    assert (model.x, model.y) == (1, 3)


@both
def test_a_custom_init_may_call_a_generated_one_above(eqx):
    class Base(eqx.Module):
        x: int

    class Model(Base):
        y: int

        def __init__(self):
            super().__init__(1)
            self.y = self.x + 1

    model = Model()
    assert (model.x, model.y) == (1, 2)


@both
def test_a_custom_init_of_a_plain_mixin_is_inherited(eqx):
    class Mixin:
        def __init__(self, x):
            self.x = x + 10

    class Model(Mixin, eqx.Module):
        x: int

    assert Model(1).x == 11


@both
def test_inits_cooperate_along_the_method_resolution_order(eqx):
    class Left(eqx.Module):
        x: int

        def __init__(self, x, **kwargs):
            self.x = x
            super().__init__(**kwargs)

    class Right(eqx.Module):
        y: int

        def __init__(self, y, **kwargs):
            self.y = y
            super().__init__(**kwargs)

    class Model(Left, Right):
        pass

    model = Model(x=1, y=2)
    assert (model.x, model.y) == (1, 2)


@both
def test_a_diamond_has_each_field_once(eqx):
    class Top(eqx.Module):
        x: int

    class Left(Top):
        y: int

    class Right(Top):
        z: int

    class Model(Left, Right):
        pass

    assert sorted(jtu.tree_leaves(Model(x=1, y=2, z=3))) == [1, 2, 3]


@both
def test_a_wrapped_init_still_counts_as_generated_for_subclasses(eqx):
    class Base(eqx.Module):
        x: int

    original = Base.__init__

    @functools.wraps(original)
    def patched(self, *args, **kwargs):
        original(self, *args, **kwargs)

    Base.__init__ = patched

    class Model(Base):
        y: int

    assert vars(Model(1, 2)) == {"x": 1, "y": 2}


@both
def test_an_init_patched_without_wraps_still_counts_as_generated_for_subclasses(eqx):
    class Base(eqx.Module):
        x: int

    original = Base.__init__

    def patched(self, *args, **kwargs):
        original(self, *args, **kwargs)

    Base.__init__ = patched

    class Model(Base):
        y: int

    assert vars(Model(1, 2)) == {"x": 1, "y": 2}


@both
def test_a_module_may_be_made_inside_the_init_of_another_of_its_class(eqx):
    class Model(eqx.Module):
        x: int
        inner: Any

        def __init__(self, depth):
            self.x = depth
            self.inner = Model(depth - 1) if depth else None
            self.x = self.x + 10

    assert jtu.tree_leaves(Model(2)) == [12, 11, 10]


@both
@pytest.mark.parametrize("make", [lambda cls: cls(), lambda cls: cls(3)], ids=["none", "one"])
def test_a_field_that_init_never_sets_is_a_type_error_that_names_it(eqx, make):
    class Model(eqx.Module):
        x: int
        y: int

        def __init__(self, x=0):
            self.x = x

    with pytest.raises(TypeError, match=r"'y'.*not init"):
        make(Model)


@both
def test_a_field_with_a_converter_that_init_never_sets_is_a_type_error_that_names_it(eqx):
    class Model(eqx.Module):
        x: int = eqx.field(converter=float)

        def __init__(self):
            pass

    with pytest.raises(TypeError, match=r"'x'.*not init"):
        Model()


@both
def test_a_static_field_that_init_never_sets_is_a_type_error_that_names_it(eqx):
    class Model(eqx.Module):
        x: int = eqx.field(static=True, init=False)

    with pytest.raises(TypeError, match=r"'x'.*not init"):
        Model()


def test_all_the_missing_fields_are_named():
    class Model(eqxlike.Module):
        x: int
        y: int

        def __init__(self):
            pass

    with pytest.raises(TypeError, match="Fields 'x', 'y' of Model not initialized by `__init__`"):
        Model()


def test_a_default_that_init_never_assigned_is_a_leaf():
    class Model(eqxlike.Module):
        x: int = 3
        y: int = eqxlike.field(init=False, default=4)

        def __init__(self):
            pass

    assert jtu.tree_leaves(Model()) == [3, 4]


@both
def test_storing_a_method_of_self_on_self_is_refused(eqx):
    class Model(eqx.Module):
        function: Any

        def __init__(self):
            self.function = self.method

        def method(self):
            return 1

    with pytest.raises(ValueError, match=r"method.* in.*__init__"):
        Model()


@both
def test_a_static_method_of_self_may_be_stored_on_self(eqx):
    class Model(eqx.Module):
        function: Any

        def __init__(self):
            self.function = self.method

        @staticmethod
        def method():
            return 1

    assert Model().function() == 1


@both
@pytest.mark.parametrize("transform", [jax.jit, jax.vmap], ids=["jit", "vmap"])
def test_storing_a_jax_transformed_module_in_a_field_warns(eqx, transform):
    class Part(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            return self.weight * x

    class Model(eqx.Module):
        function: Any

    with pytest.warns(UserWarning, match="JAX-transformed callable"):
        Model(transform(Part(jnp.ones(2))))


# --- __check_init__ -----------------------------------------------------------------------------


@both
def test_check_init_runs_at_each_level_from_the_class_upwards(eqx):
    called = []

    class Mixin:
        def __check_init__(self):
            called.append("mixin")

    class Base(eqx.Module):
        x: int

        def __check_init__(self):
            called.append("base")

    class Middle(Base):
        pass

    class Model(Middle, Mixin):
        def __check_init__(self):
            called.append("model")

    Model(1)
    assert called == ["model", "base", "mixin"]


@both
def test_check_init_sees_converted_values(eqx):
    seen = []

    class Model(eqx.Module):
        x: str = eqx.field(converter=str)

        def __check_init__(self):
            seen.append(self.x)

    Model(1)
    assert seen == ["1"]


@both
def test_check_init_may_not_assign(eqx):
    class Model(eqx.Module):
        x: int

        def __check_init__(self):
            self.x = 2

    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'x'"):
        Model(1)


@both
def test_check_init_does_not_run_on_unflatten(eqx):
    called = []

    class Model(eqx.Module):
        x: int

        def __check_init__(self):
            called.append(None)

    jtu.tree_map(lambda leaf: leaf, Model(1))
    assert len(called) == 1
