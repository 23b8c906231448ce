"""Metrics of predictions: accuracy, proper scores and calibration."""

import typing as _typing

from ..._names import former_names as _former_names
from ._classes import CalibrationBins as CalibrationBins
from ._classes import accuracy as accuracy
from ._classes import brier as brier
from ._classes import calibration_bins as calibration_bins
from ._classes import ece as ece
from ._scores import coverage as coverage
from ._scores import crps as crps
from ._scores import nll as nll
from ._scores import rmse as rmse
from ._scores import sharpness as sharpness

if not _typing.TYPE_CHECKING:
    __getattr__ = _former_names(__name__)
