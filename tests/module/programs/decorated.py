"""Classes made by an explicit `@dataclass`, or without a class statement."""

import dataclasses
import inspect
from typing import Any

import jax.tree_util as jtu

from tests.module.programs.registry import program


@program
def class_made_by_calling_the_metaclass(eqx):
    Model = type(eqx.Module)("Model", (eqx.Module,), {"__annotations__": {"x": int}})
    return vars(Model(1)), Model.__name__


@program
def class_made_by_make_dataclass(eqx):
    Model = dataclasses.make_dataclass("Model", [("x", int)], bases=(eqx.Module,), frozen=True)
    return jtu.tree_leaves(Model(1))


@program
def explicit_frozen_dataclass(eqx):
    @dataclasses.dataclass(frozen=True)
    class Model(eqx.Module):
        x: int
        y: int = 2

    return jtu.tree_leaves(Model(1)), jtu.tree_leaves(jtu.tree_map(lambda x: x + 1, Model(1)))


@program
def explicit_mutable_dataclass(eqx):
    @dataclasses.dataclass
    class Model(eqx.Module):
        x: int

    model = Model(1)
    return repr(model).endswith("Model(x=1)"), model == Model(1), jtu.tree_leaves(model)


@program
def explicit_dataclass_keeps_static_fields_static(eqx):
    @dataclasses.dataclass
    class Model(eqx.Module):
        x: Any
        name: str = eqx.field(static=True)

    return jtu.tree_leaves(Model(1, "a"))


@program
def explicit_dataclass_stays_frozen(eqx):
    @dataclasses.dataclass
    class Model(eqx.Module):
        x: int

    model = Model(1)
    model.x = 2
    return model


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
def explicit_dataclass_under_a_subclass(eqx):
    @dataclasses.dataclass
    class Base(eqx.Module):
        x: int

    class Model(Base):
        y: int

    return jtu.tree_leaves(Model(1, 2))


@program
def explicit_dataclass_runs_check_init_once(eqx):
    called = []

    @dataclasses.dataclass
    class Model(eqx.Module):
        x: Any

        def __check_init__(self):
            called.append(self.x)

    Model(1)
    return called


@program
def explicit_dataclass_without_equality(eqx):
    @dataclasses.dataclass(eq=False, repr=False)
    class Model(eqx.Module):
        x: int

    return hash(Model(1)) == hash(Model(1)), Model(1) == Model(1)


@program
def explicit_dataclass_with_an_order(eqx):
    @dataclasses.dataclass(order=True)
    class Model(eqx.Module):
        x: int

    return Model(1) < Model(2), sorted([Model(2), Model(1)])[0].x


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
