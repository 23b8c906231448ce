"""What is traced: arrays, keys and mutable arrays."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.partition.node_types.kind import Kind, array

ARRAYS = {
    "jax-arrays": Kind(lambda: [jnp.ones(2), jnp.zeros(2), jnp.ones(3), jnp.ones(2, jnp.int32)]),
    "weak-types": Kind(lambda: [jnp.asarray(1), jnp.asarray(1.0), jnp.asarray(True)]),
    "numpy-arrays": Kind(
        lambda: [np.ones(2, np.float32), np.zeros(2, np.float32), np.ones((1, 2), np.int32)],
        mutate=lambda value: value.__iadd__(value.dtype.type(1)),
    ),
    "numpy-scalars": Kind(
        lambda: [np.float32(1), np.float32(-0.0), np.float32(0), np.int32(1), np.bool_(True)]
    ),
    "keys": Kind(lambda: [jax.random.key(0), jax.random.key(1), jax.random.key(0, impl="rbg")]),
    "refs": Kind(
        lambda: [jax.new_ref(array(1)), jax.new_ref(array(2))],
        lambda ref: ref[...],
        lambda ref: ref.__setitem__(..., 2 * ref[...]),
        is_returned=False,
    ),
}
