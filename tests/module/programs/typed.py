"""Classes under jaxtyping's decorator, which checks the arguments of their `__init__`."""

import dataclasses
import functools
import inspect
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, jaxtyped

from tests.module.programs.registry import program


def check(function):
    """As a type checker: arguments against the annotations of arrays."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args, **kwargs):
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            annotation = signature.parameters[name].annotation
            if hasattr(annotation, "dtypes") and not isinstance(value, annotation):
                raise TypeError(f"{name} is not of type {annotation}")
        return function(*args, **kwargs)

    return checked


typed = jaxtyped(typechecker=check)


@program
def typed_class_of_right_arguments(eqx):
    @typed
    class Model(eqx.Module):
        x: Float[Array, " size"]
        y: Float[Array, " size"]

    return [leaf.shape for leaf in jtu.tree_leaves(Model(jnp.ones(2), jnp.ones(2)))]


@program
def typed_class_of_wrong_arguments(eqx):
    @typed
    class Model(eqx.Module):
        x: Float[Array, " size"]
        y: Float[Array, " size"]

    return Model(jnp.ones(2), jnp.ones(3))


@program
def typed_class_takes_what_a_converter_takes(eqx):
    @typed
    class Model(eqx.Module):
        x: Float[Array, ""] = eqx.field(converter=jnp.asarray)

    class Sub(Model):
        y: int

    return Model(2.0).x.shape, Sub(2.0, 3).x.shape


@program
def typed_dataclass(eqx):
    @typed
    @dataclasses.dataclass
    class Model(eqx.Module):
        x: Float[Array, "2"]
        name: str = eqx.field(static=True, default="a")

    return [leaf.shape for leaf in jtu.tree_leaves(Model(jnp.ones(2)))]


@program
def typed_dataclass_of_wrong_arguments(eqx):
    @typed
    @dataclasses.dataclass
    class Model(eqx.Module):
        x: Float[Array, "2"]

    return Model(jnp.ones(3))


@program
def typed_class_with_an_init(eqx):
    @typed
    class Model(eqx.Module):
        x: Float[Array, " size"]

        def __init__(self, x: Float[Array, "2"]):
            self.x = x

    return Model(jnp.ones(2)).x.shape, eqx.filter_jit(Model)(jnp.ones(2)).x.shape


@program
def typed_class_with_an_init_of_wrong_arguments(eqx):
    @typed
    class Model(eqx.Module):
        x: Any

        def __init__(self, x: Float[Array, "2"]):
            self.x = x

    return Model(jnp.ones(3))


@program
def typed_subclass_of_a_typed_class(eqx):
    called = []

    @typed
    class Base(eqx.Module):
        x: Float[Array, " size"]

        def __check_init__(self):
            called.append(type(self).__name__)

    @typed
    class Model(Base):
        y: Float[Array, " size"]

    return Model(jnp.ones(2), jnp.ones(2)).y.shape, called


@program
def typed_method(eqx):
    class Model(eqx.Module):
        x: Any

        @typed
        def method(self, y: Float[Array, "2"]):
            return y.shape

    return Model(1).method(jnp.ones(2)), isinstance(Model(1).method, eqx.Module)


@program
def typed_method_of_wrong_arguments(eqx):
    class Model(eqx.Module):
        @typed
        def __call__(self, y: Float[Array, "2"]):
            return y.shape

    return Model()(jnp.ones(3))
