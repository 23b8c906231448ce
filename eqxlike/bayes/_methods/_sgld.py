"""Stochastic gradient Langevin dynamics."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, PRNGKeyArray

from .._blackjax import blackjax
from ._stochastic_gradient import Place, StochasticGradient


class SGLD(StochasticGradient):
    """Stochastic gradient Langevin dynamics: gradient descent with noise of the right size.

    A step goes `step_size` times the gradient of the log density over `N`, the number of examples,
    and by normal noise of variance `2 * step_size * temperature / N` (Welling and Teh, 2011,
    "Bayesian Learning via Stochastic Gradient Langevin Dynamics"; BlackJAX's implementation).
    It serves data that is too much for one gradient. It is biased: of a normal posterior of
    precision `P` it finds the covariance `(P (I - step_size P / (2 N)))^-1`, and minibatches widen
    it further. A step size that is too large leads to infinity, one that is too small nowhere.

    - `num_samples`: draws that each chain keeps.
    - `num_warmup`: steps before that.
    - `chains`: how many there are.
    - `thin`: of how many steps one is kept.
    - `step_size`: as a learning rate: of gradient descent on minus the log density over `N`. It is
      the same for more data of the same kind.
    - `decay`: the step size of step `t` is `step_size * (1 + t / num_warmup)**-decay`; 0 for a
      constant one. All draws count alike.
    - `batch_size`: examples in a gradient, drawn with replacement; all of them by default.
    - `temperature`: the posterior is found to the power of `1 / temperature`.
    - `descent_steps`: of Adam, from where the chain begins to a mode, before its first step.

    >>> from eqxlike import bayes
    >>> method = bayes.SGLD(step_size=1e-3, batch_size=64)
    """

    def move(
        self,
        key: PRNGKeyArray,
        place: Place,
        gradient: Callable[[Place, Any], Place],
        batch: Any,
        step_size: Array,
        num_data: int,
    ) -> Place:
        kernel = blackjax().sgmcmc.sgld.build_kernel()
        return kernel(key, place, gradient, batch, step_size / num_data, self.temperature)
