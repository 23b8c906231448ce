"""The public names of eqxlike."""

import typing as _typing

from ._module import AbstractClassVar as AbstractClassVar
from ._module import AbstractVar as AbstractVar
from ._module import Module as Module
from ._module import Partial as Partial
from ._module import StrictConfig as StrictConfig
from ._module import field as field
from ._module import module_update_wrapper as module_update_wrapper
from ._module import static_field as static_field
from ._names import on_first_use as _on_first_use
from ._partition import PartitionError as PartitionError
from ._partition import checking_partitions as checking_partitions
from ._pytree import apply_updates as apply_updates
from ._pytree import combine as combine
from ._pytree import default_deserialise_filter_spec as default_deserialise_filter_spec
from ._pytree import default_serialise_filter_spec as default_serialise_filter_spec
from ._pytree import filter as filter
from ._pytree import is_array as is_array
from ._pytree import is_array_like as is_array_like
from ._pytree import is_inexact_array as is_inexact_array
from ._pytree import is_inexact_array_like as is_inexact_array_like
from ._pytree import partition as partition
from ._pytree import tree_at as tree_at
from ._pytree import tree_check as tree_check
from ._pytree import tree_deserialise_leaves as tree_deserialise_leaves
from ._pytree import tree_equal as tree_equal
from ._pytree import tree_flatten_one_level as tree_flatten_one_level
from ._pytree import tree_pformat as tree_pformat
from ._pytree import tree_pprint as tree_pprint
from ._pytree import tree_serialise_leaves as tree_serialise_leaves
from ._transfers import transfers as transfers
from ._transforms import Enumeration as Enumeration
from ._transforms import EquinoxRuntimeError as EquinoxRuntimeError
from ._transforms import EquinoxTracetimeError as EquinoxTracetimeError
from ._transforms import EqxlikeRuntimeError as EqxlikeRuntimeError
from ._transforms import EqxlikeTracetimeError as EqxlikeTracetimeError
from ._transforms import branched_error_if as branched_error_if
from ._transforms import clear_caches as clear_caches
from ._transforms import error_if as error_if
from ._transforms import filter_checkpoint as filter_checkpoint
from ._transforms import filter_closure_convert as filter_closure_convert
from ._transforms import filter_custom_jvp as filter_custom_jvp
from ._transforms import filter_custom_vjp as filter_custom_vjp
from ._transforms import filter_eval_shape as filter_eval_shape
from ._transforms import filter_grad as filter_grad
from ._transforms import filter_hessian as filter_hessian
from ._transforms import filter_jacfwd as filter_jacfwd
from ._transforms import filter_jacrev as filter_jacrev
from ._transforms import filter_jit as filter_jit
from ._transforms import filter_jvp as filter_jvp
from ._transforms import filter_make_jaxpr as filter_make_jaxpr
from ._transforms import filter_pmap as filter_pmap
from ._transforms import filter_pure_callback as filter_pure_callback
from ._transforms import filter_shard as filter_shard
from ._transforms import filter_shard_map as filter_shard_map
from ._transforms import filter_value_and_grad as filter_value_and_grad
from ._transforms import filter_vjp as filter_vjp
from ._transforms import filter_vmap as filter_vmap
from ._transforms import if_array as if_array
from ._version import __version__ as __version__

if _typing.TYPE_CHECKING:
    from . import ad as ad
    from . import bayes as bayes
    from . import debug as debug
    from . import extend as extend
    from . import graph as graph
    from . import internal as internal
    from . import loops as loops
    from . import nn as nn
    from . import train as train
    from ._export import Exported as Exported
    from ._export import export as export
    from ._export import load_exported as load_exported
    from ._profile import profile as profile
    from ._standing_in import install_as_equinox as install_as_equinox
    from .nn import tree_inference as tree_inference
else:
    # These names are imported on first use: many programs need none of them, and importing them
    # would take a third of the import time.
    __getattr__, __dir__, __all__ = _on_first_use(
        __name__,
        "ad",
        "bayes",
        "debug",
        "extend",
        "graph",
        "internal",
        "loops",
        "nn",
        "train",
        Exported="_export",
        export="_export",
        load_exported="_export",
        profile="_profile",
        install_as_equinox="_standing_in",
        tree_inference="nn",
    )
