"""Converters: when they run, and what they say of the arguments."""

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from tests.module.programs.functions import double
from tests.module.programs.registry import program


@program
def converter_on_argument_default_and_factory(eqx):
    class Model(eqx.Module):
        x: int = eqx.field(converter=double)
        y: int = eqx.field(converter=double, default=10)
        z: Any = eqx.field(converter=tuple, default_factory=lambda: [1])

    return vars(Model(1))


@program
def converter_of_a_base_runs_once_through_super(eqx):
    class Base(eqx.Module):
        x: int = eqx.field(converter=double)

        def __init__(self, x):
            self.x = x

    class Model(Base):
        y: int = eqx.field(converter=double)

        def __init__(self):
            super().__init__(1)
            self.y = self.x

    return vars(Model())


@program
def converter_of_a_redeclared_field(eqx):
    class Base(eqx.Module):
        x: Any = eqx.field(converter=double)

    class Model(Base):
        x: Any

    class Other(Base):
        x: Any = eqx.field(converter=str)

    return Model(1).x, Other(1).x


@program
def converter_and_post_init_that_reads(eqx):
    seen = []

    class Model(eqx.Module):
        x: Any = eqx.field(converter=str)

        def __post_init__(self):
            seen.append(self.x)

    return Model(1).x, seen


@program
def converter_to_an_array(eqx):
    class Model(eqx.Module):
        x: jax.Array = eqx.field(converter=jnp.asarray)

    return type(Model(1.0).x) is type(jnp.ones(())), Model([1, 2]).x.tolist()


@program
def converter_in_an_annotation_of_the_class_signature(eqx):
    class Model(eqx.Module):
        x: str = eqx.field(converter=double)
        y: str = eqx.field(converter=lambda value: value)
        z: str = eqx.field(converter=float)

    return str(inspect.signature(Model))


@program
def converter_in_the_annotations_of_init(eqx):
    class Model(eqx.Module):
        x: str = eqx.field(converter=double)
        y: str

    return {name: str(each) for name, each in Model.__init__.__annotations__.items()}


@program
def converter_that_raises(eqx):
    class Model(eqx.Module):
        x: int = eqx.field(converter=int)

    return Model("a")


@program
def converter_is_a_class_with_a_signature(eqx):
    class Part:
        def __init__(self, size: int):
            self.size = size

    class Model(eqx.Module):
        part: Part = eqx.field(converter=Part)

    return Model(3).part.size, str(inspect.signature(Model))


@program
def converter_runs_in_replace(eqx):
    class Model(eqx.Module):
        x: int = eqx.field(converter=double)

    return dataclasses.replace(Model(1), x=10).x


@program
def converter_on_a_static_field(eqx):
    class Model(eqx.Module):
        x: Any = eqx.field(converter=tuple, static=True)

    return Model([1, 2]).x, jtu.tree_leaves(Model([1, 2]))


@program
def converter_said_in_plain_metadata(eqx):
    class Model(eqx.Module):
        x: Any = dataclasses.field(metadata={"converter": double})

    return Model(1).x


@program
def metadata_beside_static_and_converter(eqx):
    class Model(eqx.Module):
        x: Any = eqx.field(static=True, converter=double, metadata={"unit": "m"})

    return sorted(dataclasses.fields(Model)[0].metadata)


@program
def metadata_with_the_name_of_the_converter(eqx):
    return eqx.field(converter=int, metadata={"converter": int})


@program
def static_field_alias_with_a_converter(eqx):
    class Model(eqx.Module):
        x: Any = eqx.static_field(converter=str)

    return Model(1).x
