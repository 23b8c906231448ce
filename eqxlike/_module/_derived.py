"""Generated subclasses of Module classes. A generated subclass has the name of its base class."""

import copyreg
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any

import jax.tree_util as jtu

from .._pytree import Frozen, is_frozen
from ._class import Traits
from ._fields import Codec, field, is_incomplete, stored_fields
from ._module import Module, ModuleMeta, Wrapper


class _Quiet:
    """The first base of a generated class. It hides any `__init_subclass__` of the other bases."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


_lock = threading.RLock()


def _derived_class(cls: Any, make: Callable[..., type], *args: Hashable) -> Any:
    """The subclass `make(cls, *args)` of `cls`. It is made once and then reused."""
    derived = cls._eqxlike_class.derived
    with _lock:
        if (make, *args) not in derived:
            derived[make, *args] = make(cls, *args)
        return derived[make, *args]


def _derive(cls: Any, body: dict[str, Any], traits: Traits) -> Any:
    """Makes a subclass of `cls` from `body` and `traits`, with the name and docstring of `cls`."""
    namespace = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        **body,
    }
    bases = (cls,) if issubclass(cls, _Quiet) else (_Quiet, cls)
    # The subclass has the metaclass of `cls`, which may extend ours. But the `__new__` of this
    # metaclass is not called, since it may take other arguments.
    metaclass: Any = type(cls)
    return ModuleMeta.__new__(metaclass, cls.__name__, bases, namespace, _traits=traits)


# Modules with frozen arrays.
#
# The class of a Module records which of its arrays are frozen. A Module with frozen arrays is an
# instance of a generated subclass. When JAX flattens the instance, each frozen array is wrapped in
# a `Frozen` node; when JAX unflattens it, the array is unwrapped. So methods find plain arrays in
# the fields, and `jax.jit` sees arrays, but filters and gradients see which arrays are frozen.


FrozenFlags = tuple[tuple[str, tuple[bool, ...]], ...]
"""Pairs of the name of a field with frozen leaves, and a flag for each leaf of this field. A Module
in the field counts as one leaf, and `None` counts as a leaf.
"""


def _is_part(node: Any) -> bool:
    return node is None or isinstance(node, Module)


def freeze_where(tree: Any, mask: Any) -> Any:
    """Freezes the arrays of `tree` where `mask` is `True`, and unfreezes them where it is `False`.

    `mask` has the structure of `tree`.
    """
    if isinstance(tree, Module):
        return _freeze_module(tree, mask)
    parts, treedef = jtu.tree_flatten(tree, is_leaf=_is_part)
    masks = jtu.tree_leaves(mask, is_leaf=_is_part)
    return treedef.unflatten(
        [
            freeze_where(part, part_mask) if isinstance(part, Module) else part
            for part, part_mask in zip(parts, masks, strict=True)
        ]
    )


def _freeze_module(module: Module, mask: Module) -> Module:
    cls: Any = type(module)
    unfrozen: Any = cls._eqxlike_class.traits.unfrozen or cls
    codec: Codec = unfrozen._eqxlike_class.codec
    children, statics = codec.flatten(module)
    masks, _ = codec.flatten(mask)
    flags: FrozenFlags = tuple(
        (name, tuple(part is True for part in jtu.tree_leaves(each, is_leaf=_is_part)))
        for name, each in zip(codec.layout.dynamic_names, masks, strict=True)
    )
    flags = tuple((name, of_field) for name, of_field in flags if any(of_field))
    new = tuple(freeze_where(child, each) for child, each in zip(children, masks, strict=True))
    new_cls = _derived_class(unfrozen, _make_frozen_class, flags) if flags else unfrozen
    return new_cls._eqxlike_class.codec.unflatten(statics, new)


def _make_frozen_class(cls: Any, frozen_flags: FrozenFlags) -> type:
    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        reduced = super(frozen, self).__reduce_ex__(protocol)
        if isinstance(reduced, tuple) and reduced[0] is copyreg.__newobj__:  # pyright: ignore
            return (_new_frozen, (cls, frozen_flags), *reduced[2:])
        return reduced

    traits = dataclasses.replace(
        cls._eqxlike_class.traits,
        flattening=functools.partial(_Flattening, dict(frozen_flags)),
        frozen_fields=tuple(dict(frozen_flags)),
        unfrozen=cls,
    )
    frozen = _derive(cls, {"__reduce_ex__": __reduce_ex__}, traits)
    return frozen


def _new_frozen(cls: type, frozen_flags: FrozenFlags) -> Any:
    return object.__new__(_derived_class(cls, _make_frozen_class, frozen_flags))


class _Flattening:
    """Flattens a frozen Module for JAX: adds `Frozen` nodes to the output of the codec."""

    def __init__(self, frozen_flags: dict[str, tuple[bool, ...]], codec: Codec):
        self.codec = codec
        self.frozen_flags = frozen_flags

    def flatten(self, module: Any) -> tuple[tuple[Any, ...], Any]:
        children, statics = self.codec.flatten(module)
        named = zip(self._names(statics), children, strict=True)
        return tuple(self._wrap(name, child) for name, child in named), statics

    def flatten_with_keys(self, module: Any) -> tuple[tuple[Any, ...], Any]:
        children, statics = self.flatten(module)
        return tuple(zip(map(jtu.GetAttrKey, self._names(statics)), children, strict=True)), statics

    def unflatten(self, statics: Any, children: Any) -> Any:
        named = zip(self._names(statics), children, strict=True)
        return self.codec.unflatten(statics, tuple(self._unwrap(*each) for each in named))

    def _names(self, statics: Any) -> tuple[str, ...]:
        # While `__init__` runs, some fields may be missing; `statics` then lists the existing
        # fields.
        return statics[0] if is_incomplete(statics) else self.codec.layout.dynamic_names

    def _wrap(self, name: str, child: Any) -> Any:
        flags = self.frozen_flags.get(name)
        if flags is None:
            return child
        parts, treedef = jtu.tree_flatten(child, is_leaf=_is_part)
        if len(parts) != len(flags):
            # The structure of the field has changed, for example by a map that returned trees.
            return child
        return treedef.unflatten(
            [Frozen(part) if flag else part for flag, part in zip(flags, parts, strict=True)]
        )

    def _unwrap(self, name: str, child: Any) -> Any:
        if name not in self.frozen_flags:
            return child
        return jtu.tree_map(
            lambda part: part.value if is_frozen(part) else part,
            child,
            is_leaf=lambda node: is_frozen(node) or _is_part(node),
        )


# Modules that report their calls.
#
# `observe_calls` copies a tree. In the copy, each callable Module is an instance of a generated
# subclass with the same fields and methods. The `__call__` of this subclass reports when a call
# begins and returns. The `Report` is in a static field, so that flattening, loops and
# transformations preserve it.


Report = Callable[
    [Module, tuple[Any, ...], dict[str, Any]], AbstractContextManager[Callable[[Any], None]]
]
"""A function that is called as `report(module, args, kwargs)` before each call of a Module. It
returns a context manager in which the call runs. The context manager yields a function, which is
called with the output. The call may donate its arguments, so the report must read the arguments
before the call.
"""


def observe_calls(tree: Any, reporter: Callable[[tuple[Any, ...], Module], Report]) -> Any:
    """A copy of `tree` in which every Module reports its calls.

    `reporter(path, module)` is called once for each Module, outer Modules first, and returns the
    `Report` of this Module. If a Module occurs in several places, `path` is its first path. A
    wrapper is not observed. The Module that it wraps is observed, under the path of the wrapper.
    """
    observed: dict[int, Any] = {}

    def visit(node: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(node, Wrapper):
            wrapped = (node.__wrapped__, getattr(node, "__self__", None))

            def visit_wrapped(key: tuple[Any, ...], part: Module) -> Any:
                return visit(part, path) if any(part is each for each in wrapped) else part

            return _map_modules(visit_wrapped, node)
        if not isinstance(node, Module):
            return _map_modules(lambda key, part: visit(part, path + key), node)
        if id(node) not in observed:
            report = reporter(path, node)
            rebuilt = _map_modules(lambda key, part: visit(part, path + key), node)
            observed[id(node)] = rebuilt
            if callable(rebuilt):
                observed_class = _derived_class(type(rebuilt), _make_observed_class)
                observed[id(node)] = new = object.__new__(observed_class)
                stored_fields(new).update(stored_fields(rebuilt), **{_REPORT: report})
        return observed[id(node)]

    return visit(tree, ())


def _map_modules(function: Callable[[tuple[Any, ...], Module], Any], node: Any) -> Any:
    """Replaces each outermost Module inside `node` by the result of `function(path, module)`."""
    parts, treedef = jtu.tree_flatten_with_path(
        node, is_leaf=lambda part: isinstance(part, Module) and part is not node
    )
    return treedef.unflatten(
        [function(key, part) if isinstance(part, Module) else part for key, part in parts]
    )


_REPORT = "_eqxlike_report"


def _make_observed_class(cls: Any) -> type:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        report = getattr(self, _REPORT)
        # An instance of this class that the model itself makes during a call has no report.
        if report is None:
            return super(observed, self).__call__(*args, **kwargs)
        with report(self, args, kwargs) as returned:
            output = super(observed, self).__call__(*args, **kwargs)
            returned(output)
            return output

    # A container such as `nn.Sequential` reads the signature of a layer to see if it takes a key.
    __call__.__signature__ = inspect.signature(cls.__call__)  # pyright: ignore
    body = {
        "__annotations__": {_REPORT: Any},
        "__call__": __call__,
        _REPORT: field(static=True, default=None),
    }
    traits = cls._eqxlike_class.traits
    if traits.unfrozen is not None:
        # If the model freezes or unfreezes a Module during a call, the Module stays observed.
        unfrozen = _derived_class(traits.unfrozen, _make_observed_class)
        traits = dataclasses.replace(traits, unfrozen=unfrozen)
    observed = _derive(cls, body, traits)
    return observed
