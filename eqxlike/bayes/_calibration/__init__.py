"""Corrections of predictions, fitted on examples that were held out from training."""

from ._conformal_intervals import ConformalIntervals as ConformalIntervals
from ._conformal_intervals import conformal_intervals as conformal_intervals
from ._conformal_sets import ConformalSets as ConformalSets
from ._conformal_sets import conformal_sets as conformal_sets
from ._temperature import TemperatureScaling as TemperatureScaling
from ._temperature import temperature_scaling as temperature_scaling
