"""Methods of inference."""

from ._laplace import Laplace as Laplace
from ._markov_chains import HMC as HMC
from ._markov_chains import MCLMC as MCLMC
from ._markov_chains import NUTS as NUTS
from ._markov_chains import SGHMC as SGHMC
from ._markov_chains import SGLD as SGLD
from ._pathfinder import Pathfinder as Pathfinder
from ._training import MAP as MAP
from ._training import SWAG as SWAG
from ._training import DeepEnsemble as DeepEnsemble
from ._training import MCDropout as MCDropout
from ._variational import MeanField as MeanField
from ._variational import negative_elbo as negative_elbo
