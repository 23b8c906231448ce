"""Bayesian layers, whose weights have a posterior and a prior distribution."""

from ._gaussian_layer import BayesianLayer as BayesianLayer
from ._gaussian_layer import Estimator as Estimator
from ._gaussian_layer import sum_in_widest as sum_in_widest
from ._layers import BayesianConv as BayesianConv
from ._layers import BayesianLinear as BayesianLinear
from ._parts import bayesian_from_parts as bayesian_from_parts
from ._parts import layers_with_estimators as layers_with_estimators
from ._parts import linear_or_conv as linear_or_conv
from ._parts import posterior_scales as posterior_scales
from ._parts import prior_scales as prior_scales
