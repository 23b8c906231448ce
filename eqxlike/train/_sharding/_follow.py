"""Which parameter each array of an optimiser's state belongs to."""

from collections.abc import Mapping

import jax
from jax.sharding import PartitionSpec

from ._paths import Keys


def followed(
    state: Mapping[Keys, jax.ShapeDtypeStruct], parameters: Mapping[Keys, jax.ShapeDtypeStruct]
) -> dict[Keys, Keys | None]:
    """The parameter for each array of an optimiser's state; `None` for what belongs to none.

    Moments hang in the state as the parameters do in the model: below some node of the state every
    path is a path of the model. The highest such node is meant, so that a parameter `mu.weight`
    beside one called `weight` is not taken for its moment. Optimisers that see a part of the model
    have fewer arrays there. An array belongs to its parameter if its last axes are the
    parameter's, as those of a history are, and a factor of a moment is not.
    """
    strangers = {
        keys[:length]
        for keys in state
        for length in range(len(keys) + 1)
        if keys[length:] not in parameters
    }
    found: dict[Keys, Keys | None] = {}
    for keys, leaf in state.items():
        ends = (keys[n:] for n in range(len(keys) + 1) if keys[:n] not in strangers)
        parameter = next(ends, None)
        is_alike = parameter is not None and _ends_in(leaf.shape, parameters[parameter].shape)
        found[keys] = parameter if is_alike else None
    return found


def spec_like(
    spec: PartitionSpec, parameter: jax.ShapeDtypeStruct, leaf: jax.ShapeDtypeStruct
) -> PartitionSpec:
    """The split of an array whose last axes are those of its parameter."""
    return PartitionSpec(*[None] * (len(leaf.shape) - len(parameter.shape)), *spec)


def _ends_in(shape: tuple[int, ...], end: tuple[int, ...]) -> bool:
    return len(shape) >= len(end) and shape[len(shape) - len(end) :] == end
