"""Layers whose weights are distributions."""

from ._conv import BayesianConv as BayesianConv
from ._gaussian_layer import Estimator as Estimator
from ._linear import BayesianLinear as BayesianLinear
from ._mlp import BayesianMLP as BayesianMLP
from ._parts import bayesian_from_parts as bayesian_from_parts
from ._parts import layers_with_estimators as layers_with_estimators
from ._parts import linear_or_conv as linear_or_conv
from ._parts import posterior_mean as posterior_mean
from ._parts import posterior_scales as posterior_scales
from ._parts import prior_scales as prior_scales
from ._posterior import BayesianLayer as BayesianLayer
from ._posterior import kl_divergence as kl_divergence
from ._posterior import sample_posterior as sample_posterior
from ._posterior import with_perturbation as with_perturbation
