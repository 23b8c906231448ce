"""Checks that a prediction is a mixture."""

from typing import Any

from ._categorical import CategoricalMixture
from ._mixture import Mixture


def check_mixture(
    prediction: Any, kind: type[Mixture] | type[CategoricalMixture], caller: str
) -> None:
    """Raises `TypeError`, in the name of `caller`, unless `prediction` is of that kind."""
    if not isinstance(prediction, kind):
        one = "dist.Normal(mean[None], scale)" if kind is Mixture else "logits[None]"
        raise TypeError(
            f"{caller} expects a prediction that is a bayes.{kind.__name__}, got "
            f"{type(prediction).__name__}. That of one network is bayes.{kind.__name__}({one})."
        )
