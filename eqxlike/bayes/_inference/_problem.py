"""What a method works on: the unknowns of a posterior as one vector in linked space."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jaxtyping import Array, Float, PRNGKeyArray

from ..._module import Module, field
from ...ad import Mode, differentiate_with
from .._posterior import Data, Posterior
from .._unknowns import Unknowns

Vector = Float[Array, " d"]


class Problem(Module):
    """A posterior over a vector of `d` numbers in linked space.

    - `target`: the posterior that is to be found.
    - `mode`: how its density is differentiated; `None` for reverse mode.
    """

    target: Posterior
    mode: Mode | None
    _structs: tuple[jax.ShapeDtypeStruct, ...] = field(static=True)
    _treedef: Any = field(static=True)

    def __init__(self, target: Posterior, mode: Mode | None = None):
        self.target = target
        self.mode = mode
        linked = jax.eval_shape(lambda key: target.unconstrain(target.initial(key=key)), jr.key(0))
        structs, self._treedef = jtu.tree_flatten(linked)
        self._structs = tuple(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in structs)

    @property
    def size(self) -> int:
        """`d`."""
        return sum(math.prod(each.shape) for each in self._structs)

    @property
    def dtype(self) -> Any:
        """That of the vector."""
        with jax.numpy_dtype_promotion("standard"):
            return jnp.result_type(*(each.dtype for each in self._structs))

    # --- vectors and trees ---

    def flatten(self, linked: Unknowns) -> Vector:
        """Unknowns in linked space as a vector."""
        return jnp.concatenate(
            [leaf.reshape(-1).astype(self.dtype) for leaf in jtu.tree_leaves(linked)]
        )

    def unflatten(self, vector: Vector) -> Unknowns:
        """A vector as unknowns in linked space."""
        leaves, start = [], 0
        for struct in self._structs:
            stop = start + math.prod(struct.shape)
            leaves.append(vector[start:stop].reshape(struct.shape).astype(struct.dtype))
            start = stop
        return jtu.tree_unflatten(self._treedef, leaves)

    def unknowns(self, vector: Vector) -> Unknowns:
        """A vector as unknowns in standard space."""
        return self.target.constrain(self.unflatten(vector))[0]

    # --- densities ---

    def log_density(self, vector: Vector) -> Float[Array, ""]:
        """The log density of the posterior, in nats, up to a constant."""
        return self.differentiable(lambda vector: self._density(vector, None))(vector)

    def batch_log_density(self, vector: Vector, batch: Data | None) -> Float[Array, ""]:
        """Its estimate from a batch, or its value where there is none."""
        return self.differentiable(lambda vector: self._density(vector, batch))(vector)

    def _density(self, vector: Vector, batch: Data | None) -> Float[Array, ""]:
        linked = self.unflatten(vector)
        if batch is None:
            return self.target.log_density(linked, linked=True)
        return self.target.minibatch_log_density(linked, batch, linked=True)

    def differentiable(self, function: Any) -> Any:
        """A function of a vector, that is differentiated by the mode."""
        return function if self.mode is None else differentiate_with(function, self.mode)

    def batch(self, key: PRNGKeyArray, size: int | None) -> Data | None:
        """Examples drawn with replacement; `None` stands for all of them."""
        if size is None:
            return None
        chosen = jr.randint(key, (size,), 0, self.target.num_data)
        return jtu.tree_map(lambda array: array[chosen], self.target.data)

    # --- where to begin ---

    def initial(self, key: PRNGKeyArray) -> Vector:
        """The parameters of the model as they are, and draws from the priors of the rest."""
        return self.flatten(self.target.unconstrain(self.target.initial(key=key)))

    def redrawn(self, key: PRNGKeyArray) -> Vector:
        """Other parameters that are as likely at the start of training: each array is shuffled.

        The numbers of one array mostly come from one distribution, whichever it was.
        """
        initial_key, key = jr.split(key)
        linked = self.target.unconstrain(self.target.initial(key=initial_key))
        leaves, treedef = jtu.tree_flatten(linked.model)
        keys = jr.split(key, len(leaves))
        shuffled = [
            jr.permutation(key, leaf.reshape(-1)).reshape(leaf.shape)
            for key, leaf in zip(keys, leaves, strict=True)
        ]
        model = jtu.tree_unflatten(treedef, shuffled)
        return self.flatten(Unknowns(model, linked.likelihood, linked.prior))

    def spread(self, vector: Vector) -> Vector:
        """How far the numbers of the array differ that each number is in; 1 where they do not."""
        linked = self.unflatten(vector)
        return self.flatten(
            jtu.tree_map(lambda leaf: jnp.broadcast_to(_spread(leaf), leaf.shape), linked)
        )

    def dispersed(self, key: PRNGKeyArray) -> Vector:
        """Unknowns further apart than those of the posterior should be, for chains to begin with.

        Parameters of the model are shuffled and moved by as much as they differ among themselves;
        the others lie between -2 and 2 in linked space, as Stan has them.
        """
        shuffle_key, key = jr.split(key)
        linked = self.unflatten(self.redrawn(shuffle_key))
        model, others = linked.model, (linked.likelihood, linked.prior)
        model_key, others_key = jr.split(key)

        def moved(key: PRNGKeyArray, leaf: Array) -> Array:
            return leaf + _spread(leaf) * jr.uniform(key, leaf.shape, leaf.dtype, -2, 2)

        def drawn(key: PRNGKeyArray, leaf: Array) -> Array:
            return jr.uniform(key, leaf.shape, leaf.dtype, -2, 2)

        likelihood, prior = _with_keys(drawn, others_key, others)
        return self.flatten(Unknowns(_with_keys(moved, model_key, model), likelihood, prior))


def _spread(leaf: Array) -> Array:
    """How far the numbers of an array differ; 1 where they do not."""
    spread = jnp.std(leaf)
    return jnp.where(spread > 0, spread, 1)


def _with_keys(function: Any, key: PRNGKeyArray, tree: Any) -> Any:
    leaves, treedef = jtu.tree_flatten(tree)
    keys = jr.split(key, max(1, len(leaves)))
    return jtu.tree_unflatten(
        treedef, [function(*pair) for pair in zip(keys, leaves, strict=False)]
    )
