"""What the structures of a curvature have in common."""

import abc

from jaxtyping import Array, Float

from ..._module import Module


class Normal(Module):
    """A normal distribution of `k` numbers around zero, by its precision."""

    @property
    @abc.abstractmethod
    def log_det_precision(self) -> Float[Array, ""]:
        """The log determinant of the precision."""

    @abc.abstractmethod
    def scaled(self, noise: Float[Array, "S k"]) -> Float[Array, "S k"]:
        """Draws, from draws of the standard normal distribution."""

    @abc.abstractmethod
    def whitened(self, rows: Float[Array, "r k"]) -> Float[Array, "r k"]:
        """Rows `W` for rows `J`, such that `W W^T` is the covariance of `J` times a draw."""


class Curvature(Module):
    """The Hessian of minus the log density at the mode, as far as a structure keeps it.

    The prior is part of it. It may have eigenvalues that are not positive.
    """

    @abc.abstractmethod
    def likelihood_eigenvalues(self, prior_precision: Float[Array, ""]) -> Float[Array, " p"]:
        """The eigenvalues `e`, such that of the precision of the `p` parameters of the model, which
        have a prior of one precision `t`, the log determinant is `sum(log(e + t))`.
        """

    @abc.abstractmethod
    def normal(self, added: Float[Array, ""]) -> Normal:
        """The distribution with this precision.

        **Arguments:**

        - `added`: to the precision of each parameter of the model.
        """
