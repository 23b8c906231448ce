"""Layers and models, and what one does to a model as a whole."""

from ._bayesian import BayesianLinear as BayesianLinear
from ._bayesian import BayesianMLP as BayesianMLP
from ._bayesian import kl_divergence as kl_divergence
from ._bayesian import sample_posterior as sample_posterior
from ._dropout import Dropout as Dropout
from ._inference import inference_mode as inference_mode
from ._linear import Identity as Identity
from ._linear import Linear as Linear
from ._mlp import MLP as MLP
from ._sequential import Lambda as Lambda
from ._sequential import Sequential as Sequential
