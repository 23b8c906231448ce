"""Modules with frozen arrays.

Neither an array nor a field says whether the array is trained: the class does. A frozen Module is
of a subclass, made here, that puts a `Frozen` node around each frozen array when it is flattened
and takes it away when it is unflattened. So its methods find plain arrays in its fields, and
`jax.jit` sees arrays, while a walk over the tree sees which of them are frozen.
"""

import copyreg
import dataclasses
import functools
from typing import Any

import jax.tree_util as jtu

from .._pytree import Frozen, is_frozen
from ._class import Codec
from ._codec import is_incomplete
from ._derived import derive, derived_class
from ._module import Module

Frozens = tuple[tuple[str, tuple[bool, ...]], ...]
"""The fields with frozen leaves, each with a flag for every leaf. A Module inside counts as one
leaf, and so does `None`.
"""


def _is_part(node: Any) -> bool:
    return node is None or isinstance(node, Module)


def freeze_where(tree: Any, mask: Any) -> Any:
    """`tree` with its arrays frozen where `mask`, of the same structure, is `True`.

    Where `mask` is `False`, arrays are no longer frozen.
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
    frozens = []
    for name, child_mask in zip(codec.dynamic_names, masks, strict=True):
        flags = tuple(part is True for part in jtu.tree_leaves(child_mask, is_leaf=_is_part))
        if any(flags):
            frozens.append((name, flags))
    new = tuple(freeze_where(child, each) for child, each in zip(children, masks, strict=True))
    new_cls: Any = _frozen_class(unfrozen, tuple(frozens))
    return new_cls._eqxlike_class.codec.unflatten(statics, new)


def _frozen_class(cls: Any, frozens: Frozens) -> type:
    """The subclass of `cls` with these leaves frozen; the same one each time."""
    if not frozens:
        return cls
    return derived_class(cls, frozens, lambda: _make_frozen_class(cls, frozens))


def frozen_fields(cls: Any) -> tuple[str, ...]:
    """The fields of a Module class in which arrays are frozen."""
    flattening = cls._eqxlike_class.traits.flattening
    is_ours = isinstance(flattening, functools.partial) and flattening.func is _Flattening
    return tuple(flattening.args[0]) if is_ours else ()


def _make_frozen_class(cls: Any, frozens: Frozens) -> type:
    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        reduced = super(frozen, self).__reduce_ex__(protocol)
        if isinstance(reduced, tuple) and reduced[0] is copyreg.__newobj__:  # pyright: ignore
            return (_new_frozen, (cls, frozens), *reduced[2:])
        return reduced

    traits = dataclasses.replace(
        cls._eqxlike_class.traits,
        flattening=functools.partial(_Flattening, dict(frozens)),
        unfrozen=cls,
    )
    frozen = derive(cls, {"__reduce_ex__": __reduce_ex__}, traits)
    return frozen


def _new_frozen(cls: type, frozens: Frozens) -> Any:
    return object.__new__(_frozen_class(cls, frozens))


class _Flattening:
    """The functions by which JAX flattens a frozen Module: its codec's, with `Frozen` nodes."""

    def __init__(self, frozens: dict[str, tuple[bool, ...]], codec: Codec):
        self.codec = codec
        self.frozens = frozens

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
        # In the middle of an `__init__` some fields are missing.
        return statics[0] if is_incomplete(statics) else self.codec.dynamic_names

    def _wrap(self, name: str, child: Any) -> Any:
        flags = self.frozens.get(name)
        if flags is None:
            return child
        parts, treedef = jtu.tree_flatten(child, is_leaf=_is_part)
        if len(parts) != len(flags):
            # Another tree stands there now, as after a map that returns trees.
            return child
        return treedef.unflatten(
            [Frozen(part) if flag else part for flag, part in zip(flags, parts, strict=True)]
        )

    def _unwrap(self, name: str, child: Any) -> Any:
        if name not in self.frozens:
            return child
        return jtu.tree_map(
            lambda part: part.value if is_frozen(part) else part,
            child,
            is_leaf=lambda node: is_frozen(node) or _is_part(node),
        )
