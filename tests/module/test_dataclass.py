"""The dataclass that a Module is: its signature, its fields, the generated `__init__`."""

import dataclasses
import inspect
import typing
from typing import Any

import equinox
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqxlike
from tests.beside_equinox import both

# --- signatures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Module", "field"])
def test_has_the_parameters_of_equinox(name):
    def parameters(library):
        signature = inspect.signature(getattr(library, name))
        return [(p.name, p.kind, p.default) for p in signature.parameters.values()]

    assert parameters(eqxlike) == parameters(equinox)


@both
def test_signature_lists_the_fields_with_their_defaults_and_kinds(eqx):
    class Model(eqx.Module):
        x: int
        y: float = eqx.field(kw_only=True)
        z: str = "z"
        hidden: int = eqx.field(init=False, default=0)

    parameters = inspect.signature(Model).parameters.values()
    assert [str(parameter) for parameter in parameters] == ["x: int", "z: str = 'z'", "y: float"]


@both
def test_signature_is_that_of_a_custom_init_without_self(eqx):
    class Model(eqx.Module):
        x: int

        def __init__(self, size, *sizes, key=None):
            self.x = size

    assert str(inspect.signature(Model)) == "(size, *sizes, key=None)"


@both
def test_signature_of_a_callable_instance_is_that_of_call(eqx):
    class Model(eqx.Module):
        def __call__(self, x, *, key=None):
            return x

    assert str(inspect.signature(Model())) == "(x, *, key=None)"


@both
def test_signature_takes_the_annotation_of_the_converter(eqx):
    def to_tuple(value: list) -> tuple:
        return tuple(value)

    class Model(eqx.Module):
        x: tuple = eqx.field(converter=to_tuple)

    assert inspect.signature(Model).parameters["x"].annotation is list


# --- the generated dataclass --------------------------------------------------------------------


@both
def test_a_subclass_is_a_dataclass_with_the_annotated_fields_in_order(eqx):
    class Base(eqx.Module):
        x: int
        y: int

    class Model(Base):
        z: int
        x: float  # pyright: ignore

    assert dataclasses.is_dataclass(Model)
    assert [each.name for each in dataclasses.fields(Model)] == ["x", "y", "z"]


@both
def test_an_unannotated_attribute_is_no_field(eqx):
    class Model(eqx.Module):
        x = 3

    assert (Model().x, jtu.tree_leaves(Model())) == (3, [])


@both
def test_a_class_variable_is_no_field(eqx):
    class Model(eqx.Module):
        x: int
        y: typing.ClassVar[int] = 2

    assert (Model(1).y, jtu.tree_leaves(Model(1))) == (2, [1])


@both
def test_a_class_attribute_may_be_assigned_after_the_class_was_made(eqx):
    class Model(eqx.Module):
        x: int

    Model.y = 5
    assert Model(1).y == 5


@both
@pytest.mark.parametrize(
    "default", [[], {}, np.ones(2), jnp.ones(2)], ids=lambda value: type(value).__name__
)
def test_a_mutable_default_is_refused(eqx, default):
    with pytest.raises(ValueError, match=r"mutable default .* for field x is not allowed"):

        class Model(eqx.Module):
            x: Any = default


@both
def test_a_default_is_an_attribute_of_the_class(eqx):
    class Model(eqx.Module):
        x: int = 3
        y: int = eqx.field(default=4, static=True)

    assert (Model.x, Model.y) == (3, 4)


@both
def test_a_field_without_default_is_no_attribute_of_the_class(eqx):
    class Model(eqx.Module):
        x: int

    assert not hasattr(Model, "x")


@both
def test_a_redeclared_field_keeps_its_default_as_in_any_dataclass(eqx):
    class Base(eqx.Module):
        x: int = 3

    class Model(Base):
        x: float

    assert Model().x == 3


@both
def test_a_subclass_may_change_a_default(eqx):
    class Base(eqx.Module):
        x: int = 3

    class Model(Base):
        x: int = 4

    assert (Base().x, Model().x) == (3, 4)


@both
def test_an_attribute_without_annotation_over_a_field_is_no_new_default(eqx):
    class Base(eqx.Module):
        x: int = 3

    class Model(Base):
        x = 4

    assert Model().x == 3


@both
def test_a_module_may_be_a_default(eqx):
    class Part(eqx.Module):
        x: int

    class Model(eqx.Module):
        part: Part = Part(1)

    assert jtu.tree_leaves(Model()) == [1]


@both
def test_a_default_factory_is_called_for_each_instance(eqx):
    class Model(eqx.Module):
        x: list = eqx.field(default_factory=list)

    assert Model().x == []
    assert Model().x is not Model().x


@both
def test_a_field_without_default_after_one_with_is_refused(eqx):
    with pytest.raises(TypeError, match="non-default argument 'y' follows default argument"):

        class Model(eqx.Module):
            x: int = 1
            y: int


@both
def test_post_init_runs_after_the_generated_init_and_may_assign(eqx):
    class Model(eqx.Module):
        x: int
        y: int = eqx.field(init=False)

        def __post_init__(self):
            self.y = self.x + 1

    assert Model(1).y == 2


@both
def test_post_init_is_inherited_with_the_generated_init(eqx):
    class Base(eqx.Module):
        x: int

        def __post_init__(self):
            self.x = self.x + 1

    class Model(Base):
        y: int

    model = Model(1, 2)
    assert (model.x, model.y) == (2, 2)


@both
def test_an_init_variable_reaches_post_init_and_is_not_stored(eqx):
    class Model(eqx.Module):
        x: int = eqx.field(init=False)
        seed: dataclasses.InitVar[int]

        def __post_init__(self, seed):
            self.x = seed

    assert vars(Model(3)) == {"x": 3}


@both
def test_instances_match_a_class_pattern_by_position(eqx):
    class Model(eqx.Module):
        x: int
        y: int

    match Model(1, 2):
        case Model(x, y):
            assert (x, y) == (1, 2)


@both
@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "missing 1 required positional argument: 'x'"),
        ((1, 2), {}, "takes 2 positional arguments but 3 were given"),
        ((1,), {"y": 2}, "got an unexpected keyword argument 'y'"),
    ],
)
def test_wrong_arguments_raise_as_any_function_does(eqx, args, kwargs, message):
    class Model(eqx.Module):
        x: int

    with pytest.raises(TypeError, match=message):
        Model(*args, **kwargs)


@both
def test_having_both_init_and_post_init_warns(eqx):
    with pytest.warns(UserWarning, match="both an `__init__` method and a\\s+`__post_init__`"):

        class Model(eqx.Module):
            x: int

            def __init__(self):
                self.x = 1

            def __post_init__(self):
                pass
