"""Classes: generic, abstract, inherited; their methods, properties and special methods."""

import abc
import collections.abc
import copy
import functools
import inspect
import typing
import weakref
from typing import Any

import jax.tree_util as jtu
import pytest

from tests.beside_equinox import both
from tests.module.models import HasWeight

T = typing.TypeVar("T")


@both
def test_a_generic_module_may_be_parametrised_or_not(eqx):
    class Model(eqx.Module, typing.Generic[T]):
        x: T

    assert type(Model[int](1)) is type(Model(1)) is Model


@both
def test_a_subclass_of_a_parametrised_generic_inherits_its_fields(eqx):
    class Base(eqx.Module, typing.Generic[T]):
        x: T

    class Model(Base[int]):
        y: int

    assert jtu.tree_leaves(Model(1, 2)) == [1, 2]


@both
def test_a_property_reads_the_fields(eqx):
    class Model(eqx.Module):
        x: int

        @property
        def double(self):
            return 2 * self.x

    assert Model(2).double == 4


@both
def test_a_cached_property_is_no_leaf(eqx):
    class Model(eqx.Module):
        x: int

        @functools.cached_property
        def double(self):
            return 2 * self.x

    model = Model(2)
    assert (model.double, jtu.tree_leaves(model)) == (4, [2])


@both
def test_a_cached_property_is_computed_anew_after_a_map(eqx):
    class Model(eqx.Module):
        x: int

        @functools.cached_property
        def double(self):
            return 2 * self.x

    model = Model(2)
    assert model.double == 4
    assert jtu.tree_map(lambda leaf: leaf + 1, model).double == 6


@both
def test_an_attribute_error_inside_a_property_names_the_attribute(eqx):
    class Model(eqx.Module):
        @property
        def x(self):
            return self.absent

    with pytest.raises(AttributeError, match="absent"):
        _ = Model().x


@both
def test_class_methods_and_static_methods_work_on_class_and_instance(eqx):
    class Model(eqx.Module):
        x: int

        @classmethod
        def make(cls):
            return cls(3)

        @staticmethod
        def double(value):
            return 2 * value

    model = Model.make()
    assert (model.make().x, Model.double(2), model.double(2)) == (3, 4, 4)


@both
def test_special_methods_work(eqx):
    class Model(eqx.Module):
        x: int

        def __call__(self, y):
            return self.x + y

        def __add__(self, y):
            return self.x + y

        def __len__(self):
            return self.x

        def __getitem__(self, index):
            return index

        def __iter__(self):
            return iter([self.x])

        def __contains__(self, value):
            return value == self.x

        def __bool__(self):
            return False

    model = Model(1)
    output = (model(1), model + 1, len(model), model[5], list(model), 1 in model, bool(model))
    assert output == (2, 2, 1, 5, [1], True, False)


@both
def test_a_user_getattr_is_asked_only_for_what_is_not_there(eqx):
    class Model(eqx.Module):
        x: int

        def __getattr__(self, name):
            if name.startswith("_"):
                raise AttributeError(name)
            return name

    model = Model(1)
    mapped = jtu.tree_map(lambda leaf: leaf + 1, copy.copy(model))
    assert (model.x, model.other, mapped.x, jtu.tree_leaves(mapped)) == (1, "other", 2, [2])


@both
def test_the_getattr_of_a_mixin_behind_module_is_asked(eqx):
    class Mixin:
        def __getattr__(self, name):
            if name.startswith("_"):
                raise AttributeError(name)
            return name

    class Model(eqx.Module, Mixin):
        x: int

    assert (Model(1).x, Model(1).other) == (1, "other")


@both
def test_a_mapping_may_be_a_module(eqx):
    class Model(eqx.Module, collections.abc.Mapping):
        x: dict

        def __getitem__(self, key):
            return self.x[key]

        def __iter__(self):
            return iter(self.x)

        def __len__(self):
            return len(self.x)

    assert dict(Model({"a": 1})) == {"a": 1}


@both
def test_arguments_of_a_class_statement_reach_init_subclass(eqx):
    tags = []

    class Base(eqx.Module):
        def __init_subclass__(cls, tag=None, **kwargs):
            super().__init_subclass__(**kwargs)
            tags.append(tag)

    class Model(Base, tag="a"):
        pass

    assert tags == ["a"]


ABSTRACT = {
    "method": abc.abstractmethod(lambda self: None),
    "property": property(abc.abstractmethod(lambda self: None)),
    "class method": classmethod(abc.abstractmethod(lambda cls: None)),
    "static method": staticmethod(abc.abstractmethod(lambda: None)),
}


@both
@pytest.mark.parametrize("kind", ABSTRACT)
def test_a_class_with_something_abstract_has_no_instances(eqx, kind):
    Model = type(eqx.Module)("Model", (eqx.Module,), {"member": ABSTRACT[kind]})
    with pytest.raises(TypeError, match=r"abstract class Model .*abstract method '?member"):
        Model()


@both
def test_an_abstract_special_method_makes_the_class_abstract(eqx):
    class Model(eqx.Module):
        @abc.abstractmethod
        def __call__(self):
            pass

    with pytest.raises(TypeError, match="abstract class Model"):
        Model()


@both
def test_a_subclass_that_does_not_override_an_abstract_method_has_no_instances(eqx):
    class Base(eqx.Module):
        @abc.abstractmethod
        def method(self):
            pass

    class Model(Base):
        x: int = 1

    with pytest.raises(TypeError, match="abstract class Model"):
        Model()


@both
def test_a_subclass_that_overrides_an_abstract_method_has_instances(eqx):
    class Base(eqx.Module):
        @abc.abstractmethod
        def method(self):
            pass

    class Model(Base):
        def method(self):
            return 2

    assert Model().method() == 2


@both
def test_the_abstract_methods_of_a_class_are_listed(eqx):
    class Model(eqx.Module):
        @abc.abstractmethod
        def method(self):
            pass

        def other(self):
            pass

    assert Model.__abstractmethods__ == {"method"}


@both
def test_an_annotation_alone_does_not_override_an_abstract_method(eqx):
    class Base(eqx.Module):
        @abc.abstractmethod
        def method(self):
            pass

    class Model(Base):
        method: Any

    with pytest.raises(TypeError, match="abstract class Model"):
        Model(lambda: 3)


@both
def test_a_field_may_shadow_a_method_of_the_base(eqx):
    class Base(eqx.Module):
        def method(self):
            return 1

    class Model(Base):
        method: Any

    assert Model(lambda: 3).method() == 3


@both
def test_the_documentation_of_a_class_and_of_its_init_is_kept(eqx):
    class Model(eqx.Module):
        """The class."""

        x: int

        def __init__(self):
            """The init."""
            self.x = 1

    assert (Model.__doc__, Model.__init__.__doc__) == ("The class.", "The init.")


@both
def test_an_instance_satisfies_a_runtime_protocol_of_its_fields(eqx):
    class Model(eqx.Module):
        weight: int

    assert isinstance(Model(1), HasWeight)


@both
def test_a_field_is_found_without_running_code(eqx):
    class Model(eqx.Module):
        weight: int

    # What is found need not be the value: runtime protocols ask whether there is anything.
    assert inspect.getattr_static(Model(1), "weight", None) is not None


@both
def test_an_instance_may_be_weakly_referenced(eqx):
    class Model(eqx.Module):
        x: int

    model = Model(1)
    reference = weakref.ref(model)
    assert reference() is model
    del model
    assert reference() is None


@both
def test_a_metaclass_may_stand_on_top_of_that_of_modules(eqx):
    made = []

    class Meta(type(eqx.Module)):
        def __new__(mcs, name, bases, namespace, /, tag=None, **keywords):
            cls = super().__new__(mcs, name, bases, namespace, **keywords)
            type.__setattr__(cls, "tag", tag)
            return cls

        def __call__(cls, *args, **kwargs):
            made.append(cls.__name__)
            return super().__call__(*args, **kwargs)

    class Base(eqx.Module, metaclass=Meta, tag="base"):
        x: Any

    class Model(Base, tag="model"):
        mode: str = eqx.field(static=True, default="a")

    model = eqx.filter_jit(lambda model: model)(Model(1.0))
    assert (Base.tag, Model.tag, made) == ("base", "model", ["Model"])
    assert (type(model), jtu.tree_leaves(model), model.mode) == (Model, [1.0], "a")
