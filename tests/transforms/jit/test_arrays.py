"""`filter_jit` accepts the same kinds of arrays as `jax.jit`."""

import jax
import jax.numpy as jnp
import numpy as np

from eqxlike import filter_jit
from tests.partition.models import Pair
from tests.transforms.models import SPLIT


def deleted():
    array = jnp.ones(4)
    array.delete()
    return array


KINDS = {
    "float": lambda: jnp.ones(4),
    "weak": lambda: jnp.asarray(1.0),
    "int8": lambda: jnp.ones(4, jnp.int8),
    "int4": lambda: jnp.ones(4, jnp.int4),
    "zero-size": lambda: jnp.zeros((0, 4)),
    "key": lambda: jax.random.key(0),
    "old-key": lambda: jax.random.PRNGKey(0),
    "float0": lambda: np.zeros(4, jax.dtypes.float0),
    # Must come before other NumPy arrays: JAX 0.10.2 confuses it with an array that came before.
    "numpy-big-endian": lambda: np.ones(4, ">f4"),
    "numpy": lambda: np.ones(4, np.float32),
    "numpy-float64": lambda: np.ones(4),
    "numpy-scalar": lambda: np.float32(1),
    "numpy-0d": lambda: np.array(1, np.int32),
    "numpy-text": lambda: np.array(["a"]),
    "numpy-objects": lambda: np.array([None]),
    "numpy-masked": lambda: np.ma.masked_array(np.ones(4, np.float32), [True, False] * 2),
    "numpy-matrix-free-subclass": lambda: np.ones(4, np.float32).view(np.recarray),
    "committed": lambda: jax.device_put(jnp.ones(4), jax.devices()[1]),
    "sharded": lambda: jax.device_put(jnp.ones(4), SPLIT),
    "sharded-keys": lambda: jax.device_put(jax.random.split(jax.random.key(0), 4), SPLIT),
    "deleted": deleted,
}
HOLDS = {
    "argument": (lambda array: array, lambda tree: tree),
    "module": (lambda array: Pair(array, "a"), lambda tree: tree.left),
    "module-with-list": (lambda array: Pair([array]), lambda tree: tree.left[0]),
    "dict": (lambda array: {"a": array}, lambda tree: tree["a"]),
}


def describe_array(array):
    if not isinstance(array, jax.Array):
        return type(array), array.shape, array.dtype
    values = (
        jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array
    )
    place = array.sharding, array.committed
    return array.shape, array.dtype, array.aval.weak_type, place, np.asarray(values).tolist()


def output_of(call):
    """A comparable description of the outputs of a call, or the type of its error."""
    try:
        return [*map(describe_array, call())]
    except Exception as error:
        return type(error)


def of_tree(unwrap):
    return filter_jit(lambda tree: (unwrap(tree), unwrap(tree).reshape(-1)))


def test_array_of_every_kind_gives_the_output_of_jax_jit():
    theirs = jax.jit(lambda array: (array, array.reshape(-1)))
    floats = jnp.ones(4)
    warm = {name: of_tree(unwrap) for name, (_, unwrap) in HOLDS.items()}
    # Tests each kind in two trees: in a first call, and in a call after calls with floats.
    for index, make in enumerate(KINDS.values()):
        array, names = make(), [*HOLDS]
        expected = output_of(lambda array=array: theirs(array))
        first, second = names[index % len(names)], names[index % len(names) - 1]
        for name, ours in ((first, of_tree(HOLDS[first][1])), (second, warm[second])):
            tree = HOLDS[name][0](array)
            if ours is warm[name]:
                for _ in range(2):
                    ours(HOLDS[name][0](floats))
            for _ in range(3):
                assert output_of(lambda ours=ours, tree=tree: ours(tree)) == expected
    expected = output_of(lambda: theirs(floats))
    for name, ours in warm.items():
        tree = HOLDS[name][0](floats)
        assert output_of(lambda ours=ours, tree=tree: ours(tree)) == expected
