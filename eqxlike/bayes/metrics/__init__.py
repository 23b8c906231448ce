"""Metrics of predictions: accuracy, proper scores and calibration."""

import typing as _typing

from ..._names import former_names as _former_names
from ._metrics import CalibrationBins as CalibrationBins
from ._metrics import accuracy as accuracy
from ._metrics import brier as brier
from ._metrics import calibration_bins as calibration_bins
from ._metrics import coverage as coverage
from ._metrics import crps as crps
from ._metrics import ece as ece
from ._metrics import nll as nll
from ._metrics import rmse as rmse
from ._metrics import sharpness as sharpness

if not _typing.TYPE_CHECKING:
    __getattr__ = _former_names(__name__)
