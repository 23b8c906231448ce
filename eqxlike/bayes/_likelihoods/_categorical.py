"""Several classes."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._numpyro import distributions
from ._likelihood import Likelihood, Struct, check_counts, check_output, check_range


class Categorical(Likelihood):
    """Targets 0 to C - 1. The network returns C logits."""

    def distribution(self, output: Any, unknowns: Mapping[str, Any]) -> Any:
        return distributions().Categorical(logits=output)

    def log_prob(self, output: Any, unknowns: Mapping[str, Any], y: Any) -> Float[Array, ""]:
        # The number of a class is an index, which a bool is not.
        return super().log_prob(output, unknowns, jnp.asarray(y).astype(jnp.int32))

    def check(self, output: Any, y: Struct) -> None:
        shape = getattr(output, "shape", ())
        wanted = shape if len(shape) == 1 and shape[0] > 1 else None
        check_output("Categorical", output, wanted, "(C,), a logit for each of C classes")
        check_counts("Categorical", y, "the number of a class")

    def check_values(self, output: Any, y: Any) -> None:
        (num_classes,) = output.shape
        check_range("Categorical", y, num_classes - 1, "as the network returns so many logits")
