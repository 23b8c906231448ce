"""Classes of which something was replaced: by `__init_subclass__`, by a metaclass, afterwards."""

import abc
import functools
import inspect
from typing import Any
from unittest import mock

import jax.numpy as jnp
import jax.tree_util as jtu

from tests.module.programs.registry import program


def doubled(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return 2 * function(*args, **kwargs)

    return wrapper


def make_base(eqx, replace):
    """A class that calls `replace` with each of its subclasses as it is made."""

    class Base(eqx.Module):
        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            replace(cls)

    return Base


@program
def init_subclass_wraps_a_method(eqx):
    def wrap(cls):
        cls.method = doubled(vars(cls)["method"])

    class Model(make_base(eqx, wrap)):
        x: int

        def method(self):
            return self.x

    return Model(1).method(), isinstance(Model(1).method, eqx.Module), Model.method(Model(2))


@program
def init_subclass_of_a_plain_mixin_wraps_a_method(eqx):
    class Mixin:
        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            cls.method = doubled(vars(cls)["method"])

    class First(Mixin, eqx.Module):
        def method(self):
            return 1

    class Last(eqx.Module, Mixin):
        def method(self):
            return 1

    return First().method(), Last().method()


@program
def init_subclass_wraps_a_method_that_calls_the_one_above(eqx):
    def wrap(cls):
        cls.method = doubled(vars(cls)["method"])

    class Model(make_base(eqx, wrap)):
        def method(self):
            return 1

    class Below(Model):
        def method(self):
            return 10 + super().method()

    return Below().method()


@program
def init_subclass_puts_another_descriptor_in_the_place_of_a_method(eqx):
    def replace(cls):
        cls.read = property(vars(cls)["read"])
        cls.count = staticmethod(lambda: 5)
        cls.made = classmethod(lambda cls: cls.__name__)

    class Model(make_base(eqx, replace)):
        x: int

        def read(self):
            return self.x

        def count(self):
            return 1

        def made(self):
            return ""

    return Model(3).read, Model(3).count(), Model(3).made()


@program
def init_subclass_transforms_a_method(eqx):
    def transform(cls):
        cls.scale = eqx.filter_vmap(in_axes=(None, 0))(vars(cls)["scale"])
        cls.__call__ = eqx.filter_jit(vars(cls)["__call__"])

    class Model(make_base(eqx, transform)):
        x: Any

        def scale(self, y):
            return self.x * y

        def __call__(self, y):
            return self.x + y

    model = Model(jnp.array(2.0))
    return model.scale(jnp.arange(3.0)).tolist(), float(model(1.0))


@program
def init_subclass_takes_a_method_away(eqx):
    def take(cls):
        del cls.method

    class Model(make_base(eqx, take)):
        def method(self):
            return 1

    return hasattr(Model(), "method")


@program
def init_subclass_makes_a_method_abstract(eqx):
    def make_abstract(cls):
        cls.method = abc.abstractmethod(vars(cls)["method"])

    class Model(make_base(eqx, make_abstract)):
        def method(self):
            return 1

    return Model()


@program
def init_subclass_overrides_an_abstract_method(eqx):
    def override(cls):
        cls.method = lambda self: 2

    class Model(make_base(eqx, override)):
        @abc.abstractmethod
        def method(self):
            pass

    return Model().method()


@program
def init_subclass_adds_a_field(eqx):
    def add(cls):
        cls.__annotations__ = {**inspect.get_annotations(cls), "y": int}
        cls.y = 7

    class Model(make_base(eqx, add)):
        x: int

    return jtu.tree_leaves(Model(1)), jtu.tree_leaves(Model(1, 2)), Model.y


@program
def init_subclass_makes_fields_static(eqx):
    def make_static(cls):
        for name in inspect.get_annotations(cls):
            setattr(cls, name, eqx.field(static=True))

    class Model(make_base(eqx, make_static)):
        x: int

    class Below(Model):
        x: int

    return jtu.tree_leaves(Model(1)), jtu.tree_leaves(Below(1)), Below(1).x


@program
def init_subclass_replaces_what_makes_instances(eqx):
    def replace(cls):
        made = cls.__init__

        def __init__(self, x):
            made(self, x)
            self.y = 5

        cls.__init__ = __init__
        cls.__check_init__ = lambda self: checked.append(self.y)

    checked: list[int] = []

    class Model(make_base(eqx, replace)):
        x: int
        y: int

        def __init__(self, x):
            self.x = x

    return Model(1).y, checked


@program
def init_subclass_adds_post_init(eqx):
    def add(cls):
        cls.__post_init__ = lambda self: setattr(self, "y", self.x + 1)

    class Model(make_base(eqx, add)):
        x: int
        y: int = eqx.field(init=False)

    return Model(1).y


@program
def metaclass_above_wraps_a_method(eqx):
    class Meta(type(eqx.Module)):
        def __new__(mcs, name, bases, namespace, **kwargs):
            cls = super().__new__(mcs, name, bases, namespace, **kwargs)
            if "method" in vars(cls):
                cls.method = doubled(cls.method)
            return cls

    class Model(eqx.Module, metaclass=Meta):
        def method(self):
            return 1

    return Model().method(), isinstance(Model().method, eqx.Module)


@program
def metaclass_below_wraps_a_method(eqx):
    class Below(type):
        def __new__(mcs, name, bases, namespace, **kwargs):
            cls = super().__new__(mcs, name, bases, namespace, **kwargs)
            if "method" in vars(cls):
                type.__setattr__(cls, "method", doubled(vars(cls)["method"]))
            return cls

    class Meta(type(eqx.Module), Below):
        pass

    class Model(eqx.Module, metaclass=Meta):
        def method(self):
            return 1

    return Model().method(), isinstance(Model().method, eqx.Module)


@program
def class_decorator_wraps_all_that_can_be_called(eqx):
    def wrap_all(cls):
        for name, value in list(vars(cls).items()):
            if callable(value) and not name.startswith("__"):
                setattr(cls, name, doubled(value))
        return cls

    @wrap_all
    class Model(eqx.Module):
        x: int

        def method(self):
            return self.x

    return Model(1).method()


@program
def descriptor_replaces_another_attribute_as_it_is_named(eqx):
    class Replacing:
        def __set_name__(self, owner, name):
            owner.method = doubled(vars(owner)["method"])

    class Model(eqx.Module):
        def method(self):
            return 1

        replacing = Replacing()

    return Model().method()


@program
def what_vars_of_a_class_has_for_a_method(eqx):
    class Model(eqx.Module):
        x: int

        def method(self, y: int = 1):
            """Adds."""
            return self.x + y

    found = vars(Model)["method"]
    return found(Model(1)), found.__name__, found.__doc__, str(inspect.signature(found))


@program
def attributes_of_a_class_are_patched_for_a_while(eqx):
    class Model(eqx.Module):
        x: int = 2

        def method(self):
            return 1

    def method(self):
        return 5

    with mock.patch.object(Model, "method", method), mock.patch.object(Model, "x", 7):
        patched = Model().method(), Model.x
    return patched, Model().method(), Model.x


@program
def default_is_deleted_from_the_class(eqx):
    class Model(eqx.Module):
        x: Any = 3

    make = eqx.filter_jit(lambda x: Model(x))
    before = make(jnp.array(1.0))
    del Model.x
    after = make(jnp.array(2.0))
    return float(before.x), float(after.x), hasattr(Model, "x"), Model().x


@program
def default_is_deleted_twice(eqx):
    class Model(eqx.Module):
        x: int = 3

    del Model.x
    del Model.x
