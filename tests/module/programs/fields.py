"""What may be said of a field: static, converters, metadata, defaults."""

import dataclasses
import typing
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from tests.module.programs.functions import double
from tests.module.programs.registry import program


@program
def static_field_is_no_leaf_and_part_of_the_structure(eqx):
    class Model(eqx.Module):
        x: Any
        name: str = eqx.field(static=True)

    one, other = (jtu.tree_structure(Model(1, name)) for name in "ab")
    return jtu.tree_leaves(Model(1, "a")), one == other


@program
def static_field_of_a_base_redeclared(eqx):
    class Base(eqx.Module):
        x: Any = eqx.field(static=True)

    class Model(Base):
        x: Any

    return jtu.tree_leaves(Model(1))


@program
def static_said_in_plain_metadata(eqx):
    class Model(eqx.Module):
        x: Any = dataclasses.field(metadata={"static": True})

    return jtu.tree_leaves(Model(1))


@program
def static_false_in_metadata(eqx):
    class Model(eqx.Module):
        x: Any = eqx.field(static=False)

    return jtu.tree_leaves(Model(1)), dict(dataclasses.fields(Model)[0].metadata)


@program
def metadata_with_a_reserved_name(eqx):
    return eqx.field(static=True, metadata={"static": True})


@program
def metadata_with_a_reserved_name_that_is_not_asked_for(eqx):
    return eqx.field(metadata={"static": True})


@program(differs="`dataclasses.field` takes `metadata=None`")
def metadata_of_none(eqx):
    return dict(eqx.field(metadata=None).metadata)


@program
def repr_and_compare_options(eqx):
    class Model(eqx.Module):
        x: int
        y: int = eqx.field(repr=False)
        z: int = eqx.field(compare=False)
        w: int = eqx.field(hash=False)

    return "y=" in repr(Model(1, 2, 3, 4)), Model(1, 2, 3, 4) == Model(1, 2, 9, 4)


@program
def default_and_factory_together(eqx):
    return eqx.field(default=1, default_factory=list)


@program
def unknown_option(eqx):
    return eqx.field(statik=True)


@program
def positional_option(eqx):
    return eqx.field(1)


@program
def static_field_alias(eqx):
    class Model(eqx.Module):
        x: Any = eqx.static_field()
        y: Any = eqx.static_field(default=3)

    return jtu.tree_leaves(Model(1)), vars(Model(1))


@program
def static_field_alias_with_metadata(eqx):
    return dict(eqx.static_field(metadata={"a": 1}).metadata)


@program
def static_field_alias_with_reserved_metadata(eqx):
    return eqx.static_field(metadata={"static": True})


@program
def static_field_alias_told_not_to_be_static(eqx):
    return eqx.static_field(static=False)


@program
def fields_of_class_and_instance(eqx):
    class Model(eqx.Module):
        x: int
        y: typing.ClassVar[int] = 1
        z: "str" = "z"

    return [[(f.name, f.type) for f in dataclasses.fields(m)] for m in (Model, Model(1))]


@program
def string_annotation_of_a_class_variable(eqx):
    class Model(eqx.Module):
        x: "typing.ClassVar[int]" = 1
        y: "int" = 2

    return vars(Model())


@program
def annotation_alone_in_a_mixin_that_is_no_module(eqx):
    class Mixin:
        x: int

    class Model(Mixin, eqx.Module):
        y: int

    return [each.name for each in dataclasses.fields(Model)]


@program
def dataclass_as_a_base(eqx):
    @dataclasses.dataclass(frozen=True)
    class Plain:
        x: int

    class Model(Plain, eqx.Module):
        y: int

    return jtu.tree_leaves(Model(1, 2))


@program
def mutable_dataclass_as_a_base(eqx):
    @dataclasses.dataclass
    class Plain:
        x: int

    class Model(Plain, eqx.Module):
        y: int

    return jtu.tree_leaves(Model(1, 2))


@program
def field_named_like_a_keyword_of_init(eqx):
    class Model(eqx.Module):
        cls: int
        args: int
        kwargs: int
        name: int

    return vars(Model(1, 2, 3, 4))


@program
def field_named_self(eqx):
    class Model(eqx.Module):
        self: int

    return vars(Model(1)), jtu.tree_leaves(Model(1))


@program
def field_with_a_mangled_name(eqx):
    class Model(eqx.Module):
        __x: int

    return vars(Model(1))


@program
def default_of_a_class_that_is_unhashable_but_no_container(eqx):
    class Part:
        __hash__ = None  # pyright: ignore

    class Model(eqx.Module):
        x: Any = Part()

    return Model


@program
def module_with_arrays_as_a_default(eqx):
    class Part(eqx.Module):
        x: jax.Array

    class Model(eqx.Module):
        part: Part = Part(jnp.ones(2))

    return len(jtu.tree_leaves(Model()))


@program
def function_as_a_default(eqx):
    class Model(eqx.Module):
        activation: typing.Callable = jax.nn.relu
        other: typing.Callable = double
        third: typing.Callable = lambda x: x + 1

    model = Model()
    return model.activation is jax.nn.relu, model.other(3), model.third(3)


@program
def function_as_a_default_in_a_field(eqx):
    class Model(eqx.Module):
        other: typing.Callable = eqx.field(default=double)
        third: typing.Callable = eqx.field(default=lambda x: x + 1, static=True)

    return (
        Model().other(3),
        Model().third(3),
        Model(other=str).other(3),
        len(jtu.tree_leaves(Model())),
    )


@program
def a_function_field_is_not_bound(eqx):
    class Model(eqx.Module):
        function: typing.Callable

    return Model(double).function(2)
