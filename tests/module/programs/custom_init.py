"""A custom `__init__` or `__new__`, inherited, patched or cooperative."""

import functools
import inspect

import jax.tree_util as jtu

from tests.module.programs.registry import program


@program
def init_assigns_a_default_of_the_class_anew(eqx):
    class Model(eqx.Module):
        x: int = 1

        def __init__(self, x=None):
            if x is not None:
                self.x = x

    return Model().x, Model(5).x


@program
def init_with_arbitrary_arguments(eqx):
    class Model(eqx.Module):
        args: tuple
        kwargs: dict

        def __init__(self, *args, **kwargs):
            self.args = args
            self.kwargs = kwargs

    return vars(Model(1, 2, a=3)), str(inspect.signature(Model))


@program
def init_that_returns_something(eqx):
    class Model(eqx.Module):
        def __init__(self):
            return 3

    return type(Model()).__name__


@program
def init_that_raises(eqx):
    class Model(eqx.Module):
        def __init__(self):
            raise KeyError("x")

    return Model()


@program
def init_through_setattr(eqx):
    class Model(eqx.Module):
        x: int
        y: int

        def __init__(self):
            for name in ("x", "y"):
                setattr(self, name, len(name))

    return vars(Model())


@program
def init_through_object_setattr(eqx):
    class Model(eqx.Module):
        x: int

        def __init__(self):
            object.__setattr__(self, "x", 1)

    return vars(Model())


@program
def init_calls_a_method_that_assigns(eqx):
    class Model(eqx.Module):
        x: int

        def __init__(self):
            self.setup()

        def setup(self):
            self.x = 4

    return Model().x


@program
def init_calls_a_function_that_assigns(eqx):
    def setup(module):
        module.x = 4

    class Model(eqx.Module):
        x: int

        def __init__(self):
            setup(self)

    return Model().x


@program
def new_with_arguments(eqx):
    class Model(eqx.Module):
        x: int

        def __new__(cls, x):
            return super().__new__(cls)

    return Model(3).x


@program(differs="as for any class, `__new__` may return something else")
def new_that_returns_another_class(eqx):
    class Model(eqx.Module):
        def __new__(cls):
            return 3

    return Model()


@program
def monkeypatched_init_with_wraps(eqx):
    class Model(eqx.Module):
        x: float = eqx.field(converter=float)
        y: int = 2

    original = Model.__init__

    @functools.wraps(original)
    def checked(self, *args, **kwargs):
        original(self, *args, **kwargs)

    Model.__init__ = checked

    class Sub(Model):
        z: int = 3

    return vars(Model(1)), vars(Sub(1, 2, 4)), str(inspect.signature(Model))


@program
def monkeypatched_custom_init_is_inherited(eqx):
    class Model(eqx.Module):
        x: int

        def __init__(self, x):
            self.x = x

    original = Model.__init__

    def checked(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.x = self.x + 1

    Model.__init__ = checked

    class Sub(Model):
        pass

    return Model(1).x, Sub(1).x


@program
def cooperative_inheritance_with_a_plain_class(eqx):
    class Plain:
        def __init__(self, name, **kwargs):
            super().__init__(**kwargs)
            self.name = name

    class Model(Plain, eqx.Module):
        x: int
        name: str

        def __init__(self, x, name):
            super().__init__(name)
            self.x = x

    return vars(Model(1, "a"))


@program
def init_of_a_plain_class_behind_module_is_not_reached(eqx):
    class Plain:
        def __init__(self, name, **kwargs):
            super().__init__(**kwargs)
            self.name = name

    class Model(eqx.Module, Plain):
        x: int
        name: str

        def __init__(self, x, name):
            super().__init__(name)
            self.x = x

    return vars(Model(1, "a"))


@program(differs="a default that no `__init__` assigned is a field, and so a leaf")
def a_default_that_an_inherited_init_does_not_assign(eqx):
    class Base(eqx.Module):
        x: int

        def __init__(self, x):
            self.x = x

    class Middle(Base):
        y: int = 5

    class Model(Middle):
        z: int = 6

    return jtu.tree_leaves(Model(1))


@program
def generated_init_below_an_inherited_custom_one(eqx):
    class Base(eqx.Module):
        x: int

        def __init__(self, size):
            self.x = size

    class Model(Base):
        y: int

    return Model(1)


@program
def custom_init_of_the_second_base(eqx):
    class Left(eqx.Module):
        x: int = 3

    class Right(eqx.Module):
        y: int

        def __init__(self):
            self.y = 4

    class Model(Left, Right):
        pass

    return vars(Model())
