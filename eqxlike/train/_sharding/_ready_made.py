"""The two shardings that most trainings need."""

from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, Mesh

from ..._numbers import whole_number
from ._rules import LongestAxis
from ._sharding import Sharding

AXIS = "data"
Devices = Sequence[jax.Device] | Mesh | AbstractMesh


def data_parallel(devices: Devices | None = None) -> Sharding:
    """Each device has the whole model and a part of each batch.

    **Arguments:**

    - `devices`: all that JAX has by default, in all processes. A mesh is taken as it is: examples
      are split over all its axes.

    **Raises:** `ValueError` for no devices.

    >>> import jax
    >>> from eqxlike import train
    >>> sharding = train.data_parallel()
    >>> sharding.mesh.size == jax.device_count(), sharding.batch.spec
    (True, P('data',))
    """
    mesh = _mesh_of(devices, "data_parallel")
    return Sharding(mesh, {}, batch_axes=mesh.axis_names)


def fsdp(devices: Devices | None = None, *, min_size: int = 2**16) -> Sharding:
    """Each device has a part of each batch, and a part of each array of the model and of what the
    optimiser keeps.

    Fully sharded data parallelism (Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward
    Training Trillion Parameter Models"). Within the step a parameter is brought together where it
    is needed; its gradient is summed over devices, and each updates its own part. Of an array the
    longest axis that divides is split, the first of those that are as long.

    The layers of an `nn.ScanStack` are brought together one at a time, forward and again on the way
    back, and their gradients summed so. The axis of layers is split only where no other divides.
    What a loss reads off `stack.layers` by itself is left to XLA.

    **Arguments:**

    - `devices`: all that JAX has by default, in all processes. A mesh is taken as it is: examples
      and arrays are split over all its axes.
    - `min_size`: arrays with fewer numbers are whole on each device, as are those of which no axis
      divides.

    **Raises:** `ValueError` for no devices, or a `min_size` that is not an integer of at least 0.

    >>> import jax
    >>> from eqxlike import nn, train
    >>> sharding = train.fsdp(min_size=16)
    >>> model = nn.Linear(4, 2 * jax.device_count(), key=jax.random.key(0))
    >>> sharding.of_model(model).weight.shard_shape(model.weight.shape)
    (2, 4)
    """
    min_size = whole_number(min_size, "min_size", least=0)
    mesh = _mesh_of(devices, "fsdp")
    names = mesh.axis_names

    return Sharding(mesh, LongestAxis(names, mesh.size, min_size), batch_axes=names)


def _mesh_of(devices: Devices | None, taker: str) -> Mesh | AbstractMesh:
    """**Raises:** `ValueError` for no devices."""
    if isinstance(devices, Mesh | AbstractMesh):
        return devices
    if isinstance(devices, jax.Device):
        raise TypeError(
            f"{taker} expected a sequence of devices, got one, {devices!r}: put it in a list."
        )
    devices = jax.devices() if devices is None else list(devices)
    if not devices:
        raise ValueError(f"{taker} needs at least one device, got none.")
    return jax.make_mesh(
        (len(devices),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,), devices=devices
    )
