"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

import contextlib
import inspect
import io
import os
import pickle
import re
import types

import equinox
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import eqxlike
from eqxlike import default_deserialise_filter_spec
from tests.beside_equinox import both
from tests.pytree.serialised import bits, read, written


def through_file(value, like):
    return read(eqxlike, written(eqxlike, value), like)


@pytest.mark.parametrize(
    "name", ["default_serialise_filter_spec", "default_deserialise_filter_spec"]
)
def test_has_the_parameters_of_equinox(name):
    one, other = (
        [(p.name, p.kind, p.default) for p in inspect.signature(fn).parameters.values()]
        for fn in (getattr(eqxlike, name), getattr(equinox, name))
    )
    assert one == other


# --- types --------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    "leaf",
    ["text", b"bytes", None, len, object(), jnp.float32, slice(1)],
    ids=lambda leaf: type(leaf).__name__,
)
def test_what_is_no_number_nor_array_is_skipped(eqx, leaf):
    assert written(eqx, leaf) == b""
    assert read(eqx, b"", leaf) is leaf


@both
def test_a_reference_is_skipped(eqx):
    reference = jax.new_ref(jnp.ones(2))
    assert written(eqx, reference) == b""
    assert read(eqx, b"", reference) is reference


@both
@pytest.mark.parametrize("dtype", [np.float32, jax.random.key(0).dtype], ids=str)
def test_a_struct_has_no_value_to_write(eqx, dtype):
    assert written(eqx, jax.ShapeDtypeStruct((), dtype)) == b""


@both
@pytest.mark.parametrize(
    ("value", "like"),
    [
        (np.float32(1.5), jnp.zeros(())),
        (jnp.array(1.5), np.float32(0)),
        (jnp.array(3), 0),
        (np.ones(2, np.float32), jnp.zeros(2)),
        (jnp.ones(2), np.zeros(2, np.float32)),
        (np.float32(1.5), jax.ShapeDtypeStruct((), np.float32)),
        (jnp.array(1.5), 0.0),
        (np.float64(1.5), 0.0),
        (1.5, np.float64(0)),
        (2**64 - 1, 0),
        (np.str_("abc"), np.str_("")),
        (np.datetime64("2020-01-01"), np.datetime64("1970-01-01")),
        (np.array(["a", "bc"]), np.array(["", "  "])),
        (np.zeros(2, [("a", "i4")]), np.ones(2, [("a", "i4")])),
        (np.asfortranarray(np.eye(2, 3)), np.zeros((2, 3))),
        (np.arange(6)[::2], np.zeros(3, int)),
    ],
)
def test_the_type_is_that_of_like(eqx, value, like):
    found = read(eqx, written(eqx, value), like)
    assert isinstance(found, jax.Array if isinstance(like, jax.ShapeDtypeStruct) else type(like))
    assert np.array_equal(found, np.asarray(value).astype(np.asarray(found).dtype))


@both
def test_a_subclass_of_a_python_number_stays_one(eqx):
    class Steps(int):
        pass

    assert type(read(eqx, written(eqx, Steps(3)), Steps(0))) is Steps


@both
def test_the_default_alone_takes_shape_and_dtype_from_the_file(eqx):
    data = written(eqx, jnp.ones(3, jnp.bfloat16))
    found = eqx.default_deserialise_filter_spec(io.BytesIO(data), jnp.zeros(2))
    assert (found.shape, found.dtype) == ((3,), jnp.bfloat16)


@pytest.mark.parametrize("like", [False, 0, 0.0, 0j], ids=lambda like: type(like).__name__)
@pytest.mark.parametrize("value", [True, 2, 0.5, 1j], ids=lambda value: type(value).__name__)
def test_a_python_number_is_read_from_one_of_its_type_alone(value, like):
    if type(value) is type(like):
        assert bits(through_file(value, like)) == bits(value)
        return
    record = np.asarray(value)
    expected = (
        f"could not be read as {type(like).__name__}: ValueError: the file has an array of shape "
        f"() and dtype {record.dtype}, and not one number that is a Python {type(like).__name__}"
    )
    with pytest.raises(RuntimeError, match=re.escape(expected)):
        through_file(value, like)


@pytest.mark.parametrize("value", [jnp.ones(2), np.ones(1), np.longdouble(0.1)], ids=repr)
def test_what_is_not_one_number_of_python_is_an_error_that_says_what_came(value):
    came = re.escape(f"an array of shape {value.shape} and dtype {value.dtype}")
    with pytest.raises(RuntimeError, match=f"{came}, and not one number that is a Python float"):
        through_file(value, 0.0)


@both
def test_an_array_is_no_numpy_scalar(eqx):
    with pytest.raises(RuntimeError):
        read(eqx, written(eqx, np.ones(2, np.float32)), np.float32(0))


def test_a_numpy_scalar_of_another_type_is_an_error_that_names_both():
    with pytest.raises(RuntimeError, match="expected float32, and reading gave float64"):
        through_file(np.float64(0.1), np.float32(0))


@both
def test_a_subclass_of_a_numpy_array_is_not_made(eqx):
    masked = np.ma.masked_array([1, 2], mask=[False, True])
    with pytest.raises(RuntimeError, match="MaskedArray"):
        read(eqx, written(eqx, masked), masked)


# --- dtypes -------------------------------------------------------------------------------------

ADDED = [
    dtype
    for dtype in vars(ml_dtypes).values()
    if isinstance(dtype, type) and issubclass(dtype, np.generic)
]


@pytest.mark.parametrize("dtype", ADDED, ids=lambda dtype: dtype.__name__)
def test_numpy_arrays_and_scalars_of_all_dtypes_that_jax_adds_are_read_as_written(dtype):
    array = np.array([0, 1], np.int8).astype(dtype)
    assert bits(through_file(array, np.zeros(2, dtype))) == bits(array)
    assert bits(through_file(array[1], array[0])) == bits(array[1])


def taken_by_jax():
    """Every dtype of `jax.numpy` of which the backend makes arrays; it hangs on the version."""
    taken = set()
    # Where reuse of keys is watched, calls go another way, and end in other errors.
    with jax.enable_x64(True), jax.debug_key_reuse(False):
        for kind in vars(jnp).values():
            if isinstance(kind, type(jnp.float32)):
                with contextlib.suppress(TypeError, jax.errors.JaxRuntimeError):
                    taken.add(jnp.zeros(2, kind.dtype).dtype)
    return sorted(taken, key=str)


DTYPES_OF_JAX = taken_by_jax()


def as_struct(array):
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


@pytest.mark.parametrize(
    ("make", "blank"),
    [
        (jnp.asarray, jnp.zeros_like),
        (jnp.asarray, as_struct),
        (np.asarray, np.zeros_like),
        (lambda array: array[1], lambda scalar: scalar.dtype.type(0)),
    ],
    ids=["array", "struct", "numpy", "scalar"],
)
@pytest.mark.parametrize("dtype", DTYPES_OF_JAX, ids=str)
def test_of_all_dtypes_of_jax_a_leaf_takes_its_own_and_no_other(dtype, make, blank):
    with jax.enable_x64(True):
        one, zero = np.array([0, 1], np.int8).astype(dtype), np.zeros(2, np.int8)
        value = make(one)
        data = written(eqxlike, {"a": value})
        assert bits(read(eqxlike, data, {"a": blank(value)})["a"]) == bits(value)
        for other in DTYPES_OF_JAX:
            if other == dtype:
                continue
            with pytest.raises(RuntimeError) as caught:
                read(eqxlike, data, {"a": blank(make(zero.astype(other)))})
            message = str(caught.value)
            assert "tree['a'] differs" in message
            expected, _, came = message.partition("reading gave")
            assert str(other) in expected
            assert str(dtype) in came


def test_the_dtypes_of_jax_in_that_test_are_more_than_those_of_numpy():
    named = "bool int2 uint4 int64 float4_e2m1fn float8_e5m2 float8_e8m0fnu bfloat16 complex128"
    assert {np.dtype(name) for name in named.split()} < set(DTYPES_OF_JAX)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int4"])
def test_a_record_of_a_dtype_that_equinox_does_not_name_names_it(dtype):
    record = np.load(io.BytesIO(written(eqxlike, np.zeros(2, dtype))))
    assert record.dtype == [(dtype, "V1")]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int4"])
def test_what_equinox_wrote_without_its_dtype_is_read_as_that_of_like(dtype):
    array = np.array([0, 1], np.int8).astype(dtype)
    for value in (array, jnp.asarray(array)):
        assert bits(read(eqxlike, written(equinox, value), value)) == bits(value)
        with pytest.raises(RuntimeError):
            read(equinox, written(equinox, value), value)


def test_a_structured_array_that_looks_like_such_a_record_is_read_as_written():
    array = np.zeros(2, [("int4", "V1")])
    assert bits(through_file(array, array)) == bits(array)


@pytest.mark.parametrize("dtype", ["V4", "V1", "U1", "M8[s]"])
def test_what_no_jax_array_holds_is_an_error_that_names_it(dtype):
    expected = re.escape(f"values of dtype {np.dtype(dtype)}, which no JAX array holds")
    with pytest.raises(RuntimeError, match=expected):
        through_file(np.zeros(2, dtype), jnp.zeros(2))


def test_numbers_of_the_other_byte_order_become_a_jax_array():
    assert through_file(np.array([1, 2], ">i4"), jnp.zeros(2, int)).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("value", "dtype"), [(2**40, "int32"), (3, "int32"), (0.1, "float32"), (1j, "complex64")]
)
def test_64_bits_are_an_error_that_says_what_to_set(value, dtype):
    expected = f"dtype {np.array(value).dtype}, of which JAX would make {dtype}: .*enable_x64"
    with pytest.raises(RuntimeError, match=expected):
        through_file(value, jnp.zeros((), dtype))


def test_64_bits_are_read_by_a_filter_spec_that_casts_in_numpy():
    def spec(file, leaf):
        record = default_deserialise_filter_spec(file, np.zeros(leaf.shape, leaf.dtype))
        return jnp.asarray(record.astype(leaf.dtype))

    data = written(eqxlike, np.array([0.1]))
    found = read(eqxlike, data, jnp.zeros(1), filter_spec=spec)
    assert bits(found) == bits(jnp.array([0.1]))


def test_with_64_bits_a_float64_stays_one():
    with jax.enable_x64(True):
        found = through_file(jnp.asarray(np.float64(0.1)), jnp.zeros((), np.float64))
        assert bits(found) == bits(jnp.asarray(np.float64(0.1)))


# --- keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("shape", [(), (3,)], ids=["one", "several"])
@pytest.mark.parametrize("is_struct", [False, True], ids=["array", "struct"])
def test_a_key_is_read_as_written(implementation, shape, is_struct):
    key = jax.random.key(1, impl=implementation)
    key = jax.random.split(key, shape) if shape else key
    like = jax.ShapeDtypeStruct(key.shape, key.dtype) if is_struct else jnp.zeros_like(key)
    assert bits(through_file(key, like)) == bits(key)


@pytest.mark.parametrize("dtype", ["int32", "float32", "uint64"])
def test_a_key_is_made_of_its_own_dtype_alone(dtype):
    with pytest.raises(RuntimeError, match=f"uint32; got dtype={dtype}|{dtype}, of which"):
        through_file(np.ones(2, dtype), jax.random.key(0))


def test_a_key_of_another_implementation_is_an_error():
    with pytest.raises(RuntimeError, match="invalid PRNG key data"):
        through_file(jax.random.key(0, impl="rbg"), jax.random.key(0, impl="threefry2x32"))


def test_a_key_reads_the_raw_key_that_equinox_wrote():
    key = jax.random.key(5)
    data = written(equinox, jax.random.key_data(key))
    assert bits(read(eqxlike, data, jax.random.key(0))) == bits(key)


# --- where arrays lie ---------------------------------------------------------------------------


@pytest.fixture
def sharding():
    return NamedSharding(jax.make_mesh((2,), ("batch",)), PartitionSpec("batch"))


@pytest.mark.parametrize("kind", [jnp.zeros, jax.ShapeDtypeStruct], ids=["array", "struct"])
def test_what_is_sharded_is_read_into_the_same_shards(kind, sharding):
    array = jax.device_put(jnp.arange(4.0), sharding)
    if kind is jnp.zeros:
        like = jax.device_put(jnp.zeros(4), sharding)
    else:
        like = jax.ShapeDtypeStruct((4,), np.float32, sharding=sharding)
    found = through_file(array, like)
    assert found.sharding == sharding
    assert found.tolist() == [0, 1, 2, 3]


def test_keys_are_read_into_the_same_shards(sharding):
    keys = jax.device_put(jax.random.split(jax.random.key(0), 2), sharding)
    assert through_file(keys, keys).sharding == sharding


def test_what_was_put_on_a_device_is_read_onto_it():
    like = jax.device_put(jnp.zeros(2), jax.devices()[1])
    assert through_file(jnp.ones(2), like).devices() == {jax.devices()[1]}


@both
def test_what_was_not_put_anywhere_may_still_go_anywhere(eqx):
    assert not read(eqx, written(eqx, jnp.ones(2)), jnp.zeros(2)).committed


# --- what is not read or written ----------------------------------------------------------------


class Malicious:
    def __reduce__(self):
        return exec, ("import os; os.environ['EQXLIKE_TEST_OF_PICKLES'] = 'was run'",)


def object_array():
    file = io.BytesIO()
    np.save(file, np.array([Malicious()], dtype=object), allow_pickle=True)
    return file.getvalue()


LIKES = [np.zeros(1), np.array([None]), jnp.zeros(1), 0.0, np.float64(0), jax.random.key(0)]


@both
@pytest.mark.parametrize("data", [object_array(), pickle.dumps(Malicious())], ids=["npy", "pickle"])
def test_nothing_is_unpickled(eqx, data):
    for like in LIKES:
        with pytest.raises(RuntimeError):
            read(eqx, data, like)
    assert "EQXLIKE_TEST_OF_PICKLES" not in os.environ


def test_the_pickle_of_that_test_would_have_run(monkeypatch):
    monkeypatch.setenv("EQXLIKE_TEST_OF_PICKLES", "")
    np.load(io.BytesIO(object_array()), allow_pickle=True)
    assert os.environ["EQXLIKE_TEST_OF_PICKLES"] == "was run"


@pytest.mark.parametrize(
    "leaf", [10**30, -(2**63) - 1, np.array([object()])], ids=["large", "small", "object"]
)
def test_what_numpy_would_pickle_is_not_written(leaf):
    expected = rf"tree\['a'\] could not be written: .*NumPy would pickle this {type(leaf).__name__}"
    with pytest.raises(RuntimeError, match=expected):
        written(eqxlike, {"a": leaf})


def test_a_file_in_text_mode_is_an_error_that_says_so():
    with pytest.raises(TypeError, match=r"not open in binary mode: use `open\(path, 'rb'\)`"):
        default_deserialise_filter_spec(io.StringIO("text"), 1)


@pytest.mark.parametrize("size", [1, 5])
def test_a_stream_that_gives_few_bytes_at_once_is_read(size):
    whole = io.BytesIO(written(eqxlike, np.arange(9)))
    stream = types.SimpleNamespace(read=lambda count: whole.read(min(count, size)))
    assert np.array_equal(default_deserialise_filter_spec(stream, np.zeros(9, int)), np.arange(9))
