"""Classes above and below: overriding, mixins, generics, class arguments, abstract methods."""

import abc
import collections.abc
import enum
import inspect
import typing
from typing import Any

import jax.tree_util as jtu

from tests.module.programs.registry import program

T = typing.TypeVar("T")
S = typing.TypeVar("S")


@program
def generic_with_two_parameters(eqx):
    class Model(eqx.Module, typing.Generic[T, S]):
        x: T
        y: S

    class Sub(Model[int, T]):
        z: T

    parts = jtu.tree_leaves(Model[int, str](1, "a")), jtu.tree_leaves(Sub[str](1, "b", "c"))
    return parts, len(Model.__parameters__)


@program
def generic_first_among_the_bases(eqx):
    class Model(typing.Generic[T], eqx.Module):
        x: T

    return Model[int](1).x


@program(differs="a Module is frozen to `typing` too")
def class_that_an_instance_of_a_generic_was_made_by(eqx):
    class Model(eqx.Module, typing.Generic[T]):
        x: T

    return hasattr(Model[int](1), "__orig_class__")


@program
def protocol_as_a_base(eqx):
    class HasSize(typing.Protocol):
        def size(self) -> int: ...

    class Model(eqx.Module, HasSize):
        def size(self):
            return 3

    return Model().size()


@program
def arguments_of_the_class_statement(eqx):
    seen = []

    class Base(eqx.Module):
        def __init_subclass__(cls, tag, **kwargs):
            super().__init_subclass__(**kwargs)
            seen.append((cls.__name__, tag))

    class Model(Base, tag="a"):
        x: int

    return seen, vars(Model(1))


@program
def unknown_argument_of_the_class_statement(eqx):
    class Model(eqx.Module, tag="a"):
        pass

    return Model


@program
def init_subclass_sees_annotations_not_fields(eqx):
    seen = []

    class Base(eqx.Module):
        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            seen.append((list(inspect.get_annotations(cls)), cls.__name__))

    class Model(Base):
        x: int

    return seen, vars(Model(1))


@program
def init_subclass_adds_a_method(eqx):
    class Base(eqx.Module):
        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            cls.added = lambda self: self.x

    class Model(Base):
        x: int

    return Model(3).added()


@program
def set_name_of_a_descriptor(eqx):
    named = []

    class Descriptor:
        def __set_name__(self, owner, name):
            named.append(name)

        def __get__(self, instance, owner):
            return 7

    class Model(eqx.Module):
        x: int
        y = Descriptor()

    return named, Model(1).y


@program
def method_of_the_base_overridden_by_a_field(eqx):
    class Base(eqx.Module):
        def size(self):
            return 1

    class Model(Base):
        size: Any = 3

    return Model().size, Model(4).size, jtu.tree_leaves(Model(4))


@program
def field_of_the_base_overridden_by_a_method(eqx):
    class Base(eqx.Module):
        size: Any

    class Model(Base):
        def size(self):
            return 3

    return Model(1).size


@program
def field_of_the_base_overridden_by_a_property(eqx):
    class Base(eqx.Module):
        size: Any

    class Model(Base):
        @property
        def size(self):
            return 3

        def __init__(self):
            pass

    return Model().size, jtu.tree_leaves(Model())


@program
def field_under_a_property_that_stores_it(eqx):
    class Base(eqx.Module):
        size: Any

    class Model(Base):
        @property
        def size(self):
            return 10 * vars(self)["size"]

        @size.setter
        def size(self, value):
            vars(self)["size"] = value

        def __init__(self, size):
            self.size = size

    return Model(1.0).size, jtu.tree_leaves(Model(1.0)), jtu.tree_map(lambda x: x, Model(1.0)).size


@program
def field_under_a_property_that_stores_another(eqx):
    class Base(eqx.Module):
        size: Any

    class Model(Base):
        stored: Any

        @property
        def size(self):
            return 10 * self.stored

        @size.setter
        def size(self, value):
            self.stored = value

        def __init__(self, size):
            self.size = size

    return Model(1.0).size, jtu.tree_leaves(Model(1.0)), jtu.tree_map(lambda x: x, Model(1.0)).size


@program
def property_of_the_base_overridden_by_a_field(eqx):
    class Base(eqx.Module):
        @property
        def size(self):
            return 1

    class Model(Base):
        size: int = 2

    return Model().size, Model(5).size, jtu.tree_leaves(Model(5))


@program
def property_of_the_base_overridden_by_a_field_without_default(eqx):
    class Base(eqx.Module):
        @property
        def size(self):
            return 1

    class Model(Base):
        size: int

    return Model(5).size


@program
def class_variable_of_the_base_overridden_by_a_field(eqx):
    class Base(eqx.Module):
        size: typing.ClassVar[int] = 1

    class Model(Base):
        size: int = 2

    return Model().size, Model(3).size, jtu.tree_leaves(Model(3))


@program
def field_of_the_base_overridden_by_a_class_variable(eqx):
    class Base(eqx.Module):
        size: int

    class Model(Base):
        size: typing.ClassVar[int] = 2

    return Model().size, jtu.tree_leaves(Model())


@program
def properties_with_setters(eqx):
    class Model(eqx.Module):
        x: int

        @property
        def y(self):
            return self.x

        @y.setter
        def y(self, value):
            raise AssertionError("never reached: a Module is frozen")

    model = Model(1)
    model.y = 3
    return model


@program
def abstract_property_overridden_by_a_property(eqx):
    class Base(eqx.Module):
        @property
        @abc.abstractmethod
        def size(self): ...

    class Model(Base):
        @property
        def size(self):
            return 3

    return Model().size


@program
def abstract_property_overridden_by_a_default(eqx):
    class Base(eqx.Module):
        @property
        @abc.abstractmethod
        def size(self): ...

    class Model(Base):
        size: int = 3

    return Model().size


@program
def abstract_method_called_through_super(eqx):
    class Base(eqx.Module):
        @abc.abstractmethod
        def size(self):
            return 1

    class Model(Base):
        def size(self):
            return super().size() + 1

    return Model().size()


@program
def abstract_method_of_a_plain_mixin(eqx):
    class Mixin(abc.ABC):
        @abc.abstractmethod
        def size(self): ...

    class Model(eqx.Module, Mixin):
        pass

    return Model()


@program
def abstract_method_of_a_plain_mixin_implemented(eqx):
    class Mixin(abc.ABC):
        @abc.abstractmethod
        def size(self): ...

        def twice(self):
            return 2 * self.size()

    class Model(eqx.Module, Mixin):
        def size(self):
            return 4

    return Model().twice()


@program
def is_abstract_to_inspect(eqx):
    class Base(eqx.Module):
        @abc.abstractmethod
        def size(self): ...

    class Model(Base):
        def size(self): ...

    return inspect.isabstract(Base), inspect.isabstract(Model)


@program
def is_a_sequence(eqx):
    class Model(eqx.Module, collections.abc.Sequence):
        items: tuple

        def __getitem__(self, index):
            return self.items[index]

        def __len__(self):
            return len(self.items)

    model = Model((1, 2))
    return list(model), model.index(2), jtu.tree_leaves(model), list(reversed(model))


@program
def member_of_an_enum_as_a_field(eqx):
    class Kind(enum.Enum):
        ONE = 1

    class Model(eqx.Module):
        kind: Kind = eqx.field(static=True, default=Kind.ONE)

    return Model().kind is Kind.ONE


@program
def nested_class(eqx):
    class Model(eqx.Module):
        x: int

        class Part(eqx.Module):
            y: int

    return vars(Model.Part(1)), vars(Model(2))


@program
def slots_in_a_module(eqx):
    class Model(eqx.Module):
        __slots__ = ()
        x: int

    return Model(1).x


@program
def inherited_signature_and_documentation(eqx):
    class Base(eqx.Module):
        """The base."""

        x: int

        def method(self, y: int) -> int:
            """The method."""
            return y

    class Model(Base):
        def method(self, y):
            return 2 * y

    return (
        inspect.getdoc(Model.method),
        inspect.getdoc(Base.method),
        str(inspect.signature(Model)),
        inspect.getdoc(Base),
    )


@program
def string_of_the_class(eqx):
    class Model(eqx.Module):
        x: int

    return repr(Model), Model.__qualname__, Model.__module__


@program
def super_without_arguments_in_a_property(eqx):
    class Base(eqx.Module):
        @property
        def size(self):
            return 1

    class Model(Base):
        @property
        def size(self):
            return super().size + 1

    return Model().size


@program
def mutual_reference_of_classes_by_closure(eqx):
    class Model(eqx.Module):
        x: int

        def copy(self):
            return __class__(self.x)  # pyright: ignore

    return vars(Model(1).copy())


@program
def annotations_of_the_class(eqx):
    class Model(eqx.Module):
        x: int
        y: typing.ClassVar[str] = ""

    return list(Model.__annotations__)


@program
def hints_of_the_class(eqx):
    class Base(eqx.Module):
        x: "int"

    class Model(Base):
        y: typing.ClassVar[str] = ""

    return {name: str(hint) for name, hint in typing.get_type_hints(Model).items()}
