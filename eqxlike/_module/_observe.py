"""Modules that report their calls.

`observe_calls` copies a tree. In the copy each Module that can be called is of a subclass of its
class, made here: the fields and the methods are the same, and `__call__` reports as it begins and
as it returns. A static field holds the `Report`, which so goes wherever the Module does: through
flattening, into loops and transformations.
"""

import dataclasses
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax.tree_util as jtu

from ._cached import stored_fields
from ._derived import derive, derived_class
from ._field import field
from ._module import Module, Wrapper

Report = Callable[
    [Module, tuple[Any, ...], dict[str, Any]], AbstractContextManager[Callable[[Any], None]]
]
"""A function that is told of a call as it begins: of the Module, the arguments and the keyword
arguments, which the call may use up. It returns a context in which the call runs. The context gives
a function, which is called with the output.
"""


def observe_calls(tree: Any, reporter: Callable[[tuple[Any, ...], Module], Report]) -> Any:
    """A copy of `tree` in which every Module reports its calls.

    `reporter(path, module)` is called once for each Module, outer ones first, and returns its
    `Report`. A Module that stands at several places counts once, under its first path. A wrapper
    is not observed: the function inside is, under the path of the wrapper.
    """
    observed: dict[int, Any] = {}

    def visit(node: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(node, Wrapper):
            wrapped = (node.__wrapped__, getattr(node, "__self__", None))
            return _map_modules(
                lambda key, part: visit(part, path) if _is_in(part, wrapped) else part, node
            )
        if not isinstance(node, Module):
            return _map_modules(lambda key, part: visit(part, path + key), node)
        if id(node) not in observed:
            report = reporter(path, node)
            rebuilt = _map_modules(lambda key, part: visit(part, path + key), node)
            observed[id(node)] = _observed(rebuilt, report)
        return observed[id(node)]

    return visit(tree, ())


def _map_modules(function: Callable[[tuple[Any, ...], Module], Any], node: Any) -> Any:
    """`node` with `function(path, module)` in place of each of the outermost Modules inside it."""
    parts, treedef = jtu.tree_flatten_with_path(
        node, is_leaf=lambda part: isinstance(part, Module) and part is not node
    )
    return treedef.unflatten(
        [function(key, part) if isinstance(part, Module) else part for key, part in parts]
    )


def _is_in(node: Any, nodes: tuple[Any, ...]) -> bool:
    return any(node is each for each in nodes)


def _observed(module: Module, report: Report) -> Module:
    if not callable(module):
        return module
    new: Any = object.__new__(_observed_class(type(module)))
    stored_fields(new).update(stored_fields(module), **{_REPORT: report})
    return new


_REPORT = "_eqxlike_report"
_OBSERVED = "observed"


def _observed_class(cls: Any) -> Any:
    """The subclass of `cls` that reports its calls: the same one each time."""
    return derived_class(cls, _OBSERVED, lambda: _make_observed_class(cls))


def _make_observed_class(cls: Any) -> type:
    """The subclass of `cls` that reports its calls."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        report = getattr(self, _REPORT)
        # An instance that the model makes of its own class, while it runs, has none.
        if report is None:
            return super(observed, self).__call__(*args, **kwargs)
        with report(self, args, kwargs) as returned:
            output = super(observed, self).__call__(*args, **kwargs)
            returned(output)
            return output

    # A container asks whether a layer takes a key.
    __call__.__signature__ = inspect.signature(cls.__call__)  # pyright: ignore
    body = {
        "__annotations__": {_REPORT: Any},
        "__call__": __call__,
        _REPORT: field(static=True, default=None),
    }
    traits = cls._eqxlike_class.traits
    if traits.unfrozen is not None:
        # What the model freezes or unfreezes as it is called is observed too.
        traits = dataclasses.replace(traits, unfrozen=_observed_class(traits.unfrozen))
    observed = derive(cls, body, traits)
    return observed
