"""Metrics: pure functions from a batch to a `Mean`.

`train.make_evaluate` merges the `Mean`s of all batches on the device.
"""

from ._metrics import Mean as Mean
from ._metrics import _itself as _itself  # pickles of a `Mean` name it
from ._metrics import accuracy as accuracy
from ._metrics import mean as mean
from ._metrics import perplexity as perplexity
from ._metrics import rmse as rmse
