"""A plain dict."""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.tree_util import default_registry

from .._guard import GuardWriter
from .._rebuild import RebuildWriter
from .._static_key import StaticKey
from .._structure import Opened, Structure


class _Meta(NamedTuple):
    """The keys as JAX sorts them, and in the order in which the first dict had them."""

    keys: tuple[Any, ...]
    as_inserted: tuple[Any, ...]


class DictNode(Structure):
    __slots__ = ()

    is_fixed = False
    takes_sequence = True

    @staticmethod
    def open(value: dict[Any, Any]) -> Opened:
        try:
            children, keys = default_registry.flatten_one_level(value)  # pyright: ignore
        except Exception as error:
            raise TypeError(
                "the keys of a dict in a pytree must be sortable: those of this one, of types "
                f"{', '.join(sorted({type(key).__name__ for key in value}))}, are not"
            ) from error

        def make_meta() -> _Meta:
            return _Meta(keys, tuple(value))

        return Opened(DictNode, make_meta, keys, children, lambda index: f"[{keys[index]!r}]")

    def write_build(self, writer: RebuildWriter, parts: list[str]) -> str:
        keys = self.meta.keys
        if self.has_sequence:
            return writer.assign(f"dict(zip({writer.constant(keys)}, {parts[0]}))")
        items = (f"{writer.constant(key)}: {part}" for key, part in zip(keys, parts, strict=True))
        return writer.assign(f"{{{', '.join(items)}}}")

    def write_guard(self, writer: GuardWriter, name: str) -> Sequence[str]:
        writer.miss_if(f"type({name}) is not dict")
        keys = self.meta.keys
        if all(type(key) is str for key in keys):
            # A missing key is noticed when its value is taken.
            differ = f"{{*map(type, {name})}} != {writer.constant({str})}"
        else:
            key = writer.constant(self.static.key)
            differ = f"not {writer.constant(_have_key)}({name}, {key})"
        if self.has_sequence:
            writer.miss_if(f"len({name}) != {len(keys)} or {differ}")
            return [writer.assign(f"{writer.constant(operator.itemgetter(*keys))}({name})")]
        found = writer.unpack(name, len(keys))
        if keys:
            # Mostly they are the same objects, and so of the same types, in the first dict's order.
            pairs = zip(found, map(writer.constant, self.meta.as_inserted), strict=True)
            writer.miss_if(f"({' or '.join(f'{x} is not {c}' for x, c in pairs)}) and {differ}")
        return [writer.assign(f"{name}[{writer.constant(key)}]") for key in keys]


def _have_key(value: dict[Any, Any], key: Any) -> bool:
    """Whether the keys of a dict, types included, have this `key`."""
    return StaticKey(tuple(sorted(value))).key == key
