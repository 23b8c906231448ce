"""Methods of inference: one a file."""

from ._hamiltonian import HMC as HMC
from ._hamiltonian import MCLMC as MCLMC
from ._hamiltonian import NUTS as NUTS
from ._laplace import Laplace as Laplace
from ._map import MAP as MAP
from ._map import DeepEnsemble as DeepEnsemble
from ._mc_dropout import MCDropout as MCDropout
from ._mean_field import MeanField as MeanField
from ._pathfinder import Pathfinder as Pathfinder
from ._stochastic_gradient import SGHMC as SGHMC
from ._stochastic_gradient import SGLD as SGLD
from ._swag import SWAG as SWAG
