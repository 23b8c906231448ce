"""What may be said of a field: static, converters, metadata; and an explicit `@dataclass`."""

import dataclasses
import functools
import inspect
import typing
from typing import Any

import jax
import jax.numpy as jnp
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
def repr_and_compare_options(eqx):
    class Model(eqx.Module):
        x: int
        y: int = eqx.field(repr=False)
        z: int = eqx.field(compare=False)
        w: int = eqx.field(hash=False)

    return "y=" in repr(Model(1, 2, 3, 4)), Model(1, 2, 3, 4) == Model(1, 2, 9, 4)


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
def annotations_that_are_no_fields(eqx):
    class Mixin:
        mixed: int

    class Model(Mixin, eqx.Module):
        x: int
        y: typing.ClassVar[int] = 1
        z: "str" = "z"
        w: "typing.ClassVar[int]" = 2
        unannotated = 3
        table = jnp.arange(2)

    class Sub(Model):
        v: typing.ClassVar[str] = ""

    return (
        [[(f.name, f.type) for f in dataclasses.fields(m)] for m in (Model, Model(1))],
        (vars(Model(1)), Model(1).unannotated, Model(1).table.tolist(), hasattr(Model, "x")),
        (list(Model.__annotations__), list(Sub.__annotations__)),
        {name: str(hint) for name, hint in typing.get_type_hints(Sub).items()},
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


@program
def functions_in_fields_are_not_bound(eqx):
    class Model(eqx.Module):
        activation: typing.Callable = jax.nn.relu
        other: typing.Callable = eqx.field(default=double)
        third: typing.Callable = eqx.field(default=lambda x: x + 1, static=True)

    model = Model()
    is_same = model.activation is jax.nn.relu
    outputs = model.other(3), model.third(3), Model(other=str).other(3)
    return is_same, outputs, len(jtu.tree_leaves(model))


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
def converter_that_is_no_function(eqx):
    class Part:
        def __init__(self, size: int):
            self.size = size

    class Model(eqx.Module):
        part: Part = eqx.field(converter=Part)
        array: jax.Array = eqx.field(converter=jnp.asarray, default=1.0)
        number: int = eqx.field(converter=int, default=2)

    model = Model(3)
    return model.part.size, type(model.array) is type(jnp.ones(())), error_of(Model, 3, 1.0, "q")


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


@program
def class_made_without_a_class_statement(eqx):
    called = type(eqx.Module)("Model", (eqx.Module,), {"__annotations__": {"x": int}})
    made = dataclasses.make_dataclass("Model", [("x", int)], bases=(eqx.Module,))
    frozen = functools.partial(dataclasses.make_dataclass, frozen=True, bases=(eqx.Module,))
    return vars(called(1)), called.__name__, jtu.tree_leaves(made(1)), error_of(frozen, "M", [])


@program
def explicit_dataclass(eqx):
    called = []

    @dataclasses.dataclass
    class Model(eqx.Module):
        x: Any
        name: str = eqx.field(static=True, default="a")

        def __check_init__(self):
            called.append(self.x)

    model = Model(1)
    return (
        (jtu.tree_leaves(model), model == Model(1), repr(model).endswith("Model(x=1, name='a')")),
        (jtu.tree_leaves(jtu.tree_map(double, model)), called, error_of(setattr, model, "x", 2)),
        error_of(dataclasses.dataclass(frozen=True), Model),
    )


@program
def explicit_dataclass_makes_an_init_where_one_was_inherited(eqx):
    class Base(eqx.Module):
        x: int

        def __init__(self):
            self.x = 1

    @dataclasses.dataclass
    class Model(Base):
        y: int

    class Sub(Model):
        z: int = 3

    return vars(Model(1, 2)), str(inspect.signature(Sub))


@program
def explicit_dataclass_without_equality_or_with_an_order(eqx):
    @dataclasses.dataclass(eq=False, repr=False)
    class Model(eqx.Module):
        x: int

    @dataclasses.dataclass(order=True)
    class Ordered(eqx.Module):
        x: int

    return hash(Model(1)) == hash(Model(1)), Model(1) == Model(1), Ordered(1) < Ordered(2)


@program(differs="the converter of a field goes on to run")
def explicit_dataclass_with_a_converter(eqx):
    @dataclasses.dataclass
    class Model(eqx.Module):
        x: Any = eqx.field(converter=str)  # noqa: RUF009

    return Model(1).x


@program(differs="a static field stays one for subclasses too")
def explicit_dataclass_with_a_static_field_above_a_subclass(eqx):
    @dataclasses.dataclass
    class Base(eqx.Module):
        name: str = eqx.field(static=True)

    class Model(Base):
        x: int

    return jtu.tree_leaves(Model("a", 1))
