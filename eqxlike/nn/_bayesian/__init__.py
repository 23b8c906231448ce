"""Bayesian layers, whose weights have a posterior and a prior distribution."""

from ._gaussian_layer import BayesianLayer as BayesianLayer
from ._gaussian_layer import Estimator as Estimator
from ._gaussian_layer import draw_gaussian as draw_gaussian
from ._gaussian_layer import sum_in_widest as sum_in_widest
from ._layers import BayesianConv as BayesianConv
from ._layers import BayesianLinear as BayesianLinear
from ._layers import bayesian_from_parts as bayesian_from_parts
from ._layers import layers_with_estimators as layers_with_estimators
from ._layers import linear_or_conv as linear_or_conv
from ._layers import posterior_scales as posterior_scales
from ._layers import prior_scales as prior_scales
