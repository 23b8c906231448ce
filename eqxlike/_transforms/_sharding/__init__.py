"""The placement of the arrays of a tree."""

from ._prefix import shardings_of_arrays as shardings_of_arrays
from ._shard import filter_shard as filter_shard
from ._stacked import Gathering as Gathering
from ._stacked import Stacked as Stacked
from ._stacked import keep_all_but_gathered as keep_all_but_gathered
