"""Writing and reading trees in memory, and random trees of leaves that files can contain."""

import io
import math

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import ml_dtypes
import numpy as np
from hypothesis import strategies as st


def written(eqx, pytree, **options):
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, pytree, **options)
    return file.getvalue()


def read(eqx, data, like, **options):
    return eqx.tree_deserialise_leaves(io.BytesIO(data), like, **options)


def bits(leaf):
    """Type, shape, dtype and bits of a leaf."""
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return str(leaf.dtype), *bits(jax.random.key_data(leaf))
        return "jax", *bits(np.asarray(leaf))
    if isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex):
        array = np.asarray(leaf)
        return type(leaf), array.shape, str(array.dtype), array.tobytes()
    return type(leaf), leaf


def same_bits(one, other):
    leaves, treedef = jtu.tree_flatten(one)
    others, other_treedef = jtu.tree_flatten(other)
    return treedef == other_treedef and [*map(bits, leaves)] == [*map(bits, others)]


JAX_DTYPES = [np.float32, np.float16, np.complex64, np.int32, np.uint8, np.bool_, jnp.bfloat16]
NUMPY_DTYPES = [*JAX_DTYPES[:-1], np.float64, np.int64, np.uint64, np.complex128, np.dtype(">f4")]
# Equinox does not read these dtypes, or only in some cases.
ADDED_DTYPES = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4]


@st.composite
def numpy_arrays(draw, dtypes):
    """Arrays of random bits, which include `-0.0`, infinities and NaNs with all payloads."""
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    shape = draw(st.sampled_from([(), (2,), (2, 1), (0, 3)]))
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    array = np.frombuffer(draw(st.binary(min_size=num_bytes, max_size=num_bytes)), np.uint8)
    if dtype.kind == "b":
        array = array & 1
    if dtype == ml_dtypes.int4:
        return (array & 7).astype(dtype).reshape(shape)
    return array.view(dtype).reshape(shape)


def jax_arrays(dtypes):
    return numpy_arrays(dtypes).map(jnp.asarray)


def numpy_scalars(dtypes):
    return numpy_arrays(dtypes).filter(lambda array: array.ndim == 0).map(lambda array: array[()])


keys = st.builds(
    lambda seed, implementation, shape: jax.random.wrap_key_data(
        jnp.full((*shape, 4 if implementation == "rbg" else 2), seed, jnp.uint32),
        impl=implementation,
    ),
    st.integers(0, 2**32 - 1).map(np.uint32),
    st.sampled_from(["threefry2x32", "rbg"]),
    st.sampled_from([(), (2,)]),
)

leaves_that_equinox_knows = (
    jax_arrays(JAX_DTYPES)
    | numpy_arrays(NUMPY_DTYPES)
    | numpy_scalars([*NUMPY_DTYPES[:-1], ml_dtypes.bfloat16])
    | st.sampled_from([True, 0, -(2**63), 2**64 - 1, 1.5, -0.0, math.inf, math.nan, 2 - 1j])
    | st.sampled_from(["", "text", len])
)
leaves = (
    leaves_that_equinox_knows
    | jax_arrays(ADDED_DTYPES)
    | numpy_arrays(ADDED_DTYPES)
    | numpy_scalars(ADDED_DTYPES)
    | keys
)


def trees(leaves):
    return st.recursive(
        leaves | st.none(),
        lambda below: (
            st.lists(below, max_size=3)
            | st.tuples(below, below)
            | st.dictionaries(st.sampled_from("abc"), below)
        ),
        max_leaves=6,
    )


def blank(leaf):
    """A leaf of the same type without the value of `leaf`, to read a file into."""
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    if isinstance(leaf, np.ndarray):
        return np.zeros(leaf.shape, leaf.dtype)
    if isinstance(leaf, np.generic):
        return np.zeros((), leaf.dtype)[()]
    if isinstance(leaf, bool | int | float | complex):
        return type(leaf)(0)
    return leaf
