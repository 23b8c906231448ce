"""Methods of inference: one a file."""

from ._deep_ensemble import DeepEnsemble as DeepEnsemble
from ._hmc import HMC as HMC
from ._laplace import Laplace as Laplace
from ._map import MAP as MAP
from ._mc_dropout import MCDropout as MCDropout
from ._mclmc import MCLMC as MCLMC
from ._mean_field import MeanField as MeanField
from ._nuts import NUTS as NUTS
from ._pathfinder import Pathfinder as Pathfinder
from ._sghmc import SGHMC as SGHMC
from ._sgld import SGLD as SGLD
from ._swag import SWAG as SWAG
