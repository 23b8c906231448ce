"""Operations on a model as a whole, whatever layers it is made of."""

from ._freeze import freeze as freeze
from ._freeze import inference_mode as inference_mode
from ._freeze import tree_inference as tree_inference
from ._freeze import unfreeze as unfreeze
from ._fuse import FusedAttention as FusedAttention
from ._fuse import fuse as fuse
from ._fuse import unfuse as unfuse
from ._lora import LoRALinear as LoRALinear
from ._lora import MergedLinear as MergedLinear
from ._policy import MixedPrecision as MixedPrecision
from ._policy import Policy as Policy
from ._replace import reinitialise as reinitialise
from ._replace import replace_layers as replace_layers
from ._replace import to_bayesian as to_bayesian
from ._summary import LayerSummary as LayerSummary
from ._summary import Summary as Summary
from ._summary import summary as summary
