"""Measures of predictions: how good they are, and whether their probabilities hold."""

from ._calibration import CalibrationBins as CalibrationBins
from ._calibration import calibration_bins as calibration_bins
from ._calibration import ece as ece
from ._classification import accuracy as accuracy
from ._classification import brier as brier
from ._crps import crps as crps
from ._nll import nll as nll
from ._psis_loo import LeaveOneOut as LeaveOneOut
from ._psis_loo import psis_loo as psis_loo
from ._regression import coverage as coverage
from ._regression import rmse as rmse
from ._regression import sharpness as sharpness
