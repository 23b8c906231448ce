"""Mapping a function over an axis of its arguments, on one device or on several."""

from ._axes import if_array as if_array
from ._pmap import filter_pmap as filter_pmap
from ._shard_map import filter_shard_map as filter_shard_map
from ._vmap import filter_vmap as filter_vmap
