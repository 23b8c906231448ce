"""Adding an optimiser's updates to a model."""

from typing import Any

import jax.tree_util as jtu
from jaxtyping import PyTree


def apply_updates(model: PyTree, updates: PyTree) -> PyTree:
    """Adds `updates` to `model`, leaf by leaf; where an update is `None` the leaf stays.

    **Arguments:**

    - `model`: a pytree of parameters.
    - `updates`: a pytree of the same structure, as `optax` returns it for filtered gradients.

    **Returns:** the new model. An update is not cast: it must promote with its parameter.

    >>> apply_updates((1.0, "static"), (0.5, None))
    (1.5, 'static')
    """
    return jtu.tree_map(_add, updates, model, is_leaf=lambda node: node is None)


def _add(update: Any, parameter: Any) -> Any:
    return parameter if update is None else parameter + update
