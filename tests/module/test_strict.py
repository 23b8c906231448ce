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


class AbstractLoose(Module):
    size: AbstractVar[int]


class AbstractAdding(AbstractLayer, strict=True):
    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.twice = lambda self, x: x


class AbstractWithField(Module, strict=True):
    size: int

    @abc.abstractmethod
    def apply(self, x): ...


class AbstractWithInit(Module, strict=StrictConfig(force_abstact=True)):
    def __init__(self):
        pass


class Initialises(AbstractLayer, strict=True):
    size: int

    def __init__(self):
        self.size = 3

    def apply(self, x):
        return x


SIZE = {"__annotations__": {"size": AbstractVar[int]}}
OVERRIDES = r"Model\.(twice|width) overrides a method of AbstractLayer"
BROKEN = [
    (lambda: make(AbstractLoose), "Model is strict and subclasses AbstractLoose, which is"),
    (lambda: type(Module)("Model", (Module,), SIZE, strict=True), "abstract, because of size, so"),
    (lambda: make(Module, name="AbstractModel"), "AbstractModel is a strict class and has nothing"),
    (AbstractByWord, r"AbstractByWord: .*`StrictConfig\(force_abstact=True\)`"),
    (lambda: make(AbstractLayer, twice=lambda self, x: x), OVERRIDES),
    (lambda: make(AbstractLayer, width=property(lambda self: 0)), OVERRIDES),
    (lambda: make(AbstractLayer, twice=1, __annotations__={"twice": Any}), OVERRIDES),
    (lambda: make(AbstractLayer, __annotations__={"twice": Any}), OVERRIDES),
    (lambda: make(AbstractAdding), OVERRIDES),
    (
        lambda: make(AbstractWithField, __init__=lambda self: None),
        "Model has an `__init__` .* AbstractWithField .* 'size'",
    ),
    (
        lambda: make(AbstractWithInit, __annotations__={"size": int}),
        "AbstractWithInit has an `__init__` .* Model .* 'size'",
    ),
    (lambda: StrictConfig(allow_all=True), "'allow_all'; it takes allow_abstract_name, allow_meth"),
]


@pytest.mark.parametrize(("define", "message"), BROKEN)
def test_a_class_that_breaks_a_rule_is_an_error(define, message):
    with pytest.raises(TypeError, match=message):
        define()


def test_classes_that_keep_the_rules_are_as_any_other():
    assert (Scale(2).twice(3), Scale(2).width, Initialises().width) == (12, 2, 3)
    assert make(AbstractWithField, __annotations__={"other": int}, other=2)(1).size == 1
    assert isinstance(make(AbstractByWord)(), AbstractByWord)
    assert make(Module, type("Mixin", (), {"mixed": lambda self: "mixin"}))().mixed() == "mixin"
    private = type(Module)("_AbstractModel", (Module,), SIZE, strict=True)
    assert private.__abstractvars__ == {"size"}
    allowed = make(Module, name="AbstractModel", strict=StrictConfig(allow_abstract_name=True))
    assert allowed() == allowed()


# --- a class is abstract or final, and called so ------------------------------------------------


def test_a_class_that_is_not_abstract_is_final():
    with pytest.raises(TypeError, match=r"Sub subclasses Scale, .* is final\. Move shared code"):
        make(Scale, name="Sub")


def test_a_class_that_is_not_strict_is_held_to_nothing():
    class AbstractSub(Scale, strict=False):
        def twice(self, x):
            return x

    assert AbstractSub(2).twice(3) == 3


def test_both_spellings_declare_a_class_abstract():
    assert StrictConfig(force_abstract=True) == StrictConfig(force_abstact=True)
    assert StrictConfig(force_abstract=True) == StrictConfig(True) != StrictConfig()


# --- overriding ---------------------------------------------------------------------------------


def test_call_is_a_method_like_others_and_special_methods_may_be_overridden():
    with pytest.raises(TypeError, match=r"Model\.__call__ overrides a method of AbstractByWord"):
        make(AbstractByWord, __call__=lambda self: 2)
    Model = make(AbstractByWord, __len__=lambda self: 2, __repr__=lambda self: "Model")
    assert (len(Model()), repr(Model())) == (2, "Model")


def test_a_class_may_be_allowed_to_override():
    strict = StrictConfig(allow_method_override=True)
    assert make(AbstractLayer, strict=strict, twice=lambda self, x: "once")().twice(3) == "once"


# --- fields and __init__ ------------------------------------------------------------------------
