"""The names of layers in a program that is being traced.

While a filtered function is traced, each call of a Module runs in a `jax.named_scope` with the path
of the Module. The path of an outermost call begins at the argument, such as `model.encoder`. The
path of an inner call is relative to the enclosing call, such as `.layers[0]`. JAX keeps the scopes
through transformations, and XLA keeps them in compiled programs. Outside of a trace, a call of a
Module is not changed.
"""

import contextlib
import contextvars
import functools
import inspect
import re
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.tree_util as jtu

from ._class import RECORD, StoredFunction

_current: contextvars.ContextVar["_Names | None"] = contextvars.ContextVar(
    "eqxlike_names_of_layers", default=None
)

# These characters are not allowed in the name of a scope, because JAX prints them between scopes
# and around transformations.
_SEPARATORS = re.compile(r"[/()]")


class LayerCall(StoredFunction):
    """Descriptor for the `__call__` of a Module class. It names the call during a trace."""

    # `_named` is not in `__dict__`, so that a class can be pickled by value. The function in
    # `_named` refers to `_current`, which cannot be pickled.
    __slots__ = ("_named",)

    def __init__(self, function: Callable[..., Any]):
        super().__init__(function)
        self._named: Callable[..., Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerCall, (self.function,)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self.function
        if _current.get() is None:
            return types.MethodType(self.function, instance)
        if self._named is None:
            self._named = _with_name(self.function)
        return types.MethodType(self._named, instance)


def _with_name(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `function` so that its calls get names inside `naming_layers`."""

    @functools.wraps(function)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        names = _current.get()
        if names is None:
            return function(self, *args, **kwargs)
        with names.scope_of_call(self):
            return function(self, *args, **kwargs)

    # The signature is copied, because some tools that read it do not follow `__wrapped__`.
    with contextlib.suppress(TypeError, ValueError):
        vars(call)["__signature__"] = inspect.signature(function)
    return call


@contextlib.contextmanager
def naming_layers(args: Sequence[Any], labels: Sequence[str], num_bound: int = 0) -> Iterator[None]:
    """Context manager that gives names to the calls of all Modules in the arguments of a function.

    **Arguments:**

    - `args`, `labels`: the arguments of the function, and the name of each argument.
    - `num_bound`: the number of leading arguments that the user does not pass, such as the Module
      whose method is called. These arguments are named after their classes.
    """
    names = [*labels]
    for place, arg in enumerate(args[:num_bound]):
        while _is_wrapper(arg):
            arg = arg.__wrapped__
        if _is_layer(arg):
            names[place] = type(arg).__name__
    token = _current.set(_Names([*zip(names, args, strict=True)]))
    try:
        yield
    finally:
        _current.reset(token)


def names_in(tree: Any) -> tuple[str | None, ...] | None:
    """The paths of the Modules in a tree, for `name_again`; `None` outside of `naming_layers`."""
    names = _current.get()
    if names is None:
        return None
    return tuple(names.path_of(module) for _, module in modules_in(tree))


def name_again(tree: Any, paths: tuple[str | None, ...] | None) -> None:
    """Gives the Modules of a rebuilt tree the `paths` of the Modules in the original tree."""
    names = _current.get()
    if names is not None and paths:
        for path, (_, module) in zip(paths, modules_in(tree), strict=False):
            if path is not None:
                names.add(module, path)


def modules_in(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The Modules in a tree with their paths, outer Modules first.

    A wrapper itself is left out. The Module inside it has the path of the wrapper.
    """
    if _is_layer(tree):
        yield path, tree
    for key, part in _parts_of(tree):
        if _is_module(part):
            inside = path if _is_wrapper(tree) else path + jtu.keystr(key)
            yield from modules_in(part, inside)


def _parts_of(tree: Any) -> list[tuple[Any, Any]]:
    """The outermost Modules inside a tree and the leaves outside of Modules, with their paths."""
    inside: list[Any] = []

    def is_inside(part: Any) -> bool:
        is_found = _is_module(part) and part is not tree
        if is_found:
            inside.append(part)
        return is_found

    try:
        if not _is_module(tree):
            # First look for Modules without making paths, because making paths doubles the time.
            # Most arguments that are not Modules contain no Module.
            jtu.tree_leaves(tree, is_leaf=is_inside)
            if not inside:
                return []
        return jtu.tree_flatten_with_path(tree, is_leaf=is_inside)[0]
    # Another library's node may raise if it is flattened while its leaves are tracers.
    except Exception:
        return []


def _is_module(node: Any) -> bool:
    return hasattr(type(node), RECORD)


def _is_wrapper(node: Any) -> bool:
    return _is_module(node) and not type(node)._eqxlike_class.traits.is_layer


def _is_layer(node: Any) -> bool:
    return _is_module(node) and type(node)._eqxlike_class.traits.is_layer


class _Names:
    """The names of the Modules in one trace."""

    def __init__(self, arguments: Sequence[tuple[str, Any]]):
        self._arguments = arguments
        # The first element stands for the call of the traced function itself.
        self._running = [_Call(None, "", arguments)]

    @functools.cached_property
    def _paths(self) -> dict[int, tuple[weakref.ref[Any], str]]:
        """Maps the `id` of a Module to a weak reference to the Module, and its path.

        If the reference is dead, another object may have the same `id`.
        """
        paths: dict[int, tuple[weakref.ref[Any], str]] = {}
        for path, module in self._running[0].inside:
            paths.setdefault(id(module), (weakref.ref(module), path))
        return paths

    def add(self, module: Any, path: str) -> None:
        if self.path_of(module) is None:
            self._paths[id(module)] = weakref.ref(module), path

    def path_of(self, module: Any) -> str | None:
        """The path of this Module object; `None` if it is not known."""
        reference, path = self._paths.get(id(module), (None, None))
        return path if reference is not None and reference() is module else None

    @contextlib.contextmanager
    def scope_of_call(self, module: Any) -> Iterator[None]:
        """Context manager that puts a call of a Module into a `jax.named_scope`."""
        enclosing = self._running[-1]
        # `super().__call__` is part of the same call, and gets no other name.
        if enclosing.module is module:
            yield
            return
        path = self.path_of(module)
        if path is None:
            path = self._infer_path(module)
            for inner_path, inner in modules_in(module, path):
                self.add(inner, inner_path)
        inside = path.removeprefix(enclosing.path)
        scope = inside if inside[:1] in (".", "[") else path
        self._running.append(_Call(module, path, [(path, module)]))
        try:
            with jax.named_scope(_SEPARATORS.sub("_", scope)):
                yield
        finally:
            self._running.pop()

    def _infer_path(self, module: Any) -> str:
        """Infers the path of a Module that is not known by its `id`.

        Transformations rebuild their arguments, so the Module may be a copy of a known Module. If
        exactly one known Module has the same structure, its path is returned. Otherwise the name of
        the class is returned.
        """
        name = type(module).__name__
        # Hashing or comparing a user's static fields may raise.
        with contextlib.suppress(Exception):
            structure = jtu.tree_structure(module)
            for call in (self._running[-1], self._running[0]):
                if structure in call.by_structure:
                    return call.by_structure[structure] or name
        return name


class _Call:
    """A call during a trace, of `module` at `path`.

    - `trees`: the trees that contain the Modules inside the call, with their paths.
    """

    def __init__(self, module: Any, path: str, trees: Sequence[tuple[str, Any]]):
        self.module = module
        self.path = path
        self.trees = trees

    @functools.cached_property
    def inside(self) -> list[tuple[str, Any]]:
        """The Modules inside the call, collected when they are needed for the first time."""
        found = [each for path, tree in self.trees for each in modules_in(tree, path)]
        return [each for each in found if each[1] is not self.module]

    @functools.cached_property
    def by_structure(self) -> dict[Any, str | None]:
        """Maps the structure of each Module to the path of the shallowest Module with it.

        For example, an optimiser state contains Modules of the same structure as the model, but
        deeper. If several Modules are equally shallow, the path is `None`.
        """
        paths: dict[Any, list[str]] = {}
        for path, module in self.inside:
            with contextlib.suppress(Exception):
                paths.setdefault(jtu.tree_structure(module), []).append(path)
        return {structure: _only_shallowest(found) for structure, found in paths.items()}


def _only_shallowest(paths: list[str]) -> str | None:
    depths = [path.count(".") + path.count("[") for path in paths]
    shallowest = min(depths)
    return paths[depths.index(shallowest)] if depths.count(shallowest) == 1 else None
