"""Priors over the parameters of a model."""

from ._by_path import PriorByPath as PriorByPath
from ._by_path import prior_by_path as prior_by_path
from ._of_layers import prior_of_layers as prior_of_layers
from ._prior import IndependentPrior as IndependentPrior
from ._prior import Prior as Prior
from ._prior import as_prior as as_prior
from ._prior import fitted as fitted
from ._scales import HorseshoePrior as HorseshoePrior
from ._scales import NormalPrior as NormalPrior
from ._scales import horseshoe as horseshoe
from ._scales import normal as normal
