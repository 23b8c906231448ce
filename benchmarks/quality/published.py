"""Published figures for data sets that users may have as CSV files."""

from collections.abc import Mapping
from typing import NamedTuple


class Published(NamedTuple):
    """A figure for a data set: the mean over 20 splits with a tenth for testing."""

    method: str
    rmse: float
    nll: float


ENSEMBLES = "deep ensembles"
DROPOUT = "MC dropout"
BACKPROPAGATION = "probabilistic backpropagation"

SOURCES: Mapping[str, str] = {
    BACKPROPAGATION: "Hernández-Lobato and Adams (2015), Probabilistic Backpropagation for "
    "Scalable Learning of Bayesian Neural Networks",
    DROPOUT: "Gal and Ghahramani (2016), Dropout as a Bayesian Approximation",
    ENSEMBLES: "Lakshminarayanan, Pritzel and Blundell (2017), Simple and Scalable Predictive "
    "Uncertainty Estimation using Deep Ensembles",
}

PUBLISHED: Mapping[str, tuple[Published, ...]] = {
    "boston": (
        Published(ENSEMBLES, 3.28, 2.41),
        Published(DROPOUT, 2.97, 2.46),
        Published(BACKPROPAGATION, 3.01, 2.57),
    ),
    "concrete": (
        Published(ENSEMBLES, 6.03, 3.06),
        Published(DROPOUT, 5.23, 3.04),
        Published(BACKPROPAGATION, 5.67, 3.16),
    ),
    "energy": (
        Published(ENSEMBLES, 2.09, 1.38),
        Published(DROPOUT, 1.66, 1.99),
        Published(BACKPROPAGATION, 1.80, 2.04),
    ),
    "yacht": (
        Published(ENSEMBLES, 1.58, 1.18),
        Published(DROPOUT, 1.11, 1.55),
        Published(BACKPROPAGATION, 1.02, 1.63),
    ),
}


def published(name: str) -> tuple[Published, ...]:
    """The published figures for a data set, found by the start of its name, ignoring case."""
    return next((found for stem, found in PUBLISHED.items() if name.lower().startswith(stem)), ())
