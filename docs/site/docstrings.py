"""Reads docstrings for the site: an extension of Griffe, which mkdocstrings uses."""

import importlib
import inspect
import re
import textwrap
from typing import Any

import griffe

from docs.site import links

# Markdown would render `>>>` as a quotation. An example ends at an empty line.
ADMONITION = re.compile(r"^( *)!!! example\n\n((?:(?:\1    .*)?\n?)+)", re.MULTILINE)
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?! *$).*)*", re.MULTILINE)

KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: griffe.ParameterKind.positional_only,
    inspect.Parameter.POSITIONAL_OR_KEYWORD: griffe.ParameterKind.positional_or_keyword,
    inspect.Parameter.VAR_POSITIONAL: griffe.ParameterKind.var_positional,
    inspect.Parameter.KEYWORD_ONLY: griffe.ParameterKind.keyword_only,
    inspect.Parameter.VAR_KEYWORD: griffe.ParameterKind.var_keyword,
}


def as_markdown(docstring: str) -> str:
    """A docstring with its examples as blocks of code and public names as links."""

    def fenced(match: re.Match[str]) -> str:
        return f"{match[1]}```pycon\n{match[0]}\n{match[1]}```"

    plain = ADMONITION.sub(lambda match: textwrap.dedent(match[2]), docstring)
    return links.to_api(EXAMPLE.sub(fenced, plain))


class Docstrings(griffe.Extension):
    """Formats examples as code, public names as links, and signatures as users write calls."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Removes a default that is only a sentinel for a missing argument."""
        for parameter in func.parameters:
            if parameter.default is not None and str(parameter.default) == "MISSING":
                parameter.default = None

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Adds `__init__`, and the `__call__` of a private base, if the source does not show it."""
        if cls.name.startswith("_") or not cls.docstring:
            return
        value = importlib.import_module(cls.module.path)
        for name in cls.path.removeprefix(f"{cls.module.path}.").split("."):
            value = getattr(value, name, None)
        if not inspect.isclass(value) or issubclass(value, BaseException):
            return
        if "__init__" not in cls.members:
            try:
                signature = inspect.signature(value)
            except (TypeError, ValueError):
                return
            # Removes the docstring that `__init__` inherits from `object`.
            docstring = value.__init__.__doc__ if inspect.isfunction(value.__init__) else None
            cls.set_member("__init__", shown_function("__init__", signature, docstring))
        if "__call__" not in cls.members:
            owner = next((base for base in value.__mro__ if "__call__" in vars(base)), None)
            if owner is not None and owner.__name__.startswith("_") and owner.__call__.__doc__:
                signature = inspect.signature(owner.__call__)
                signature = signature.replace(parameters=[*signature.parameters.values()][1:])
                function = shown_function("__call__", signature, owner.__call__.__doc__)
                cls.set_member("__call__", function)


def shown_function(
    name: str, signature: inspect.Signature, docstring: str | None
) -> griffe.Function:
    """A method with the parameters of `signature`, which does not include `self`."""
    parameters = [griffe.Parameter("self", kind=KINDS[inspect.Parameter.POSITIONAL_ONLY])]
    for each in signature.parameters.values():
        if each.name.startswith("_"):
            continue
        default = None if each.default is each.empty else shown_default(each.default)
        parameters.append(griffe.Parameter(each.name, kind=KINDS[each.kind], default=default))
    function = griffe.Function(name, parameters=griffe.Parameters(*parameters))
    if docstring:
        text = as_markdown(inspect.cleandoc(docstring))
        function.docstring = griffe.Docstring(text, parent=function)
    return function


def shown_default(value: Any) -> str:
    """A default value as source code."""
    if inspect.isroutine(value) or inspect.isclass(value):
        return value.__name__
    text = repr(value)
    return "..." if " at 0x" in text or text.startswith("<") else text
