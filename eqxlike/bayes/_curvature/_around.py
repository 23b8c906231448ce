"""A posterior around its mode, as a function of those unknowns that are uncertain."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float

from ... import ad
from ..._module import Module, field
from .._inference import Problem
from ._parts import Part

# What a pass over the data may hold at once.
_BLOCK_BYTES = 64 * 2**20


class AroundMode(Module):
    """A posterior near its mode. `k` of its `d` unknowns vary, the others stay at the mode.

    - `mode`: where the density is greatest.
    - `parts`: the arrays that vary, in the order of the vector: some of the model, and all others.
    """

    problem: Problem
    mode: Float[Array, " d"]
    parts: tuple[Part, ...] = field(static=True)

    @property
    def indices(self) -> np.ndarray:
        """The places in the vector of the `k` unknowns."""
        return np.concatenate([np.arange(part.start, part.stop) for part in self.parts])

    @property
    def centre(self) -> Float[Array, " k"]:
        """Their values at the mode."""
        return self.mode[self.indices]

    def place(self, kind: str) -> slice:
        """Where the unknowns of the model, the likelihood or the prior stand among the `k`."""
        kinds = np.repeat([part.kind for part in self.parts], [part.size for part in self.parts])
        before = {"model": (), "likelihood": ("model",), "prior": ("model", "likelihood")}[kind]
        start = int(np.isin(kinds, before).sum())
        return slice(start, start + int((kinds == kind).sum()))

    def offset(self, part: Part) -> slice:
        """Where those of one array stand among the `k`."""
        start = sum(each.size for each in self.parts[: self.parts.index(part)])
        return slice(start, start + part.size)

    def vector(self, varying: Float[Array, " k"]) -> Float[Array, " d"]:
        """The vector of all unknowns."""
        return self.mode.at[self.indices].set(varying)

    @property
    def output(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype of what the network returns for one input."""
        target = self.problem.target

        def of_first() -> Any:
            network = target.model(self.problem.unknowns(self.mode))
            return network(jtu.tree_map(lambda leaf: leaf[0], target.data[0]))

        return jax.eval_shape(of_first)

    # --- functions of what varies ---

    def jacobian(self, x: Any) -> tuple[Float[Array, "C k"], Float[Array, " C"]]:
        """The derivatives of the `C` outputs for one input, and the outputs, at the mode."""
        target, mode = self.problem.target, self.problem.mode

        def outputs(varying: Float[Array, " k"]) -> tuple[Array, Array]:
            network = target.model(self.problem.unknowns(self.vector(varying)))
            found = network(x).reshape(-1).astype(self.mode.dtype)
            return found, found

        by = ad.Auto() if mode is None else mode
        return ad.jacobian(outputs, by, has_aux=True)(self.centre)

    def negative_log_prior(self, varying: Float[Array, " k"]) -> Float[Array, ""]:
        """Minus the log density of the unknowns in linked space before data."""
        target = self.problem.target
        unknowns, log_det = target.constrain(self.problem.unflatten(self.vector(varying)))
        return -(target.log_prior(unknowns) + log_det)

    def log_likelihood(self) -> Float[Array, ""]:
        """The log density of the data at the mode."""
        target = self.problem.target
        unknowns = self.problem.unknowns(self.mode)

        def of_example(data: Any) -> Array:
            one = jtu.tree_map(lambda leaf: leaf[None], data)
            return target.log_likelihood(unknowns, one)[0]

        size = min(256, target.num_data)
        return jnp.sum(jax.lax.map(of_example, target.data, batch_size=size))


def block_size(num_bytes: int, most: int) -> int:
    """How many things of so many bytes are worked on at once."""
    return max(1, min(most, _BLOCK_BYTES // max(1, num_bytes)))
