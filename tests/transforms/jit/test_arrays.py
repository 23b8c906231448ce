"""Arrays of every kind are taken as `jax.jit` takes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxlike import filter_jit
from tests.transforms.jit.values import Pair


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
    "weak-int": lambda: jnp.asarray(1),
    "strong-0d": lambda: jnp.asarray(1.0, jnp.float32),
    "int8": lambda: jnp.ones(4, jnp.int8),
    "uint32": lambda: jnp.ones(4, jnp.uint32),
    "bool": lambda: jnp.ones(4, bool),
    "bfloat16": lambda: jnp.ones(4, jnp.bfloat16),
    "int4": lambda: jnp.ones(4, jnp.int4),
    "complex": lambda: jnp.ones(4, jnp.complex64),
    "zero-size": lambda: jnp.zeros((0, 4)),
    "zero-size-matrix": lambda: jnp.zeros((4, 0)),
    "key": lambda: jax.random.key(0),
    "keys": lambda: jax.random.split(jax.random.key(0), 4),
    "rbg-key": lambda: jax.random.key(0, impl="rbg"),
    "old-key": lambda: jax.random.PRNGKey(0),
    "float0": lambda: np.zeros(4, jax.dtypes.float0),
    "numpy": lambda: np.ones(4, np.float32),
    "numpy-float64": lambda: np.ones(4),
    "numpy-int64": lambda: np.ones(4, np.int64),
    "numpy-scalar": lambda: np.float32(1),
    "numpy-float64-scalar": lambda: np.float64(1),
    "numpy-bool-scalar": lambda: np.bool_(True),
    "numpy-0d": lambda: np.array(1, np.int32),
    "numpy-zero-size": lambda: np.ones((0, 4), np.float32),
    "numpy-strided": lambda: np.ones((4, 4), np.float32)[:, ::2],
    "numpy-fortran": lambda: np.asfortranarray(np.ones((4, 2), np.float32)),
    "numpy-big-endian": lambda: np.ones(4, ">f4"),
    "numpy-read-only": lambda: np.broadcast_to(np.float32(1), (4,)),
    "numpy-text": lambda: np.array(["a"]),
    "numpy-objects": lambda: np.array([None]),
    "numpy-records": lambda: np.zeros(4, [("a", np.float32)]),
    "numpy-masked": lambda: np.ma.masked_array(np.ones(4, np.float32), [True, False] * 2),
    "numpy-matrix-free-subclass": lambda: np.ones(4, np.float32).view(np.recarray),
    "committed": lambda: jax.device_put(jnp.ones(4), jax.devices()[1]),
    "committed-to-the-default": lambda: jax.device_put(jnp.ones(4), jax.devices()[0]),
    "sharded": lambda: jax.device_put(jnp.ones(4), split()),
    "replicated": lambda: jax.device_put(
        jnp.ones(4), jax.sharding.NamedSharding(split().mesh, jax.P())
    ),
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


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_array_is_taken_as_by_jax(kind, hold):
    wrap, unwrap = HOLDS[hold]
    theirs = jax.jit(lambda array: (array, array.reshape(-1)))
    ours = filter_jit(lambda tree: (unwrap(tree), unwrap(tree).reshape(-1)))
    array = KINDS[kind]()
    tree = wrap(array)
    expected = output_of(lambda: theirs(array))
    for _ in range(3):
        assert output_of(lambda: ours(tree)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_array_is_taken_as_by_jax_in_a_warm_call(kind):
    theirs = jax.jit(lambda array: (array, array.reshape(-1)))
    ours = filter_jit(lambda tree: (tree.left, tree.left.reshape(-1)))
    for _ in range(3):
        theirs(jnp.ones(4)), ours(Pair(jnp.ones(4)))
    array = KINDS[kind]()
    expected = output_of(lambda: theirs(array))
    tree = Pair(array)
    for _ in range(2):
        assert output_of(lambda: ours(tree)) == expected
    assert output_of(lambda: ours(Pair(jnp.ones(4)))) == output_of(lambda: theirs(jnp.ones(4)))


PAIRS = {
    "two-devices": ("committed", "committed-to-the-default"),
    "committed-and-not": ("committed", "float"),
    "not-and-committed": ("float", "committed"),
    "sharded-and-not": ("sharded", "float"),
    "sharded-and-committed": ("sharded", "committed"),
    "weak-and-strong": ("weak", "int8"),
    "numpy-and-committed": ("numpy", "committed"),
    "deleted-second": ("float", "deleted"),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_two_arrays_are_taken_as_by_jax(pair):
    first, second = (KINDS[kind]() for kind in PAIRS[pair])
    function = lambda x, y: (x, y, x.astype(jnp.float32) + y.astype(jnp.float32))
    theirs, ours = jax.jit(function), filter_jit(lambda tree: function(tree.left, tree.right))
    expected = output_of(lambda: theirs(first, second))
    tree = Pair(first, second)
    for _ in range(2):
        assert output_of(lambda: ours(tree)) == expected


def test_model_that_was_donated_is_an_error_as_of_jax():
    model = Pair(jnp.ones(4))
    filter_jit(lambda model: model.left + 1, donate="all")(model)
    x = jnp.ones(4)
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    for _ in range(2):
        ours = output_of(lambda: [filter_jit(lambda model: model.left)(model)])
        assert ours == output_of(lambda: [jax.jit(lambda x: x)(x)])


def test_array_donated_twice_is_an_error_as_of_jax():
    def donate_twice(jit, **options):
        x = jnp.ones(4)
        return output_of(lambda: jit(lambda x, y: (x + 1, y + 1), **options)(x, x))

    assert donate_twice(filter_jit, donate="all") == donate_twice(jax.jit, donate_argnums=(0, 1))


def test_model_put_elsewhere_is_computed_there():
    jitted = filter_jit(lambda model: model.left + 1)
    model = Pair(jnp.ones(4))
    first, second = jax.devices()[:2]
    for device in (first, second, first, second):
        assert jitted(jax.device_put(model, device)).devices() == {device}


def test_mutable_array_is_changed_as_by_jax():
    def add_one(ref):
        ref[...] = ref[...] + 1
        return ref[...]

    theirs, ours = jax.new_ref(jnp.zeros(2)), jax.new_ref(jnp.zeros(2))
    for _ in range(3):
        assert (filter_jit(add_one)(ours) == jax.jit(add_one)(theirs)).all()
    assert (ours[...] == theirs[...]).all()


def test_mutable_array_is_no_constant_of_the_trace():
    count = 0

    @filter_jit
    def read(ref):
        nonlocal count
        count += 1
        return ref[...]

    for value in range(3):
        assert (read(jax.new_ref(jnp.full(2, value))) == value).all()
    assert count == 1
