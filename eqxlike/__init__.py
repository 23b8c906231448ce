"""The public names of eqxlike."""

from . import bayes as bayes
from . import nn as nn
from . import train as train
from ._checking import PartitionError as PartitionError
from ._checking import checking_partitions as checking_partitions
from ._module import Module as Module
from ._module import field as field
from ._pytree import apply_updates as apply_updates
from ._pytree import combine as combine
from ._pytree import filter as filter
from ._pytree import is_array as is_array
from ._pytree import is_array_like as is_array_like
from ._pytree import is_inexact_array as is_inexact_array
from ._pytree import is_inexact_array_like as is_inexact_array_like
from ._pytree import partition as partition
from ._pytree import tree_at as tree_at
from ._pytree import tree_equal as tree_equal
from ._pytree import tree_pformat as tree_pformat
from ._transforms import clear_caches as clear_caches
from ._transforms import filter_eval_shape as filter_eval_shape
from ._transforms import filter_grad as filter_grad
from ._transforms import filter_jit as filter_jit
from ._transforms import filter_value_and_grad as filter_value_and_grad
from ._transforms import filter_vmap as filter_vmap
from ._transforms import if_array as if_array
from ._version import __version__ as __version__
