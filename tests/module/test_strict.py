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


class AbstractByWord(Module, strict=StrictConfig(force_abstact=True)):
    def __call__(self):
        return 1

    def __len__(self):
        return 1


def make(*bases, strict=True, name="Model", **body):
    body = {"size": 1, "apply": lambda self, x: x, **body}
    return type(Module)(name, bases, body, strict=strict)


def test_a_class_that_keeps_the_rules_is_as_any_other():
    assert (Scale(2).twice(3), Scale(2).width) == (12, 2)


# --- a class is abstract or final, and called so ------------------------------------------------


def test_a_class_that_is_not_abstract_is_final():
    with pytest.raises(TypeError, match=r"Sub subclasses Scale, .* is final\. Move what both"):

        class Sub(Scale, strict=True):
            pass


def test_a_class_that_is_not_strict_is_held_to_nothing():
    class AbstractSub(Scale, strict=False):
        def twice(self, x):
            return x

    assert AbstractSub(2).twice(3) == 3


def test_a_strict_class_does_not_inherit_from_one_that_is_not():
    class AbstractLoose(Module):
        size: AbstractVar[int]

    with pytest.raises(TypeError, match=r"Model is strict and subclasses AbstractLoose, which is"):
        make(AbstractLoose)


def test_a_strict_class_may_inherit_from_what_is_no_module():
    class Mixin:
        def name(self):
            return "mixin"

    assert make(Module, Mixin)().name() == "mixin"


def test_a_class_may_be_declared_abstract_with_nothing_abstract_in_it():
    class Model(AbstractByWord, strict=True):
        pass

    assert isinstance(Model(), AbstractByWord)
    with pytest.raises(TypeError, match=r"AbstractByWord: .*`StrictConfig\(force_abstact=True\)`"):
        AbstractByWord()


def test_both_spellings_declare_a_class_abstract():
    assert StrictConfig(force_abstract=True) == StrictConfig(force_abstact=True)
    assert StrictConfig(force_abstract=True) == StrictConfig(True) != StrictConfig()


def test_an_abstract_class_is_called_abstract():
    with pytest.raises(TypeError, match=r"Model is a strict class and abstract, for size, so .*"):

        class Model(Module, strict=True):
            size: AbstractVar[int]


def test_an_abstract_class_may_be_private():
    class _AbstractModel(Module, strict=True):
        size: AbstractVar[int]

    assert _AbstractModel.__abstractvars__ == {"size"}


def test_a_final_class_is_not_called_abstract_unless_that_is_allowed():
    with pytest.raises(TypeError, match=r"AbstractModel is a strict class and has nothing abst"):
        make(Module, name="AbstractModel")
    Allowed = make(Module, name="AbstractModel", strict=StrictConfig(allow_abstract_name=True))
    assert Allowed() == Allowed()


# --- overriding ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        {"twice": lambda self, x: x},
        {"width": property(lambda self: 0)},
        {"twice": 1, "__annotations__": {"twice": Any}},
        {"__annotations__": {"twice": Any}},
    ],
    ids=["method", "property", "field", "field without default"],
)
def test_what_is_not_abstract_is_not_overridden(body):
    with pytest.raises(TypeError, match=r"Model\.(twice|width) overrides a method of AbstractL"):
        make(AbstractLayer, **body)


def test_call_is_a_method_like_others_and_special_methods_may_be_overridden():
    with pytest.raises(TypeError, match=r"Model\.__call__ overrides a method of AbstractByWord"):
        make(AbstractByWord, __call__=lambda self: 2)
    Model = make(AbstractByWord, __len__=lambda self: 2, __repr__=lambda self: "Model")
    assert (len(Model()), repr(Model())) == (2, "Model")


def test_a_method_that_init_subclass_adds_may_not_override_one_either():
    class AbstractAdding(AbstractLayer, strict=True):
        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            cls.twice = lambda self, x: x

    with pytest.raises(TypeError, match=r"Model\.twice overrides a method of AbstractLayer"):
        make(AbstractAdding)


def test_a_class_may_be_allowed_to_override():
    strict = StrictConfig(allow_method_override=True)
    assert make(AbstractLayer, strict=strict, twice=lambda self, x: "once")().twice(3) == "once"


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


def test_an_unknown_option_is_an_error_that_lists_the_known_ones():
    with pytest.raises(TypeError, match=r"'allow_all'; it takes allow_abstract_name, allow_method"):
        StrictConfig(allow_all=True)
