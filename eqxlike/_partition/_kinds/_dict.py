"""A plain dict. Its `meta` is the tuple of keys, sorted as JAX sorts them."""

import operator
from collections.abc import Sequence
from typing import Any

from jax.tree_util import default_registry

from .._guard import GuardWriter
from .._rebuild import RebuildWriter
from .._static_key import StaticKey
from .._structure import Opened, Structure


class DictNode(Structure):
    __slots__ = ()

    is_fixed = False
    takes_row = True

    @staticmethod
    def open(value: dict[Any, Any]) -> Opened:
        try:
            children, keys = default_registry.flatten_one_level(value)  # pyright: ignore
        except Exception as error:
            raise TypeError(
                "the keys of a dict in a pytree must be sortable: those of this one, of types "
                f"{', '.join(sorted({type(key).__name__ for key in value}))}, are not"
            ) from error
        return Opened(DictNode, lambda: keys, keys, children, lambda index: f"[{keys[index]!r}]")

    def write_build(self, writer: RebuildWriter, parts: list[str]) -> str:
        if self.has_row:
            return writer.assign(f"dict(zip({writer.constant(self.meta)}, {parts[0]}))")
        keys = map(writer.constant, self.meta)
        items = (f"{key}: {part}" for key, part in zip(keys, parts, strict=True))
        return writer.assign(f"{{{', '.join(items)}}}")

    def write_guard(self, writer: GuardWriter, name: str) -> Sequence[str]:
        writer.miss_if(f"type({name}) is not dict")
        keys, key = self.meta, self.static.key
        have_key = f"{writer.constant(_have_key)}({name}, {writer.constant(key)})"
        if self.has_row:
            is_text = all(type(each) is str for each in keys)
            types = writer.constant({str})
            differ = f"{{*map(type, {name})}} != {types}" if is_text else f"not {have_key}"
            writer.miss_if(f"len({name}) != {len(keys)} or {differ}")
            return [writer.assign(f"{writer.constant(operator.itemgetter(*keys))}({name})")]
        # Mostly the very same keys in the very same order, and so of the same types.
        found = writer.unpack(name, len(keys))
        constants = [writer.constant(each) for each in keys]
        if keys:
            same = (f"{x} is not {c}" for x, c in zip(found, constants, strict=True))
            writer.miss_if(f"({' or '.join(same)}) and not {have_key}")
        return [writer.assign(f"{name}[{constant}]") for constant in constants]


def _have_key(value: dict[Any, Any], key: Any) -> bool:
    """Whether these are the keys of a dict, types and all."""
    return StaticKey(tuple(sorted(value))).key == key
