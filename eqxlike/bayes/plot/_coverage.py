"""Whether intervals hold what they say."""

from typing import Any

import numpy as np
from jaxtyping import Array, Float

from ..._figures import BLUE, GREY, tidy
from .._mixtures import Mixture, check_mixture
from ._axes import add_legend, axes_for, tint
from ._binomial import binomial_quantile

_LEVELS = np.linspace(0, 1, 101)
_BAND = 0.9


def coverage(
    prediction: Mixture, y: Float[Array, " N"], *, ax: Any = None, legend: bool | str = True
) -> Any:
    """How many observations the central interval of each level holds.

    On the diagonal are intervals that hold as many as they say; below it they are too narrow, above
    it too wide. The grey band holds 90% of what N observations give at each level if they hold as
    many as they say.

    **Arguments:**

    - `prediction`: of each observation.
    - `y`: shape `(N,)`.
    - `ax`: axes of matplotlib; those of a new figure if there are none.
    - `legend`: whether there is one, below the axes; or where in them, in matplotlib's words, such
      as `"upper left"`.

    **Returns:** the axes.

    **Raises:** `ImportError` if matplotlib is not installed; `TypeError` if `prediction` is no
    mixture; `ValueError` for other shapes, or no
    observation.

    >>> import jax.numpy as jnp, numpyro.distributions as dist
    >>> axes = coverage(Mixture(dist.Normal(jnp.zeros((1, 3)), 1.0)), jnp.array([-2.0, 0.1, 0.9]))
    >>> axes.get_xlabel()
    'probability of the central interval'
    """
    check_mixture(prediction, Mixture, "plot.coverage")
    if np.ndim(y) != 1 or np.shape(y) != prediction.batch_shape or len(y) == 0:
        raise ValueError(
            "coverage expects y of shape (N,) and a prediction of as many numbers, got "
            f"{np.shape(y)} and {prediction.batch_shape}."
        )
    axes = axes_for(ax, "plot.coverage", 4.8, 4.6)
    # The level of the central interval at whose end each observation lies.
    reached = np.abs(2 * np.asarray(prediction.cdf(y)) - 1)
    observed = np.mean(reached[:, None] <= _LEVELS, axis=0)
    ends = [
        binomial_quantile(tail, len(y), _LEVELS) / len(y)
        for tail in ((1 - _BAND) / 2, (1 + _BAND) / 2)
    ]
    axes.fill_between(
        _LEVELS, *ends, color=tint(GREY, 0.3), lw=0, label=f"{_BAND:.0%} of calibrated predictions"
    )
    axes.plot([0, 1], [0, 1], "--", color=GREY, linewidth=1, label="as claimed")
    axes.plot(_LEVELS, observed, color=BLUE, linewidth=1.8, label="observed")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_aspect("equal")
    axes.set_xlabel("probability of the central interval")
    axes.set_ylabel("fraction of observations inside")
    inside = np.mean(reached <= 0.9)
    axes.set_title(f"90% intervals hold {inside:.1%} of {len(y):,}", fontsize=10)
    tidy(axes)
    add_legend(axes, legend)
    return axes
