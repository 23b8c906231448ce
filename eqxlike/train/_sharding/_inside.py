"""What programs over several devices do that one for a single device does not."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax.tree_util as jtu
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray

from ..._pytree import is_array
from ..._transforms import note_check
from .._evaluate import Evaluate, Evaluation
from ._rules import gathered_by_layer, gathering
from ._sharding import Sharding, place

Model = TypeVar("Model")
Measure = Callable[..., Any]


def evaluate_sharded(evaluate: Evaluate, sharding: Sharding) -> Evaluate:
    """The same loss, with the model brought together and the batch split.

    The transpose of a constraint is that constraint: gradients are summed over devices where the
    parameter is whole, and each device keeps its part where it is split.
    """

    def evaluated(model: Any, model_state: Any, batch: Any, key: PRNGKeyArray) -> Evaluation:
        batch = place(batch, sharding.of_batch(batch))
        evaluation = evaluate(_together(model, sharding), model_state, batch, key)
        loss = evaluation.loss
        return evaluation._replace(loss=place(loss, sharding.whole if is_array(loss) else None))

    return evaluated


def measure_sharded(measure: Measure, sharding: Sharding) -> Measure:
    """The same metrics, with the model brought together and the batch, which comes last, split so
    far as it divides.
    """

    def measured(model: Any, *between_and_batch: Any) -> Any:
        *between, batch = between_and_batch
        batch = place(batch, sharding.of_batch(batch, must_divide=False))
        return measure(_together(model, sharding), *between, batch)

    return measured


def _together(model: Model, sharding: Sharding) -> Model:
    """The model, each array of it brought together from the devices that split a batch: at once,
    or, where layers are stored stacked, as the loop over these comes to it.

    Left to itself, XLA may split the work along features instead, and exchange activations.
    """
    if _share_threads(sharding):
        # As for a check: the call waits for its result, also one of which it is a part.
        note_check()
    split, together = sharding.of_model(model), sharding.of_gathered(model)
    later = gathered_by_layer(model, split, together)
    at_once = jtu.tree_map_with_path(lambda keys, where: None if keys in later else where, together)
    return gathering(place(place(model, split), at_once), split, together)


def _share_threads(sharding: Sharding) -> bool:
    """Whether calls must not be dispatched ahead of each other.

    XLA's devices on CPU share threads. One that is a step ahead of the others, and waits for them,
    may take the thread that they need: a loop of a few hundred steps hung for good.
    """
    mesh = sharding.mesh
    return isinstance(mesh, Mesh) and mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
