"""Options of fields: static, converters, metadata; and an explicit `@dataclass`."""

import dataclasses
import inspect
from typing import Any

import jax.tree_util as jtu

from tests.beside_equinox import error_of
from tests.module.programs.registry import double, program


@program
def static_field_is_no_leaf_and_part_of_the_structure(eqx):
    class Base(eqx.Module):
        x: Any
        name: Any = eqx.field(static=True)
        plain: Any = dataclasses.field(default=0, metadata={"static": True})
        no: Any = eqx.field(static=False, default=2)

    class Model(Base):
        name: Any

    part, other = Base(1, "a"), Base(1, "b")
    return (
        [jtu.tree_leaves(each) for each in (part, Base(None, part), Model(1, "a"))],
        jtu.tree_structure(part) == jtu.tree_structure(other),
        [dict(each.metadata) for each in dataclasses.fields(Base)],
    )


@program
def options_of_a_field(eqx):
    refused = [
        {"static": True, "metadata": {"static": True}},
        {"metadata": {"static": True}},
        {"converter": int, "metadata": {"converter": int}},
        {"metadata": {"converter": int}},
        {"default": 1, "default_factory": list},
        {"statik": True},
    ]
    metadata = eqx.field(static=True, converter=double, metadata={"unit": "m"}).metadata
    errors = [error_of(eqx.field, **options) for options in refused]
    return dict(metadata), errors, error_of(eqx.field, 1)


@program(differs="`dataclasses.field` takes `metadata=None`")
def metadata_of_none(eqx):
    return dict(eqx.field(metadata=None).metadata)


@program
def static_field_alias(eqx):
    class Model(eqx.Module):
        x: Any = eqx.static_field()
        y: Any = eqx.static_field(default=3, metadata={"a": 1})
        z: Any = eqx.static_field(default=4, converter=str)

    return (
        (jtu.tree_leaves(Model(1)), vars(Model(1))),
        [dict(each.metadata).get("a") for each in dataclasses.fields(Model)],
        error_of(eqx.static_field, metadata={"static": True}),
        error_of(eqx.static_field, static=False),
    )


@program
def plain_dataclass_as_a_base(eqx):
    @dataclasses.dataclass
    class Plain:
        x: int

    class Model(Plain, eqx.Module):
        y: int = 2

    return error_of(Model, 1, 2), Model(1).x, Model(1).y


@program
def names_that_could_clash(eqx):
    names = ["cls", "args", "kwargs", "new", "children", "fields", "statics", "key0", "complete"]
    names += ["incomplete_type", "stored_fields", "flatten_by_name", "len", "σ", "self"]

    class Mangled(eqx.Module):
        __x: int

        def read(self):
            return self.__x

    Model = type(eqx.Module)("Model", (eqx.Module,), {"__annotations__": dict.fromkeys(names, int)})
    model, secret = jtu.tree_map(lambda leaf: leaf + 1, (Model(*range(len(names))), Mangled(1)))
    return vars(model), vars(secret), secret.read()


# --- converters ---------------------------------------------------------------------------------


@program
def converters_run_once(eqx):
    seen = []

    class Base(eqx.Module):
        x: Any = eqx.field(converter=double)
        y: Any = eqx.field(converter=double, default=10)
        z: Any = eqx.field(converter=tuple, default_factory=lambda: [1], static=True)
        w: Any = eqx.field(converter=str, init=False)
        plain: Any = dataclasses.field(default=3, metadata={"converter": double})

        def __post_init__(self):
            seen.append(self.x)
            self.w = 3

    class ThroughSuper(Base):
        v: Any = eqx.field(converter=double)

        def __init__(self):
            super().__init__(1)
            self.v = self.x

    class Redeclared(Base):
        x: Any
        y: Any = eqx.field(converter=str, default=5)

    model = Base(1)
    models = (
        model,
        ThroughSuper(),
        Redeclared(1),
        dataclasses.replace(jtu.tree_map(str, model), x=3),
    )
    return [vars(each) for each in models], seen


@program
def converters_in_the_signature(eqx):
    class Model(eqx.Module):
        x: str = eqx.field(converter=double)
        y: str = eqx.field(converter=lambda value: value)
        z: str = eqx.field(converter=float)
        nothing: str = eqx.field(converter=dict)
        hidden: str = eqx.field(converter=double, init=False)
        plain: str

    annotations = Model.__init__.__annotations__
    return str(inspect.signature(Model)), {name: str(each) for name, each in annotations.items()}


# --- an explicit @dataclass, or no class statement ----------------------------------------------


@program(differs="a static field stays one for subclasses too")
def explicit_dataclass_with_a_static_field_above_a_subclass(eqx):
    @dataclasses.dataclass
    class Base(eqx.Module):
        name: str = eqx.field(static=True)

    class Model(Base):
        x: int

    return jtu.tree_leaves(Model("a", 1))
