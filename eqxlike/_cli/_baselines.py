"""Baselines that nobody here wrote: scikit-learn's linear models.

How much to regularise is chosen by the validation part; the model is then fitted to the whole
training part, as the plain network is.
"""

import jax.numpy as jnp
import numpy as np

from ._data import Data, Part
from ._evaluate import Evaluation, evaluate_classification, evaluate_regression

ALPHAS = tuple(10.0**power for power in range(-2, 5))
"""The penalties on ridge regression's weights to choose from."""

INVERSE_PENALTIES = tuple(10.0**power for power in range(-2, 2))
"""The inverse penalties on logistic regression's weights to choose from."""


def baseline_name(data: Data) -> str:
    """The name of the baseline of a data set."""
    return "ridge" if data.is_regression else "logistic"


def evaluate_baseline(data: Data) -> Evaluation:
    """Fits the baseline of a data set and evaluates it on the test part."""
    return _ridge(data) if data.is_regression else _logistic(data)


def _ridge(data: Data) -> Evaluation:
    """Ridge regression, as a Gaussian with the variance of its residuals in training."""
    from sklearn.linear_model import Ridge

    def fitted(part: Part, alpha: float) -> Ridge:
        return Ridge(alpha=alpha).fit(part.x, part.y)

    fit_part, validation = data.validation_split()

    def squared_error(alpha: float) -> float:
        residuals = validation.y - fitted(fit_part, alpha).predict(validation.x)
        return float(np.mean(residuals**2))

    model = fitted(data.train, min(ALPHAS, key=squared_error))
    residuals = data.train.y - model.predict(data.train.x)
    degrees_of_freedom = len(residuals) - data.train.x.shape[1] - 1
    noise = np.sqrt(np.sum(residuals**2) / degrees_of_freedom, dtype=np.float32)
    means = model.predict(data.test.x).astype(np.float32)
    return evaluate_regression(data, jnp.asarray(means)[None], jnp.asarray(noise))


def _logistic(data: Data) -> Evaluation:
    """Multinomial logistic regression with an L2 penalty."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss

    def fitted(part: Part, inverse_penalty: float) -> LogisticRegression:
        # lbfgs, the default, makes many small calls of a threaded BLAS: ten times faster on idle
        # cores, ten times slower on busy ones.
        model = LogisticRegression(
            C=inverse_penalty, solver="saga", max_iter=10_000, random_state=0
        )
        return model.fit(part.x, part.y)

    fit_part, validation = data.validation_split()

    def nll(inverse_penalty: float) -> float:
        model = fitted(fit_part, inverse_penalty)
        return log_loss(validation.y, model.predict_proba(validation.x), labels=model.classes_)

    model = fitted(data.train, min(INVERSE_PENALTIES, key=nll))
    log_probabilities = model.predict_log_proba(data.test.x).astype(np.float32)
    return evaluate_classification(data, jnp.asarray(log_probabilities))
