"""The rules of `strict=True`: classes that satisfy them and classes that break them."""

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
BOTH = "{} has an `__init__` .* {} .* 'size'"
FIELD = {"__annotations__": {"size": int}}
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
        BOTH.format("Model", "\\w+Field"),
    ),
    (lambda: make(AbstractWithInit, **FIELD), BOTH.format("AbstractWithInit", "Model")),
    (lambda: make(AbstractByWord, __call__=lambda self: 2), r"Model\.__call__ overrides a method"),
    (lambda: make(Scale), r"Model subclasses Scale, .* is final\. Move shared code"),
    (lambda: StrictConfig(allow_all=True), "'allow_all'; it takes allow_abstract_name, allow_meth"),
]


@pytest.mark.parametrize(("define", "message"), BROKEN)
def test_class_that_breaks_a_rule_is_an_error(define, message):
    with pytest.raises(TypeError, match=message):
        define()


def test_strict_classes_behave_like_others():
    assert (Scale(2).twice(3), Scale(2).width, Initialises().width) == (12, 2, 3)
    assert make(AbstractWithField, __annotations__={"other": int}, other=2)(1).size == 1
    assert isinstance(make(AbstractByWord)(), AbstractByWord)
    assert make(Module, type("Mixin", (), {"mixed": lambda self: "mixin"}))().mixed() == "mixin"
    private = type(Module)("_AbstractModel", (Module,), SIZE, strict=True)
    assert private.__abstractvars__ == {"size"}
    Model = make(AbstractByWord, __len__=lambda self: 2, __repr__=lambda self: "Model")
    assert (len(Model()), repr(Model())) == (2, "Model")


def test_rules_may_be_relaxed_and_hold_only_for_strict_classes():
    named = make(Module, name="AbstractModel", strict=StrictConfig(allow_abstract_name=True))
    assert named() == named()
    overriding = StrictConfig(allow_method_override=True)
    loose = make(Scale, strict=False, name="AbstractSub", twice=lambda self, x: x)
    once = make(AbstractLayer, strict=overriding, twice=lambda self, x: "once")
    assert (once().twice(3), loose(2).twice(3)) == ("once", 3)
    assert StrictConfig(force_abstract=True) == StrictConfig(force_abstact=True)
    assert StrictConfig(force_abstract=True) == StrictConfig(True) != StrictConfig()
