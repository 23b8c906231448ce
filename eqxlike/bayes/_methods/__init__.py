"""Methods of inference: one a file."""

from ._deep_ensemble import DeepEnsemble as DeepEnsemble
from ._hmc import HMC as HMC
from ._laplace import Laplace as Laplace
from ._map import MAP as MAP
from ._nuts import NUTS as NUTS
