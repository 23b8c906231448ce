"""Class decorators that replace the functions in the body of a class."""

import abc
import functools
import inspect
import pickle
import sys
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from beartype import beartype
from jaxtyping import Array, Float, jaxtyped

from tests.module.programs.registry import program


def outputs_of(*functions):
    """The output of each function, or the name of its error."""
    found = []
    for function in functions:
        try:
            found.append(function())
        except Exception as error:
            found.append(type(error).__name__)
    return found


def make(eqx):
    class Model(eqx.Module):
        weight: Any

        def method(self, x: bool) -> object:
            return x

        def wrong(self) -> int:
            return "a"  # pyright: ignore

        def __call__(self, x: bool):
            return x

        @classmethod
        def of_class(cls, x: bool):
            return x

        @staticmethod
        def static(x: bool):
            return x

        @property
        def name(self) -> bool:
            return "a"  # pyright: ignore

        @eqx.filter_jit
        def compiled(self, x: bool):
            return x

    return Model


def calls(Model):
    model = Model(1)
    functions = (model.method, model, Model.of_class, model.static, model.compiled)
    checked = [outputs_of(lambda: each(True), lambda: each("a")) for each in functions]  # noqa: B023
    return checked, outputs_of(model.wrong, lambda: model.name, lambda: Model.method(model, "a"))


def tag_functions(found):
    """A decorator that replaces the functions in `found(cls)`."""

    def decorate(cls):
        for name, function in found(cls):
            if name in ("method", "__call__") and inspect.isfunction(function):

                def tagged(self, *args, _of=function):
                    return "tagged", _of(self, *args)

                setattr(cls, name, functools.wraps(function)(tagged))
        return cls

    return decorate


def look_at(cls):
    """A decorator that calls the class before it is decorated."""
    cls(1)
    return beartype(cls)


@program
def methods_are_decorated(eqx):
    decorators = [
        beartype,
        jaxtyped(typechecker=beartype),
        lambda cls: beartype(beartype(cls)),
        look_at,
        tag_functions(lambda cls: [*vars(cls).items()]),
        tag_functions(inspect.getmembers),
        tag_functions(lambda cls: [(n, inspect.getattr_static(cls, n)) for n in dir(cls)]),
        lambda cls: type(cls)(cls.__name__, (beartype(cls),), {"__module__": __name__}),
    ]
    return [calls(decorate(make(eqx))) for decorate in decorators]


@program
def function_in_the_body_is_like_a_function(eqx):
    Model = make(eqx)
    kinds = {each.name: each.kind for each in inspect.classify_class_attrs(Model)}
    return [
        (
            (inspect.isfunction(each), each.__name__, each.__qualname__, each.__annotations__),
            (str(inspect.signature(each)), each.__code__.co_argcount, kinds[each.__name__]),
            (hasattr(each, "__wrapped__"), each.__globals__ is globals()),
        )
        for each in (vars(Model)["method"], vars(Model)["__call__"])
    ]


@program
def classes_above_and_below_a_decorated_one(eqx):
    class Below(beartype(make(eqx))):
        def other(self, x: bool):
            return x

    @beartype
    class Decorated(make(eqx)):
        def __call__(self, x: bool):
            return super().__call__(x)

    class Plain:
        def mixed(self, x: bool):
            return x

    class WithMixin(beartype(Plain), eqx.Module):
        pass

    wrong: Any = "a"

    @beartype
    class Abstract(eqx.Module):
        @abc.abstractmethod
        def method(self, x: bool): ...

    class Concrete(Abstract):
        def method(self, x: bool):
            return super().method(x)  # pyright: ignore

    @beartype
    class Typed(eqx.Module, Generic[TypeVar("T")]):
        value: Any = eqx.field(converter=jnp.asarray)
        size: int = eqx.field(static=True, default=1)

        def method(self, x: Float[Array, " n"]):
            return x.shape

    return (
        [calls(Below), calls(Decorated), outputs_of(lambda: Below(1).other(wrong))],
        outputs_of(lambda: WithMixin().mixed(wrong), Abstract, lambda: Concrete().method(wrong)),
        outputs_of(lambda: Typed(1).method(jnp.ones(2)), lambda: Typed(1).method(jnp.ones((2, 2)))),
        outputs_of(lambda: Typed(1, "a"), lambda: Typed(1.0).value.shape),
    )


@program
def decorated_method_is_a_pytree(eqx):
    Model = beartype(make(eqx))
    # `pickle` looks for the class under this name.
    Model.__qualname__ = Model.__name__ = "Decorated"
    vars(sys.modules[__name__])["Decorated"] = Model
    method = Model(2).method
    again = [method, jax.tree.map(lambda leaf: leaf, method), pickle.loads(pickle.dumps(method))]
    return (
        (isinstance(method, eqx.Module), jax.tree.leaves(method), method.__name__),
        str(inspect.signature(method)),
        [(each == method, hash(each) == hash(method), each(True)) for each in again],
        [outputs_of(lambda: each("a"), lambda: eqx.filter_jit(each)("a")) for each in again],  # noqa: B023
    )
