"""`strict=` in a class statement."""

import abc
from typing import Any

import jax.tree_util as jtu

from tests.module.programs.functions import tried
from tests.module.programs.registry import program


@program
def abstract_by_a_word(eqx):
    class AbstractModel(eqx.Module, strict=eqx.StrictConfig(force_abstact=True)):
        x: int

    class Model(AbstractModel):
        pass

    return tried(AbstractModel, (1,)), tried(Model, (1,))


@program
def strict_classes_that_keep_the_rules(eqx):
    class AbstractModel(eqx.Module, strict=True):
        x: eqx.AbstractVar[int]

        @abc.abstractmethod
        def method(self): ...

        def shared(self):
            return self.method() + 1

    class Model(AbstractModel, strict=True):
        x: int
        y: Any

        def __init__(self, x):
            self.x = x
            self.y = None

        def method(self):
            return self.x

    return Model(1).shared(), jtu.tree_leaves(Model(1))


@program
def strict_said_not_to_be(eqx):
    class Model(eqx.Module, strict=False):
        x: int

    class Sub(Model, strict=eqx.StrictConfig() and False):
        pass

    return tried(Sub, (1,))


@program
def strict_is_not_passed_to_init_subclass(eqx):
    seen = []

    class AbstractBase(eqx.Module, strict=eqx.StrictConfig(force_abstact=True)):
        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            seen.append(kwargs)

    class Model(AbstractBase, strict=True):
        pass

    return seen, tried(Model, ())


@program(
    differs="`strict=True` holds a class to the rules; Equinox takes the word and checks nothing"
)
def strict_class_below_one_that_is_final(eqx):
    class Model(eqx.Module, strict=True):
        x: int

    class Sub(Model, strict=True):
        pass

    return tried(Sub, (1,))


@program(differs="an option of `StrictConfig` that is not known is refused, not passed over")
def strict_option_that_is_not_known(eqx):
    return eqx.StrictConfig(forbid_everything=True) is None
