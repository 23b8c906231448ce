"""A function of the user's, by the name that a command is given."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from ._errors import CommandError

METAVAR = "module:function"


def load_function(target: str) -> Callable[[], Any]:
    """The function `module:function`, which takes no arguments.

    **Raises:** `CommandError` if there is none, saying what to give.
    """
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise CommandError(f"give {METAVAR}, such as train:step; got {target!r}")
    if module_name.endswith(".py") or os.sep in module_name:
        dotted = module_name.removesuffix(".py").strip(f".{os.sep}").replace(os.sep, ".")
        raise CommandError(f"give the name of a module, not a file: {dotted}:{name}")
    function: Any = _imported(module_name)
    for part in name.split("."):
        if not hasattr(function, part):
            public = [each for each in vars(_imported(module_name)) if not each.startswith("_")]
            functions = [each for each in public if callable(getattr(function, each, None))]
            there = f"; it has {', '.join(functions)}" if functions else ""
            raise CommandError(f"module {module_name!r} has no function {name!r}{there}")
        function = getattr(function, part)
    if not callable(function):
        raise CommandError(f"{target} is no function: it is of type {type(function).__name__}")
    needed = _needed_arguments(function)
    if needed:
        raise CommandError(
            f"{target} needs arguments ({', '.join(needed)}): give a function of none, such as "
            f"`def profiled(): return {name}(...)`"
        )
    return function


def _imported(name: str) -> Any:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise CommandError(_why_not(name, error)) from None


def _why_not(name: str, error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return (
            f"module {name!r} ends the process as it is imported: put what it is to do as a script "
            'under `if __name__ == "__main__":`'
        )
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        what = " ".join(str(error).split())
        return f"module {name!r} cannot be imported: {type(error).__name__}: {what}"
    if name == error.name or name.startswith(f"{error.name}."):
        return f"there is no module {name!r} in {os.getcwd()} or among those installed"
    return f"module {name!r} needs {error.name!r}, which is not installed"


def _needed_arguments(function: Any) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        each.name
        for each in parameters
        if each.default is inspect.Parameter.empty and each.kind not in variable
    ]
