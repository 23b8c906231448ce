"""The networks and losses of the cases, for eqxlike and for any library with the same names.

NumPy draws all weights, in tree order, so that every column has the same weights. The initial
values of the libraries are not used.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

LEARNING_RATE = 1e-4
"""The small rate keeps the weights near their start for any number of steps, so that no column gets
denormal numbers, which slow down some processors.
"""


def weights(sizes: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    """Weight and bias of each layer, in tree order, with the initialisation of He et al. (2015).

    **Arguments:**

    - `sizes`: number of features before the first layer, between layers, and after the last layer.
    - `seed`: the seed of the draws.

    **Returns:** for each layer, float32 arrays of shapes (features after, features before) and
    (features after,). Signals keep their size through any number of ReLU layers, so that outputs
    depend on all layers and not only on the last bias.
    """
    generator = np.random.default_rng(seed)
    arrays = []
    for before, after in itertools.pairwise(sizes):
        arrays.append(generator.normal(0, np.sqrt(2 / before), (after, before)))
        arrays.append(generator.normal(0, 0.1, (after,)))
    return [array.astype(np.float32) for array in arrays]


def normal(*shape: int, seed: int) -> jax.Array:
    """Standard normal data."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def mlp(library: Any, width: int, depth: int) -> Any:
    """The library's MLP with `depth` hidden layers. All layers have `width` features."""
    model = library.nn.MLP(width, width, width, depth, key=jax.random.key(0))
    return with_arrays(library, model, weights([width] * (depth + 2)))


def with_arrays(library: Any, model: Any, arrays: Sequence[Any]) -> Any:
    """Replaces the arrays of `model` by `arrays`, in tree order."""
    own, static = library.partition(model, library.is_array)
    leaves, treedef = jax.tree_util.tree_flatten(own)
    for place, (leaf, array) in enumerate(zip(leaves, arrays, strict=True)):
        if leaf.shape != array.shape:
            raise ValueError(f"array {place}: expected shape {leaf.shape}, got {array.shape}")
    new = jax.tree_util.tree_unflatten(treedef, [jnp.asarray(array) for array in arrays])
    return library.combine(new, static)


def forward(model: Any, x: jax.Array) -> jax.Array:
    """Applies a model to one example."""
    return model(x)


def forward_batch(model: Any, x: jax.Array) -> jax.Array:
    """Applies a model to a batch."""
    return jax.vmap(model)(x)


def mean_squared_error(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean squared error over a batch, of a model of one example."""
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def optimiser() -> optax.GradientTransformation:
    """The optimiser of all training steps."""
    return optax.adam(LEARNING_RATE)


def training_step(library: Any, loss: Any) -> Any:
    """The step `(model, opt_state, *data) -> (model, opt_state, loss)`."""
    adam = optimiser()

    def step(model: Any, opt_state: Any, *data: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradients = library.filter_value_and_grad(loss)(model, *data)
        updates, opt_state = adam.update(gradients, opt_state)
        return library.apply_updates(model, updates), opt_state, value

    return step


def training_state(library: Any, model: Any) -> tuple[Any, Any]:
    """The model and its optimiser state."""
    return model, optimiser().init(library.filter(model, library.is_inexact_array))
