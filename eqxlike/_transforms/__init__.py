"""Filtered transformations."""

from ._grad import filter_grad as filter_grad
from ._grad import filter_value_and_grad as filter_value_and_grad
from ._jit import clear_caches as clear_caches
from ._jit import filter_jit as filter_jit
from ._trace import filter_eval_shape as filter_eval_shape
from ._vmap import filter_vmap as filter_vmap
from ._vmap import if_array as if_array
