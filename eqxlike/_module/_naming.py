"""The names of layers in a program that is being traced.

While a filtered function is traced, each call of a Module runs in a `jax.named_scope` with its
path: for the outermost one from the argument, such as `model.encoder`, for those inside relative to
the enclosing one, such as `.layers[0]`. JAX keeps the scopes through its transformations, and XLA
in its programs. At other times a call is a plain call.
"""

import contextlib
import contextvars
import functools
import inspect
import re
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu

from ._class import RECORD, StoredFunction

_current: contextvars.ContextVar["_Names | None"] = contextvars.ContextVar(
    "eqxlike_names_of_layers", default=None
)

# In a printed name stack these separate scopes and enclose transformed ones.
_SEPARATORS = re.compile(r"[/()]")


class LayerCall(StoredFunction):
    """The `__call__` of a Module class: the plain function, unless layers are being named."""

    # Not in `__dict__`, so that classes can be pickled by value: `_named` reads `_current`, which
    # cannot be pickled.
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
    """`function`, which names its calls while layers are being named."""

    @functools.wraps(function)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        names = _current.get()
        if names is None:
            return function(self, *args, **kwargs)
        with names.scope_of_call(self):
            return function(self, *args, **kwargs)

    # Not every tool that reads a signature follows `__wrapped__`.
    with contextlib.suppress(TypeError, ValueError):
        vars(call)["__signature__"] = inspect.signature(function)
    return call


@contextlib.contextmanager
def naming_layers(args: Sequence[Any], labels: Sequence[str], num_bound: int = 0) -> Iterator[None]:
    """A context in which calls of the Modules in the arguments of a function are named.

    **Arguments:**

    - `args`, `labels`: the arguments and their names.
    - `num_bound`: the number of leading arguments that users do not pass, such as the Module that
      is called: these are named after their classes.
    """
    names = [_class_name(arg, label) for arg, label in zip(args[:num_bound], labels, strict=False)]
    token = _current.set(_Names([*zip([*names, *labels[num_bound:]], args, strict=True)]))
    try:
        yield
    finally:
        _current.reset(token)


def names_in(tree: Any) -> tuple[str | None, ...] | None:
    """The paths of the Modules in a tree, for `name_again`; `None` if no layers are being named."""
    names = _current.get()
    if names is None:
        return None
    return tuple(names.path_of(module) for _, module in modules_in(tree))


def name_again(tree: Any, paths: tuple[str | None, ...] | None) -> None:
    """Gives the Modules of a tree the paths of the ones from which it was rebuilt."""
    names = _current.get()
    if names is not None and paths:
        for path, (_, module) in zip(paths, modules_in(tree), strict=False):
            if path is not None:
                names.add(module, path)


def modules_in(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The Modules in a tree with their paths, outer ones first. The callable in a wrapper has the
    path of the wrapper.
    """
    if _is_layer(tree):
        yield path, tree
    for key, part in _parts_of(tree):
        if _is_module(part):
            inside = path if _is_wrapper(tree) else path + jtu.keystr(key)
            yield from modules_in(part, inside)


def _parts_of(tree: Any) -> list[tuple[Any, Any]]:
    """The outermost Modules inside a tree, and its other leaves, with their paths."""
    inside: list[Any] = []

    def is_inside(part: Any) -> bool:
        is_found = _is_module(part) and part is not tree
        if is_found:
            inside.append(part)
        return is_found

    try:
        if not _is_module(tree):
            # Paths double the time, and most arguments that are not Modules hold none.
            jtu.tree_leaves(tree, is_leaf=is_inside)
            if not inside:
                return []
        return jtu.tree_flatten_with_path(tree, is_leaf=is_inside)[0]
    # JAX does not flatten trees that it rebuilds with tracers again, and a node may refuse it.
    except Exception:
        return []


def _is_module(node: Any) -> bool:
    return hasattr(type(node), RECORD)


def _is_wrapper(node: Any) -> bool:
    return _is_module(node) and not type(node)._eqxlike_class.traits.is_layer


def _class_name(arg: Any, otherwise: str) -> str:
    while _is_wrapper(arg):
        arg = arg.__wrapped__
    return type(arg).__name__ if _is_layer(arg) else otherwise


def _is_layer(node: Any) -> bool:
    return _is_module(node) and type(node)._eqxlike_class.traits.is_layer


class _Names:
    """The names of the Modules in one trace."""

    def __init__(self, arguments: Sequence[tuple[str, Any]]):
        self._arguments = arguments
        self._running: list[_Call] = []

    @functools.cached_property
    def _roots(self) -> list[tuple[str, Any]]:
        """The Modules in the arguments; nobody looks for them before one is called."""
        return [found for name, arg in self._arguments for found in modules_in(arg, name)]

    @functools.cached_property
    def _paths(self) -> dict[int, tuple[weakref.ref[Any], str]]:
        """The paths by the identity of a Module, which is valid while the Module lives."""
        paths: dict[int, tuple[weakref.ref[Any], str]] = {}
        for path, module in self._roots:
            paths.setdefault(id(module), (weakref.ref(module), path))
        return paths

    def add(self, module: Any, path: str) -> None:
        if self.path_of(module) is None:
            self._paths[id(module)] = weakref.ref(module), path

    def path_of(self, module: Any) -> str | None:
        """The path of a Module that is itself known."""
        reference, path = self._paths.get(id(module), (None, None))
        return path if reference is not None and reference() is module else None

    @contextlib.contextmanager
    def scope_of_call(self, module: Any) -> Iterator[None]:
        """The context in which a call of a Module is traced."""
        around = self._running[-1] if self._running else None
        # `super().__call__` is part of the same call.
        if around is not None and around.module is module:
            yield
            return
        path = self.path_of(module)
        if path is None:
            path = self._found(module, around)
            for inner_path, inner in modules_in(module, path):
                self.add(inner, inner_path)
        inside = path if around is None else path.removeprefix(around.path)
        scope = inside if around is not None and inside[:1] in (".", "[") else path
        self._running.append(_Call(module, path))
        try:
            with jax.named_scope(_SEPARATORS.sub("_", scope)):
                yield
        finally:
            self._running.pop()

    def _found(self, module: Any, around: "_Call | None") -> str:
        """The path of the only Module of the same structure; the name of the class if there are
        several or none.

        A transformation rebuilds its arguments, so their Modules are other objects.
        """
        name = type(module).__name__
        # A user's static fields may refuse to be hashed or compared.
        with contextlib.suppress(Exception):
            form = jtu.tree_structure(module)
            if around is not None and form in around.by_form:
                return around.by_form[form].path or name
            if form in self._by_form:
                return self._by_form[form].path or name
        return name

    @functools.cached_property
    def _by_form(self) -> "dict[Any, _Shallowest]":
        return _by_form(self._roots)


class _Call:
    """A call that is being traced."""

    def __init__(self, module: Any, path: str):
        self.module = module
        self.path = path

    @functools.cached_property
    def by_form(self) -> "dict[Any, _Shallowest]":
        """The Modules inside the one that is called."""
        return _by_form(list(modules_in(self.module, self.path))[1:])


class _Shallowest(NamedTuple):
    """The path of the shallowest Module of one form, and `None` for it if there are several.

    An optimiser's state has the form of the model, and lies deeper.
    """

    depth: int
    path: str | None


def _by_form(modules: Sequence[tuple[str, Any]]) -> dict[Any, _Shallowest]:
    found: dict[Any, _Shallowest] = {}
    for path, module in modules:
        depth = path.count(".") + path.count("[")
        with contextlib.suppress(Exception):
            form = jtu.tree_structure(module)
            known = found.get(form)
            if known is None or depth < known.depth:
                found[form] = _Shallowest(depth, path)
            elif depth == known.depth:
                found[form] = _Shallowest(depth, None)
    return found
