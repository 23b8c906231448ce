"""Many leaves below one node, taken all at once, without a Structure and code for each."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from ..._pytree import is_array
from .._guard import GuardWriter
from .._rebuild import RebuildWriter
from .._static_key import PLAIN_TYPES, StaticKey, plain_key
from .._structure import Structure, intern
from ._leaves import concrete_array_types, is_array_of_jax

MIN_ROW = 64
"""Fewer leaves than this get a Structure each: code for each is faster then."""


class _Meta(NamedTuple):
    """The leaves of a row, `None` in the place of each array, and where these stand."""

    leaves: tuple[Any, ...]
    array_places: tuple[int, ...]
    static_places: tuple[int, ...]


class Row(Structure):
    """The only child of a node, in the place of all the leaves below it."""

    __slots__ = ()

    is_row = True

    def __init__(self, node_type: type, meta: _Meta, static: StaticKey, children: tuple[()]):
        super().__init__(node_type, meta, static, children)
        self.num_arrays = len(meta.array_places)

    def write_build(self, writer: RebuildWriter, parts: list[str]) -> str:
        if not self.meta.array_places:
            return writer.constant(self.meta.leaves)
        arrays = writer.arrays(self.num_arrays)
        if not self.meta.static_places:
            return arrays
        return writer.assign(f"{writer.constant(_merger(self.meta))}({arrays})")

    def write_guard(self, writer: GuardWriter, name: str) -> tuple[()]:
        meta = self.meta
        writer.miss_if(f"len({name}) != {len(meta.leaves)}")
        arrays = name
        if meta.static_places:
            statics = writer.assign(f"{writer.constant(_getter(meta.static_places))}({name})")
            key = writer.constant(self.static.key)
            writer.miss_if(f"{writer.constant(plain_key)}({statics}) != {key}[-1]")
            if meta.array_places:
                arrays = writer.assign(f"{writer.constant(_getter(meta.array_places))}({name})")
        if meta.array_places:
            known = writer.constant(concrete_array_types)
            writer.miss_if(f"not {known}.issuperset(map(type, {arrays}))")
            writer.take_all(arrays, self.num_arrays)
        return ()


def make_row(children: Sequence[Any], *, with_abstract: bool) -> tuple[Row, tuple[Any, ...]] | None:
    """The row of these children and its arrays; `None` if not all are leaves of known types."""
    types = [*map(type, children)]
    known = {*types}
    arrays = known & concrete_array_types
    for leaf_type in known - arrays - PLAIN_TYPES:
        is_abstract = with_abstract and leaf_type is jax.ShapeDtypeStruct
        leaves = (x for x in children if type(x) is leaf_type)
        if not is_abstract and not all(is_array_of_jax(x) or is_array(x) for x in leaves):
            return None
        arrays.add(leaf_type)
    count = len(types)
    if arrays == known:
        places = tuple(range(count))
        meta = _Meta((None,) * count, places, ())
        row = intern(Row, object, lambda: meta, StaticKey((count,)), ())
        return row, tuple(children)  # pyright: ignore[reportReturnType]
    array_places = tuple(place for place, leaf_type in enumerate(types) if leaf_type in arrays)
    static_places = tuple(place for place, leaf_type in enumerate(types) if leaf_type not in arrays)
    statics = tuple(children[place] for place in static_places)

    def make_meta() -> _Meta:
        leaves = [None] * count
        for place, value in zip(static_places, statics, strict=True):
            leaves[place] = value
        return _Meta(tuple(leaves), array_places, static_places)

    static = StaticKey(None)
    static.key = (count, array_places, plain_key(statics))
    row = intern(Row, object, make_meta, static, ())
    taken = tuple(children[place] for place in array_places)
    return row, taken  # pyright: ignore[reportReturnType]


def _getter(places: tuple[int, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if len(places) == 1:
        return lambda leaves: (leaves[places[0]],)
    return operator.itemgetter(*places)


def _merger(meta: _Meta) -> Callable[[Sequence[Any]], list[Any]]:
    def merge(arrays: Sequence[Any]) -> list[Any]:
        leaves = [*meta.leaves]
        for place, array in zip(meta.array_places, arrays, strict=True):
            leaves[place] = array
        return leaves

    return merge
