"""Leaves in files. Tests with the parameter `eqx` run on Equinox and eqxlike, which must agree."""

import contextlib
import functools
import io
import itertools
import os
import pickle
import re
import types

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import eqxlike
from eqxlike import default_deserialise_filter_spec
from tests.beside_equinox import both
from tests.pytree.serialised import bits, read, written


def through_file(value, like):
    return read(eqxlike, written(eqxlike, value), like)


# --- types --------------------------------------------------------------------------------------


@both
def test_leaves_other_than_numbers_and_arrays_are_skipped(eqx):
    for leaf in ("text", b"bytes", None, len, object(), jnp.float32, jax.new_ref(jnp.ones(2))):
        assert written(eqx, leaf) == b""
        assert read(eqx, b"", leaf) is leaf
    # A struct has no value to write.
    for dtype in (np.float32, jax.random.key(0).dtype):
        assert written(eqx, jax.ShapeDtypeStruct((), dtype)) == b""


# Tuples (written value, leaf of the type to read).
OTHER_TYPES = [
    (jnp.array(1.5), np.float32(0)),
    (np.ones(2, np.float32), jnp.zeros(2)),
    (jnp.ones(2), np.zeros(2, np.float32)),
    (np.float32(1.5), jax.ShapeDtypeStruct((), np.float32)),
    (1.5, np.float64(0)),
    (2**64 - 1, 0),
    (np.str_("abc"), np.str_("")),
    (np.array(["a", "bc"]), np.array(["", "  "])),
    (np.asfortranarray(np.eye(2, 3)), np.zeros((2, 3))),
]


@both
def test_leaf_has_the_type_of_like(eqx):
    class Steps(int):
        pass

    for value, like in OTHER_TYPES:
        found = read(eqx, written(eqx, value), like)
        is_struct = isinstance(like, jax.ShapeDtypeStruct)
        assert isinstance(found, jax.Array if is_struct else type(like))
        assert np.array_equal(found, np.asarray(value).astype(np.asarray(found).dtype))
    assert type(read(eqx, written(eqx, Steps(3)), Steps(0))) is Steps


@both
def test_default_spec_takes_shape_and_dtype_from_the_file(eqx):
    data = written(eqx, jnp.ones(3, jnp.bfloat16))
    found = eqx.default_deserialise_filter_spec(io.BytesIO(data), jnp.zeros(2))
    assert (found.shape, found.dtype) == ((3,), jnp.bfloat16)


def test_python_number_is_read_only_from_a_number_of_its_type():
    values = [True, 2, 0.5, 1j, jnp.ones(2), np.ones(1), np.longdouble(0.1)]
    for value, like in itertools.product(values, [False, 0, 0.0, 0j]):
        if type(value) is type(like):
            assert bits(through_file(value, like)) == bits(value)
            continue
        record, name = np.asarray(value), type(like).__name__
        expected = (
            f"could not be read as {name}: ValueError: the file has an array of shape "
            f"{record.shape} and dtype {record.dtype}, which is not a single Python {name}"
        )
        with pytest.raises(RuntimeError, match=re.escape(expected)):
            through_file(value, like)
    with pytest.raises(RuntimeError, match="expected float32, but read float64"):
        through_file(np.float64(0.1), np.float32(0))


@both
def test_array_is_not_read_as_numpy_scalar_nor_subclass_of_arrays(eqx):
    with pytest.raises(RuntimeError):
        read(eqx, written(eqx, np.ones(2, np.float32)), np.float32(0))
    masked = np.ma.masked_array([1, 2], mask=[False, True])
    with pytest.raises(RuntimeError, match="MaskedArray"):
        read(eqx, written(eqx, masked), masked)


# --- dtypes -------------------------------------------------------------------------------------


@functools.cache
def dtypes_of_jax():
    """Every dtype of `jax.numpy` that the backend supports, which depends on its version."""
    taken = set()
    # The check for reused keys changes the errors.
    with jax.enable_x64(True), jax.debug_key_reuse(False):
        for kind in vars(jnp).values():
            if isinstance(kind, type(jnp.float32)):
                with contextlib.suppress(TypeError, jax.errors.JaxRuntimeError):
                    taken.add(jnp.asarray(np.zeros(2, kind.dtype)).dtype)
    return sorted(taken, key=lambda dtype: (dtype.itemsize, str(dtype)))


def as_struct(array):
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


@pytest.mark.parametrize(
    ("make", "blank"),
    [
        (jax.device_put, lambda array: jax.device_put(np.zeros(array.shape, array.dtype))),
        (jax.device_put, as_struct),
        (np.asarray, np.zeros_like),
        (lambda array: array[1], lambda scalar: scalar.dtype.type(0)),
    ],
    ids=["array", "struct", "numpy", "scalar"],
)
def test_leaf_of_each_dtype_of_jax_is_read_only_from_its_own_dtype(make, blank):
    one, zero, dtypes = np.array([0, 1], np.int8), np.zeros(2, np.int8), dtypes_of_jax()
    with jax.enable_x64(True):
        for place, dtype in enumerate(dtypes):
            value = make(one.astype(dtype))
            data = written(eqxlike, {"a": value})
            assert bits(read(eqxlike, data, {"a": blank(value)})["a"]) == bits(value)
            # Compares with dtypes of similar sizes or names.
            others = {*dtypes[place - 3 : place], dtypes[place - 10]}
            for other in others - {dtype}:
                with pytest.raises(RuntimeError) as caught:
                    read(eqxlike, data, {"a": blank(make(zero.astype(other)))})
                message = str(caught.value)
                assert "tree['a'] differs" in message
                expected, _, came = message.partition("but read")
                assert str(other) in expected
                assert str(dtype) in came


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int4"])
def test_record_names_its_dtype_and_a_record_of_equinox_has_the_dtype_of_like(dtype):
    tested = {str(each) for each in dtypes_of_jax()}
    assert {dtype, "int2", "uint4", "int64", "float8_e5m2", "bfloat16", "complex128"} <= tested
    record = np.load(io.BytesIO(written(eqxlike, np.zeros(2, dtype))))
    assert record.dtype == [(dtype, "V1")]
    array = np.array([0, 1], np.int8).astype(dtype)
    for value in (array, jnp.asarray(array)):
        assert bits(read(eqxlike, written(equinox, value), value)) == bits(value)
        with pytest.raises(RuntimeError):
            read(equinox, written(equinox, value), value)


def test_error_names_a_dtype_that_jax_does_not_support():
    for dtype in ("V4", "V1", "U1", "M8[s]"):
        expected = re.escape(f"values of dtype {np.dtype(dtype)}, which JAX does not support")
        with pytest.raises(RuntimeError, match=expected):
            through_file(np.zeros(2, dtype), jnp.zeros(2))
    # JAX supports numbers of the other byte order.
    assert through_file(np.array([1, 2], ">i4"), jnp.zeros(2, int)).tolist() == [1, 2]
    # A structured array that looks like the record of a dtype is read back unchanged.
    array = np.zeros(2, [("int4", "V1")])
    assert bits(through_file(array, array)) == bits(array)


def test_error_of_64_bits_names_the_option():
    for value, dtype in [(3, "int32"), (0.1, "float32"), (1j, "complex64")]:
        came = np.array(value).dtype
        expected = f"dtype {came}, which JAX would cast to {dtype}: .*enable_x64"
        with pytest.raises(RuntimeError, match=expected):
            through_file(value, jnp.zeros((), dtype))
    value = np.float64(0.1)
    with jax.enable_x64(True):
        found = through_file(jnp.asarray(value), jnp.zeros((), np.float64))
        assert bits(found) == bits(jnp.asarray(value))


# --- keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_key_is_read_back_and_from_the_raw_key_of_equinox(implementation):
    one = jax.random.key(1, impl=implementation)
    for key in (one, jnp.stack([one, one])):
        for like in (jnp.zeros_like(key), jax.ShapeDtypeStruct(key.shape, key.dtype)):
            assert bits(through_file(key, like)) == bits(key)
    if implementation == "threefry2x32":
        assert bits(read(eqxlike, written(equinox, jax.random.key_data(one)), one)) == bits(one)


def test_key_of_another_dtype_or_implementation_is_an_error():
    for dtype in ("int32", "float32", "uint64"):
        with pytest.raises(RuntimeError, match=f"uint32; got dtype={dtype}|{dtype}, which JAX"):
            through_file(np.ones(2, dtype), jax.random.key(0))
    with pytest.raises(RuntimeError, match="invalid PRNG key data"):
        through_file(jax.random.key(0, impl="rbg"), jax.random.key(0, impl="threefry2x32"))


# --- sharding and devices -----------------------------------------------------------------------


def test_sharded_array_is_read_into_the_same_shards():
    sharding = NamedSharding(jax.make_mesh((2,), ("batch",)), PartitionSpec("batch"))
    array = jax.device_put(jnp.arange(4.0), sharding)
    struct = jax.ShapeDtypeStruct((4,), np.float32, sharding=sharding)
    for like in (jax.device_put(jnp.zeros(4), sharding), struct):
        found = through_file(array, like)
        assert found.sharding == sharding
        assert found.tolist() == [0, 1, 2, 3]
    keys = jax.device_put(jax.random.split(jax.random.key(0), 2), sharding)
    assert through_file(keys, keys).sharding == sharding


def test_array_on_a_device_is_read_to_that_device():
    like = jax.device_put(jnp.zeros(2), jax.devices()[1])
    assert through_file(jnp.ones(2), like).devices() == {jax.devices()[1]}
    # An array without a device stays uncommitted.
    assert not through_file(jnp.ones(2), jnp.zeros(2)).committed


# --- refused data -------------------------------------------------------------------------------


class Malicious:
    def __reduce__(self):
        return exec, ("import os; os.environ['EQXLIKE_TEST_OF_PICKLES'] = 'was run'",)


def object_array():
    file = io.BytesIO()
    np.save(file, np.array([Malicious()], dtype=object), allow_pickle=True)
    return file.getvalue()


LIKES = [np.zeros(1), np.array([None]), jnp.zeros(1), 0.0, np.float64(0), jax.random.key(0)]


@pytest.mark.parametrize("data", [object_array(), pickle.dumps(Malicious())], ids=["npy", "pickle"])
def test_nothing_is_unpickled(data, monkeypatch):
    monkeypatch.setenv("EQXLIKE_TEST_OF_PICKLES", "")
    for like in LIKES:
        with pytest.raises(RuntimeError):
            read(eqxlike, data, like)
    assert os.environ["EQXLIKE_TEST_OF_PICKLES"] == ""
    # With `allow_pickle=True` the code runs.
    np.load(io.BytesIO(object_array()), allow_pickle=True)
    assert os.environ["EQXLIKE_TEST_OF_PICKLES"] == "was run"


def test_leaf_that_numpy_would_pickle_is_not_written():
    for leaf in (10**30, -(2**63) - 1, np.array([object()])):
        name = type(leaf).__name__
        expected = rf"tree\['a'\] could not be written: .*NumPy would pickle this {name}"
        with pytest.raises(RuntimeError, match=expected):
            written(eqxlike, {"a": leaf})


def test_stream_may_return_few_bytes_at_once_but_no_text():
    for size in (1, 5):
        whole = io.BytesIO(written(eqxlike, np.arange(9)))
        read_few = lambda count, size=size, whole=whole: whole.read(min(count, size))
        stream = types.SimpleNamespace(read=read_few)
        found = default_deserialise_filter_spec(stream, np.zeros(9, int))
        assert np.array_equal(found, np.arange(9))
    with pytest.raises(TypeError, match=r"not open in binary mode: use `open\(path, 'rb'\)`"):
        default_deserialise_filter_spec(io.StringIO("text"), 1)
