"""What may not be assigned or deleted, and what the error says."""

import contextlib
import dataclasses
import typing

import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

import eqxlike
from tests.beside_equinox import both
from tests.module.models import Inner


@both
@pytest.mark.parametrize("name", ["weight", "fresh"])
def test_assigning_after_init_raises_with_the_name_of_the_field(eqx, name):
    class Model(eqx.Module):
        weight: int

    with pytest.raises(dataclasses.FrozenInstanceError, match=f"cannot assign to field '{name}'"):
        setattr(Model(1), name, 2)


def test_the_error_of_an_assignment_says_what_to_write_instead():
    with pytest.raises(dataclasses.FrozenInstanceError) as caught:
        Inner(1).weight = 2
    assert str(caught.value).startswith("cannot assign to field 'weight' of a Inner")
    assert "eqxlike.tree_at(lambda module: module.weight, module, value)" in str(caught.value)


@both
def test_assigning_an_undeclared_name_in_init_raises_with_the_name(eqx):
    class Model(eqx.Module):
        x: int

        def __init__(self):
            self.x = 1
            self.y = 2

    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'y'"):
        Model()


def test_the_error_of_an_undeclared_name_says_what_to_write():
    class Model(eqxlike.Module):
        def __init__(self):
            self.y = 2

    expected = "Model declares no such field. Write `y: <type>` in the body of the class"
    with pytest.raises(dataclasses.FrozenInstanceError, match=expected):
        Model()


@both
@pytest.mark.parametrize(
    "annotation", [typing.ClassVar[int], dataclasses.InitVar[int]], ids=["class", "init"]
)
def test_assigning_a_pseudo_field_in_init_raises(eqx, annotation):
    class Model(eqx.Module):
        x: int
        y: annotation = 3

        def __init__(self):
            self.x = 1
            self.y = 4

    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'y'"):
        Model()


@both
def test_assigning_the_name_of_a_method_in_init_raises(eqx):
    class Model(eqx.Module):
        def method(self):
            pass

        def __init__(self):
            self.method = 3

    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'method'"):
        Model()


@both
def test_assigning_to_another_instance_in_init_raises(eqx):
    class Model(eqx.Module):
        x: int

        def __init__(self, other=None):
            self.x = 1
            if other is not None:
                other.x = 5

    with pytest.raises(dataclasses.FrozenInstanceError):
        Model(Model())


@both
def test_augmented_assignment_raises(eqx):
    class Model(eqx.Module):
        x: int

    model = Model(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.x += 1


@both
def test_calling_a_generated_init_again_raises(eqx):
    class Model(eqx.Module):
        x: int

    model = Model(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.__init__(2)


@both
def test_calling_a_custom_init_again_raises(eqx):
    class Model(eqx.Module):
        x: int

        def __init__(self, x):
            self.x = x

    model = Model(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.__init__(2)


def test_filter_jit_sees_what_a_second_call_of_init_left():
    @eqxlike.filter_jit
    def read(module):
        return module.weight * 1

    module = Inner(jnp.array(1.0))
    read(module)
    with contextlib.suppress(dataclasses.FrozenInstanceError):
        module.__init__(jnp.array(5.0))
    assert read(module) == module.weight


def test_deleting_a_field_raises_with_its_name():
    module = Inner(1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'weight'"):
        del module.weight
    assert module.weight == 1


@both
def test_what_came_out_of_a_map_is_frozen(eqx):
    class Model(eqx.Module):
        x: int

    with pytest.raises(dataclasses.FrozenInstanceError):
        jtu.tree_map(lambda leaf: leaf, Model(1)).x = 2
