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

class Model(eqx.Module):
    x: int
    y: Unknown = eqx.field(static=True)
    z: typing.ClassVar[int] = 3
    seed: dataclasses.InitVar[int] = 4
    w: int = eqx.field(converter=int, default="5")

names = [each.name for each in dataclasses.fields(Model)]
output = names, vars(Model(1, 2)), list(inspect.signature(Model).parameters)
""",
)

source(
    "keyword_only_marker_that_is_a_string",
    """
from __future__ import annotations
import inspect
from dataclasses import KW_ONLY

class Model(eqx.Module):
    x: int
    _: KW_ONLY
    y: int = 2

output = str(inspect.signature(Model)), vars(Model(1, y=3))
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

source(
    "generic_by_brackets_of_a_type_variable",
    """
import typing
T = typing.TypeVar("T")

class Model(eqx.Module, typing.Generic[T]):
    x: T
    def method(self) -> T:
        return self.x

class Sub(Model[int]):
    y: int

output = Model[str]("a").method(), vars(Sub(1, 2)), typing.get_args(Sub.__orig_bases__[0])
""",
)

# The syntax of Python 3.12.
if sys.version_info >= (3, 12):
    source(
        "generic_by_a_type_parameter",
        """
import inspect

class Model[T](eqx.Module):
    x: T
    y: list[T] = eqx.field(default_factory=list)

    def method(self) -> T:
        return self.x

class Sub[T, *Ts](Model[T]):
    z: tuple[*Ts]

output = (
    Model[int](1).method(), Model(1).x, type(Model[int](1)) is Model, len(Model.__type_params__),
    Sub[int, str, str](1, [2], ("a", "b")).z, list(inspect.signature(Sub).parameters),
)
""",
    )
    source(
        "generic_by_a_bounded_type_parameter",
        """
import jax.tree_util as jtu

class Part(eqx.Module):
    x: int

class Model[P: Part](eqx.Module):
    part: P

class Sub(Model[Part]):
    pass

output = jtu.tree_leaves(Sub(Part(1))), Model.__type_params__[0].__bound__ is Part
""",
    )
    source(
        "abstract_attribute_of_a_type_parameter",
        """
class AbstractModel[T](eqx.Module):
    x: eqx.AbstractVar[T]

class Model(AbstractModel[int]):
    x: int

output = Model(1).x, sorted(AbstractModel.__abstractvars__)
""",
    )
    source(
        "type_alias_as_an_annotation",
        """
import dataclasses

type Number = int | float

class Model(eqx.Module):
    x: Number = 1

output = Model().x, dataclasses.fields(Model)[0].type is Number
""",
    )
    source(
        "generic_method",
        """
class Model(eqx.Module):
    x: int

    def method[T](self, y: T) -> T:
        return y

output = Model(1).method("a"), len(Model(1).method.__func__.__type_params__)
""",
    )
