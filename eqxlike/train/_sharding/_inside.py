"""What a training step over several devices does that one over a single device does not."""

from typing import Any

from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray

from ..._pytree import is_array
from ..._transforms import note_check
from .._evaluate import Evaluate, Evaluation
from ._shard import place
from ._sharding import Sharding


def evaluate_sharded(evaluate: Evaluate, sharding: Sharding) -> Evaluate:
    """The same loss, with the model brought together and the batch split.

    The transpose of a constraint is that constraint: gradients are summed over devices where the
    parameter is whole, and each device keeps its part where it is split. Left to itself, XLA may
    split the work along features instead, and exchange activations.
    """

    def evaluated(model: Any, model_state: Any, batch: Any, key: PRNGKeyArray) -> Evaluation:
        if _share_threads(sharding):
            # As for a check: the call waits for its result, also one of which it is a part.
            note_check()
        model = place(model, sharding.of_model(model))
        model = place(model, sharding.of_gathered(model))
        batch = place(batch, sharding.of_batch(batch))
        evaluation = evaluate(model, model_state, batch, key)
        loss = evaluation.loss
        return evaluation._replace(loss=place(loss, sharding.whole if is_array(loss) else None))

    return evaluated


def _share_threads(sharding: Sharding) -> bool:
    """Whether steps must not be dispatched ahead of each other.

    XLA's devices on CPU share threads. One that is a step ahead of the others, and waits for them,
    may take the thread that they need: a loop of a few hundred steps hung for good.
    """
    mesh = sharding.mesh
    return isinstance(mesh, Mesh) and mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
