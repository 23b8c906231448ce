"""The placement of the arrays of a tree."""

from ._prefix import shardings_of_arrays as shardings_of_arrays
from ._shard import filter_shard as filter_shard
