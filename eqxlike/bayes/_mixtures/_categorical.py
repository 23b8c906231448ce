"""Equal mixtures of categorical distributions."""

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float, Int

from ..._module import Module


class CategoricalMixture(Module):
    """The mixture, with equal weights, of `S` categorical distributions over `C` classes.

    Probabilities are averaged, not logits. The entropy has two parts (Depeweg, Hernández-Lobato,
    Doshi-Velez and Udluft, 2018, "Decomposition of Uncertainty in Bayesian Deep Learning").

    - `logits`: shape `(S, *B, C)`.

    >>> import jax.numpy as jnp
    >>> mixture = CategoricalMixture(jnp.array([[[200.0, 0.0]], [[0.0, 200.0]]]))
    >>> mixture.probabilities.tolist()
    [[0.5, 0.5]]
    >>> round(float(mixture.epistemic[0]), 4), round(float(mixture.aleatoric[0]), 4)
    (0.6931, 0.0)
    """

    logits: Float[Array, "S *B C"]

    def __check_init__(self):
        if jnp.ndim(self.logits) < 2:
            raise ValueError(
                "CategoricalMixture expects logits of shape (S, *B, C), got shape "
                f"{jnp.shape(self.logits)}."
            )

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The shape of what is predicted, `*B`."""
        return jnp.shape(self.logits)[1:-1]

    @property
    def log_probabilities(self) -> Float[Array, "*B C"]:
        """The logarithms of `probabilities`."""
        terms = jax.nn.log_softmax(self.logits, axis=-1)
        return logsumexp(terms, axis=0) - jnp.log(jnp.asarray(terms.shape[0], terms.dtype))

    @property
    def probabilities(self) -> Float[Array, "*B C"]:
        """The probability of each class."""
        return jnp.exp(self.log_probabilities)

    def log_prob(self, y: Int[Array, "*B"]) -> Float[Array, "*B"]:
        """The log probability of the classes `y`, in nats.

        **Raises:** `ValueError` if `y` has another shape, also where it would broadcast.
        """
        terms = self.component_log_prob(y)
        return logsumexp(terms, axis=0) - jnp.log(jnp.asarray(terms.shape[0], terms.dtype))

    def component_log_prob(self, y: Int[Array, "*B"]) -> Float[Array, "S *B"]:
        """The log probability of the classes `y` under each component, in nats, as
        `metrics.psis_loo` takes it.

        **Raises:** `ValueError` if `y` has another shape, also where it would broadcast.
        """
        if jnp.shape(y) != self.batch_shape:
            raise ValueError(
                "CategoricalMixture.log_prob expects y of the shape that is predicted, "
                f"{self.batch_shape}, got {jnp.shape(y)}."
            )
        terms = jax.nn.log_softmax(self.logits, axis=-1)
        # A boolean is one of two classes, and no index.
        classes = jnp.asarray(y)
        classes = classes.astype(jnp.int32) if classes.dtype == bool else classes
        return jnp.take_along_axis(terms, classes[None, ..., None], axis=-1)[..., 0]

    @property
    def entropy(self) -> Float[Array, "*B"]:
        """The entropy in nats, `epistemic + aleatoric`."""
        return _entropy(self.log_probabilities)

    @property
    def epistemic(self) -> Float[Array, "*B"]:
        """The mutual information of class and component, which more data removes, in nats."""
        return jnp.maximum(self.entropy - self.aleatoric, 0)

    @property
    def aleatoric(self) -> Float[Array, "*B"]:
        """The mean entropy of the components, which no data removes, in nats."""
        return jnp.mean(_entropy(jax.nn.log_softmax(self.logits, axis=-1)), axis=0)


def _entropy(log_probabilities: Float[Array, "*B C"]) -> Float[Array, "*B"]:
    # 0 log 0 = 0: where the log underflowed to -inf the product would be NaN.
    probabilities = jnp.exp(log_probabilities)
    is_positive = probabilities > 0
    terms = jnp.where(is_positive, probabilities * jnp.where(is_positive, log_probabilities, 0), 0)
    return -jnp.sum(terms, axis=-1)
