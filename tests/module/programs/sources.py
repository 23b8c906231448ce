"""Programs as text: those with an import from `__future__`, or syntax of a newer Python."""

import sys
import types

from tests.module.programs.registry import program


def source(name, text, differs=""):
    """Adds a program that runs `text`, a module in which `eqx` is bound, and reads `output`."""

    def execute(eqx):
        module = types.ModuleType(f"source_{name}_{eqx.__name__}")
        vars(module)["eqx"] = eqx
        sys.modules[module.__name__] = module
        try:
            exec(compile(text, f"<{name}>", "exec", dont_inherit=True), vars(module))
        finally:
            del sys.modules[module.__name__]
        return vars(module)["output"]

    execute.__name__ = name
    program(execute, differs=differs)


source(
    "annotations_that_are_strings",
    """
from __future__ import annotations
import dataclasses, inspect, typing
from dataclasses import KW_ONLY

class Model(eqx.Module):
    x: int
    y: Unknown = eqx.field(static=True)
    z: typing.ClassVar[int] = 3
    seed: dataclasses.InitVar[int] = 4
    w: int = eqx.field(converter=int, default="5")
    _: KW_ONLY
    v: int = 2

names = [each.name for each in dataclasses.fields(Model)]
output = names, vars(Model(1, 2, v=3)), str(inspect.signature(Model))
""",
)

ABSTRACT = """
from __future__ import annotations
import typing

class AbstractModel(eqx.Module):
    x: {marker}[int]

class Model(AbstractModel):
    x: {override}

class AbstractSub(AbstractModel):
    y: int

output = [Model.__abstractvars__ | Model.__abstractclassvars__]
for cls in (AbstractModel, AbstractSub):
    try:
        output.append(cls())
    except TypeError as error:
        output.append("abstract" in str(error))
"""

for marker, override in (
    ("eqx.AbstractVar", "int"),
    ("eqx.AbstractVar", "typing.ClassVar[int] = 3"),
    ("eqx.AbstractClassVar", "typing.ClassVar[int] = 3"),
):
    kind = "class_variable" if "ClassVar" in override else "field"
    source(
        f"{marker.replace('.', '_')}_that_is_a_string_overridden_by_a_{kind}",
        ABSTRACT.format(marker=marker, override=override),
        differs="an annotation that is a string is read; Equinox makes it a field, or refuses it",
    )

# The syntax of Python 3.12.
if sys.version_info >= (3, 12):
    source(
        "type_parameters",
        """
import dataclasses, inspect

class Model[T](eqx.Module):
    x: T
    y: list[T] = eqx.field(default_factory=list)

    def method[S](self, y: S) -> tuple[T, S]:
        return self.x, y

class Sub[T, *Ts](Model[T]):
    z: tuple[*Ts]

class Bounded[P: Model](eqx.Module):
    part: P

class AbstractModel[T](eqx.Module):
    x: eqx.AbstractVar[T]

class Overrides(AbstractModel[int]):
    x: int

type Number = int | float

class Aliased(eqx.Module):
    x: Number = 1

output = (
    Model[int](1).method("a"), type(Model[int](1)) is Model, len(Model.__type_params__),
    Sub[int, str, str](1, [2], ("a", "b")).z, list(inspect.signature(Sub).parameters),
    Bounded(Model(1)).part.x, Overrides(1).x, sorted(AbstractModel.__abstractvars__),
    Aliased().x, dataclasses.fields(Aliased)[0].type is Number,
)
""",
    )
