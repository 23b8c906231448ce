"""Layers whose weights are distributions."""

from ._conv import BayesianConv as BayesianConv
from ._linear import BayesianLinear as BayesianLinear
from ._linear import BayesianMLP as BayesianMLP
from ._posterior import BayesianLayer as BayesianLayer
from ._posterior import kl_divergence as kl_divergence
from ._posterior import sample_posterior as sample_posterior
