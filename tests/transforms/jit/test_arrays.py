"""Arrays of every kind are taken as `jax.jit` takes them."""

import jax
import jax.numpy as jnp
import numpy as np

from eqxlike import filter_jit
from tests.transforms.jit.models import Pair


def split():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.sharding.NamedSharding(mesh, jax.P("x"))


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
    "numpy": lambda: np.ones(4, np.float32),
    "numpy-float64": lambda: np.ones(4),
    "numpy-scalar": lambda: np.float32(1),
    "numpy-0d": lambda: np.array(1, np.int32),
    "numpy-big-endian": lambda: np.ones(4, ">f4"),
    "numpy-text": lambda: np.array(["a"]),
    "numpy-objects": lambda: np.array([None]),
    "numpy-masked": lambda: np.ma.masked_array(np.ones(4, np.float32), [True, False] * 2),
    "numpy-matrix-free-subclass": lambda: np.ones(4, np.float32).view(np.recarray),
    "committed": lambda: jax.device_put(jnp.ones(4), jax.devices()[1]),
    "sharded": lambda: jax.device_put(jnp.ones(4), split()),
    "sharded-keys": lambda: jax.device_put(jax.random.split(jax.random.key(0), 4), split()),
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
    """What came, described so that two can be compared; or the type of the error."""
    try:
        return [*map(describe_array, call())]
    except Exception as error:
        return type(error)


def assert_taken_as_by_jax(kind):
    theirs = jax.jit(lambda array: (array, array.reshape(-1)))
    array = KINDS[kind]()
    expected = output_of(lambda: theirs(array))
    # Each kind in two of the trees: in one at the first call, in the other after calls with floats.
    names = [*HOLDS]
    first = [*KINDS].index(kind) % len(names)
    for is_warm, name in enumerate((names[first], names[first - 1])):
        wrap, unwrap = HOLDS[name]
        ours = filter_jit(lambda tree, unwrap=unwrap: (unwrap(tree), unwrap(tree).reshape(-1)))
        for _ in range(2 * is_warm):
            ours(wrap(jnp.ones(4)))
        tree = wrap(array)
        for _ in range(3):
            assert output_of(lambda ours=ours, tree=tree: ours(tree)) == expected
    floats = jnp.ones(4)
    assert output_of(lambda: ours(wrap(floats))) == output_of(lambda: theirs(floats))


def test_array_is_taken_as_by_jax():
    for kind in KINDS:
        assert_taken_as_by_jax(kind)
