"""Bayesian inference: objectives, predictions, and how far to believe them."""

from . import metrics as metrics
from ._calibration import ConformalIntervals as ConformalIntervals
from ._calibration import ConformalSets as ConformalSets
from ._calibration import TemperatureScaling as TemperatureScaling
from ._calibration import conformal_intervals as conformal_intervals
from ._calibration import conformal_sets as conformal_sets
from ._calibration import temperature_scaling as temperature_scaling
from ._elbo import negative_elbo as negative_elbo
from ._likelihoods import Bernoulli as Bernoulli
from ._likelihoods import Categorical as Categorical
from ._likelihoods import Gaussian as Gaussian
from ._likelihoods import Likelihood as Likelihood
from ._likelihoods import Poisson as Poisson
from ._likelihoods import StudentT as StudentT
from ._mixtures import CategoricalMixture as CategoricalMixture
from ._mixtures import Mixture as Mixture
from ._posterior import Posterior as Posterior
from ._predictive import predict_samples as predict_samples
from ._priors import Prior as Prior
from ._priors import horseshoe as horseshoe
from ._priors import normal as normal
from ._priors import prior_by_path as prior_by_path
from ._unknowns import Unknowns as Unknowns
