"""The rules of `strict=True`: one class that keeps each, and one that breaks it."""

import abc
from typing import Any

import pytest

from eqxlike import AbstractVar, Module, StrictConfig


class AbstractLayer(Module, strict=True):
    size: AbstractVar[int]

    @abc.abstractmethod
    def apply(self, x): ...

    def twice(self, x):
        return self.apply(self.apply(x))

    @property
    def width(self):
        return self.size


class Scale(AbstractLayer, strict=True):
    size: int

    def apply(self, x):
        return self.size * x


def test_a_class_that_keeps_the_rules_is_as_any_other():
    assert (Scale(2).twice(3), Scale(2).width) == (12, 2)


# --- a class is abstract or final ---------------------------------------------------------------


def test_a_class_that_is_not_abstract_is_final():
    with pytest.raises(TypeError, match=r"Sub subclasses Scale, .* is final\. Move what both"):

        class Sub(Scale, strict=True):
            pass


def test_a_class_that_is_not_strict_may_subclass_a_final_one():
    class Sub(Scale):
        pass

    assert Sub(2).twice(3) == 12


def test_a_strict_class_does_not_inherit_from_one_that_is_not():
    class AbstractLoose(Module):
        size: AbstractVar[int]

    with pytest.raises(TypeError, match=r"Model is strict and subclasses AbstractLoose, which is"):

        class Model(AbstractLoose, strict=True):
            size: int


def test_a_strict_class_may_inherit_from_what_is_no_module():
    class Mixin:
        def name(self):
            return "mixin"

    class Model(Module, Mixin, strict=True):
        pass

    assert Model().name() == "mixin"


def test_a_class_may_be_declared_abstract_with_nothing_abstract_in_it():
    class AbstractModel(Module, strict=StrictConfig(force_abstact=True)):
        pass

    class Model(AbstractModel, strict=True):
        pass

    assert isinstance(Model(), AbstractModel)
    with pytest.raises(TypeError, match=r"AbstractModel: .*`StrictConfig\(force_abstact=True\)`"):
        AbstractModel()


@pytest.mark.parametrize("config", [{"force_abstract": True}, {"force_abstact": True}])
def test_both_spellings_declare_a_class_abstract(config):
    assert StrictConfig(**config) == StrictConfig(True)


# --- names --------------------------------------------------------------------------------------


def test_an_abstract_class_is_called_abstract():
    with pytest.raises(TypeError, match=r"Model is a strict class and abstract, for size, so .*"):

        class Model(Module, strict=True):
            size: AbstractVar[int]


def test_an_abstract_class_may_be_private():
    class _AbstractModel(Module, strict=True):
        size: AbstractVar[int]

    assert _AbstractModel.__abstractvars__ == {"size"}


def test_a_final_class_is_not_called_abstract():
    with pytest.raises(TypeError, match=r"AbstractModel is a strict class and has nothing abst"):

        class AbstractModel(Module, strict=True):
            pass


def test_a_final_class_may_be_allowed_to_be_called_abstract():
    class AbstractExpressionism(Module, strict=StrictConfig(allow_abstract_name=True)):
        pass

    assert AbstractExpressionism() == AbstractExpressionism()


# --- overriding ---------------------------------------------------------------------------------

MEMBERS = {
    "twice": lambda self, x: x,
    "width": property(lambda self: 0),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_a_method_that_is_not_abstract_is_not_overridden(name):
    body = {"apply": lambda self, x: x, "size": 1, name: MEMBERS[name]}
    with pytest.raises(TypeError, match=rf"Model\.{name} overrides a method of AbstractLayer"):
        type(Module)("Model", (AbstractLayer,), body, strict=True)


def test_a_method_is_not_overridden_by_a_field():
    with pytest.raises(TypeError, match=r"Model\.twice overrides a method of AbstractLayer"):

        class Model(AbstractLayer, strict=True):
            size: int
            twice: Any

            def apply(self, x):
                return x


def test_call_is_a_method_like_others():
    class AbstractModel(Module, strict=StrictConfig(force_abstact=True)):
        def __call__(self):
            return 1

    with pytest.raises(TypeError, match=r"Model\.__call__ overrides a method of AbstractModel"):

        class Model(AbstractModel, strict=True):
            def __call__(self):
                return 2


def test_other_special_methods_may_be_overridden():
    class AbstractModel(Module, strict=StrictConfig(force_abstact=True)):
        def __len__(self):
            return 1

    class Model(AbstractModel, strict=True):
        def __len__(self):
            return 2

        def __repr__(self):
            return "Model"

    assert (len(Model()), repr(Model())) == (2, "Model")


def test_a_method_that_init_subclass_adds_may_not_override_one_either():
    class AbstractAdding(AbstractLayer, strict=True):
        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            cls.twice = lambda self, x: x

    with pytest.raises(TypeError, match=r"Model\.twice overrides a method of AbstractLayer"):

        class Model(AbstractAdding, strict=True):
            size: int

            def apply(self, x):
                return x


def test_a_class_may_be_allowed_to_override():
    class Model(AbstractLayer, strict=StrictConfig(allow_method_override=True)):
        size: int

        def apply(self, x):
            return x

        def twice(self, x):
            return "once"

    assert Model(1).twice(3) == "once"


# --- fields and __init__ ------------------------------------------------------------------------


class AbstractWithField(Module, strict=True):
    size: int

    @abc.abstractmethod
    def apply(self): ...


def test_fields_of_an_abstract_class_go_with_a_generated_init():
    class Model(AbstractWithField, strict=True):
        other: int

        def apply(self):
            return self.size + self.other

    assert Model(1, 2).apply() == 3


def test_a_field_of_an_abstract_class_does_not_go_with_an_init_below():
    with pytest.raises(TypeError, match=r"Model has an `__init__` .* AbstractWithField .* 'size'"):

        class Model(AbstractWithField, strict=True):
            def __init__(self):
                self.size = 1

            def apply(self):
                return self.size


def test_a_field_does_not_go_with_an_init_above():
    class AbstractModel(Module, strict=StrictConfig(force_abstact=True)):
        def __init__(self):
            pass

    with pytest.raises(TypeError, match=r"AbstractModel has an `__init__` .* Model .* 'size'"):

        class Model(AbstractModel, strict=True):
            size: int


def test_all_fields_beside_an_init_may_stand_in_a_final_class():
    class Model(AbstractLayer, strict=True):
        size: int

        def __init__(self):
            self.size = 3

        def apply(self, x):
            return x

    assert Model().width == 3


# --- options ------------------------------------------------------------------------------------


def test_an_unknown_option_is_an_error_that_lists_the_known_ones():
    with pytest.raises(TypeError, match=r"'allow_all'; it takes allow_abstract_name, allow_method"):
        StrictConfig(allow_all=True)


def test_a_class_that_is_not_strict_is_held_to_nothing():
    class Model(Module):
        size: int

        def method(self):
            return 1

    class AbstractSub(Model, strict=False):
        def method(self):
            return 2

    assert AbstractSub(1).method() == 2
