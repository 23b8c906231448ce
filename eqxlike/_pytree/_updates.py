"""Adding an optimiser's updates to a model."""

from typing import Any, TypeVar

from jax.tree_util import keystr
from jaxtyping import PyTree

from ._frozen import frozen_mask
from ._levels import walk
from ._prefix import map_prefix

Model = TypeVar("Model")


def apply_updates(model: Model, updates: PyTree) -> Model:
    """Adds `updates` to `model`, leaf by leaf; where an update is `None` the leaf stays.

    What `nn.freeze` froze stays too, whatever its update.

    **Arguments:**

    - `model`: a pytree of parameters.
    - `updates`: a pytree of the same structure, as `optax` returns it for filtered gradients.

    **Returns:** the new model. An update is not cast: it must promote with its parameter.

    **Raises:** `ValueError` if the structures differ.

    >>> apply_updates((1.0, "static"), (0.5, None))
    (1.5, 'static')
    """

    def add(update: Any, parameter: Any, frozen: PyTree[bool] = None) -> Any:
        if update is None or frozen is True:
            return parameter
        try:
            return parameter + update
        except Exception as error:
            path = next(path for path, node in walk(model) if node is parameter)
            error.add_note(f"The update that could not be added is that of model{keystr(path)}.")
            raise

    frozen = frozen_mask(model)
    models = (model,) if frozen is None else (model, frozen)
    return map_prefix(
        add,
        updates,
        *models,
        names=("updates", *("model" for _ in models)),
        advice="`updates` must have the structure of `model`, or `None` for a part that stays.",
        is_leaf=lambda node: node is None,
    )
