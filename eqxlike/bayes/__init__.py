"""Bayesian inference: objectives, predictions, and how far to believe them."""

from ._calibration import CalibrationBins as CalibrationBins
from ._calibration import accuracy as accuracy
from ._calibration import calibration_bins as calibration_bins
from ._calibration import categorical_nll as categorical_nll
from ._calibration import expected_calibration_error as expected_calibration_error
from ._calibration import gaussian_nll as gaussian_nll
from ._calibration import interval_coverage as interval_coverage
from ._calibration import root_mean_squared_error as root_mean_squared_error
from ._elbo import negative_elbo as negative_elbo
from ._predictive import CategoricalUncertainty as CategoricalUncertainty
from ._predictive import GaussianMoments as GaussianMoments
from ._predictive import (
    categorical_mixture_log_probabilities as categorical_mixture_log_probabilities,
)
from ._predictive import categorical_uncertainty as categorical_uncertainty
from ._predictive import gaussian_mixture_cdf as gaussian_mixture_cdf
from ._predictive import gaussian_mixture_interval as gaussian_mixture_interval
from ._predictive import gaussian_mixture_log_density as gaussian_mixture_log_density
from ._predictive import gaussian_mixture_moments as gaussian_mixture_moments
from ._predictive import gaussian_mixture_quantile as gaussian_mixture_quantile
from ._predictive import predict_samples as predict_samples
