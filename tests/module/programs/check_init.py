"""`__check_init__` at each level of the hierarchy."""

import dataclasses

from tests.module.programs.registry import program


@program
def check_init_of_every_class_in_the_hierarchy(eqx):
    called = []

    class Top(eqx.Module):
        def __check_init__(self):
            called.append("top")

    class Left(Top):
        def __check_init__(self):
            called.append("left")

    class Right(Top):
        def __check_init__(self):
            called.append("right")

    class Model(Left, Right):
        def __check_init__(self):
            called.append("model")

    Model()
    return called


@program
def check_init_refuses(eqx):
    class Model(eqx.Module):
        x: int

        def __check_init__(self):
            if self.x < 0:
                raise ValueError("negative")

    return Model(-1)


@program
def check_init_of_a_base_refuses_the_custom_init_of_a_subclass(eqx):
    class Base(eqx.Module):
        x: int

        def __check_init__(self):
            if self.x < 0:
                raise RuntimeError("negative")

    class Model(Base):
        def __init__(self):
            self.x = -1

    return Model()


@program
def check_init_that_assigns(eqx):
    class Model(eqx.Module):
        x: int

        def __check_init__(self):
            self.x = 1

    return Model(0)


@program
def check_init_of_a_mixin_that_is_no_module(eqx):
    called = []

    class Mixin:
        def __check_init__(self):
            called.append(type(self).__name__)

    class Model(eqx.Module, Mixin):
        x: int

    Model(1)
    return called


@program
def check_init_runs_in_replace(eqx):
    called = []

    class Model(eqx.Module):
        x: int

        def __check_init__(self):
            called.append(self.x)

    dataclasses.replace(Model(1), x=2)
    return called
