"""A restored state equals the saved state bit by bit. Unsuitable states are refused."""

import os
import sys

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import eqxlike as eqx
from eqxlike import nn, train
from eqxlike.train import _checkpoints

NUMPYS = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
NUMPYS += ["float16", "float32", "float64", "complex64", "complex128"]
ADDED = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn", "int4"]
ADDED += ["uint4", "int2"]
SHAPES = [(), (3,), (2, 3), (0,), (2, 0, 3), (1, 1)]


def bits(array):
    return np.asarray(array).reshape(-1).view(np.uint8).tolist()


def random_bits(dtype, shape, seed=0):
    """An array of random bits that are valid for `dtype`, including all kinds of NaN."""
    dtype = np.dtype(dtype)
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    if dtype.name in ("bool", "int4", "uint4", "int2", "float4_e2m1fn"):
        return (raw[..., 0] % 2).astype(dtype)
    return raw.view(dtype).reshape(shape)


def assert_same(restored, state):
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert isinstance(one, jax.Array) == isinstance(other, jax.Array)
        assert (one.shape, one.dtype, bits(one)) == (other.shape, other.dtype, bits(other))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint"


def test_every_dtype_and_shape_is_restored(path):
    state = [random_bits(dtype, shape) for dtype in ("float32", "int4") for shape in SHAPES]
    state += [random_bits(dtype, (2, 3)) for dtype in NUMPYS + ADDED]
    # Narrow integers keep their sign.
    state += [np.arange(-2, 2).astype(name) for name in ("int2", "int4", "uint2", "uint4")]
    state = {"list": state, "tuple": (state[0], [], {"": state[-1]})}
    train.save(path, state, background=True).wait()
    assert_same(train.restore(path, jax.tree.map(np.zeros_like, state)).state, state)
    with jax.enable_x64(True):
        state = [jax.device_put(random_bits(dtype, (2, 3))) for dtype in NUMPYS + ADDED]
        state += [jnp.arange(-2, 2).astype(name) for name in ("int2", "int4", "uint2", "uint4")]
        train.save(path, state)
        assert_same(train.restore(path, state).state, state)


def test_keys_are_restored_with_their_implementation_and_do_not_count_as_used(path):
    for implementation, size in (("threefry2x32", 2), ("rbg", 4)):
        numbers = np.arange(3 * size, dtype=np.uint32).reshape(3, size)
        keys = jr.wrap_key_data(numbers, impl=implementation)
        train.save(path, {"keys": keys})
        like = {"keys": jr.wrap_key_data(0 * numbers, impl=implementation)}
        restored = train.restore(path, like).state["keys"]
        assert restored.dtype == keys.dtype
        assert bits(jr.key_data(restored)) == bits(jr.key_data(keys))
        jr.bits(keys[0])


def test_like_may_be_structs_and_decides_between_numpy_and_jax(path):
    make = lambda key: (nn.Linear(2, 3, key=key), key)
    train.save(path, make(jr.key(0)))
    like = eqx.filter_eval_shape(make, jr.key(1))
    assert eqx.tree_equal(train.restore(path, like).state, make(jr.key(0)))
    train.save(path, [np.arange(3, dtype=np.int32), jnp.arange(3), np.float32(1.5)])
    like = [jnp.zeros(3, int), np.zeros(3, np.int32), np.float32(0)]
    of_jax, of_numpy, scalar = train.restore(path, like).state
    assert isinstance(of_jax, jax.Array)
    # A restored NumPy array is writeable.
    of_numpy[0] = 5
    assert (type(scalar), scalar) == (np.float32, 1.5)
    # The order of bytes and of axes may differ.
    state = {"big": np.arange(3, dtype=">f4"), "fortran": np.asfortranarray(np.eye(2, 3))}
    train.save(path, state)
    restored = train.restore(path, jax.tree.map(np.zeros_like, state)).state
    assert restored["big"].dtype == ">f4"
    assert restored["big"].tolist() == [0, 1, 2]
    assert restored["fortran"].tolist() == np.eye(2, 3).tolist()


def test_data_are_restored_and_other_leaves_come_from_like(path):
    train.save(path, {"f": jnp.sin, "x": jnp.ones(2), "rate": 0.1, "name": "a", "none": None}, DATA)
    like = {"f": jnp.cos, "x": jnp.zeros(2), "rate": 0.1, "name": "a", "none": None}
    restored, data = train.restore(path, like)
    assert (restored["f"], restored["rate"], data) == (jnp.cos, 0.1, DATA)
    # A state without arrays, and numbers that JSON does not support.
    train.save(path, {"rate": 0.1}, [float("nan"), float("inf")])
    state, data = train.restore(path, {"rate": 0.1})
    assert (state, repr(data)) == ({"rate": 0.1}, "[nan, inf]")


DATA = {"epoch": 3, "seed": 2**128, "rate": 0.1, "names": ["ä", "\ud800", ""], "none": None, "": {}}
NAMES = ["", "/", "../up", ".", "..", "a.b", "a/b", "a']['b", "ä\N{SNOWMAN}", "\n", "A", "a", "\0"]
NAMES += ["con", ".zarray", "x" * 300, "\ud800"]


def test_leaves_may_have_any_name(path):
    state = {name: np.full(2, index) for index, name in enumerate(NAMES)}
    state["a"] = {"b": np.full(2, -1), "b']": np.full(2, -2)}
    train.save(path, state)
    assert_same(train.restore(path, jax.tree.map(np.zeros_like, state)).state, state)
    assert {each.name for each in path.parent.iterdir()} == {"checkpoint"}


def mesh(count):
    return Mesh(np.array(jax.devices()[:count]), ("x",))


def test_arrays_take_the_sharding_of_like(path):
    values = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    rows, columns = NamedSharding(mesh(2), P("x")), NamedSharding(mesh(2), P(None, "x"))
    other = SingleDeviceSharding(jax.devices()[1])
    for was in (rows, columns, other):
        train.save(path, [jax.device_put(values, was)] * 4)
        like = [
            jax.device_put(jnp.zeros((4, 2)), rows),
            jax.ShapeDtypeStruct((4, 2), np.float32, sharding=columns),
            jax.device_put(jnp.zeros((4, 2)), other),
            jnp.zeros((4, 2)),
        ]
        restored = train.restore(path, like).state
        assert [each.sharding for each in restored[:3]] == [rows, columns, other]
        assert [each.committed for each in restored] == [True, True, True, False]
        assert [bits(each) for each in restored] == [bits(values)] * 4


def test_added_dtypes_and_keys_take_the_sharding_of_like(path):
    sharding = NamedSharding(mesh(2), P("x"))
    state = {dtype: random_bits(dtype, (4, 2)) for dtype in ("uint4", "float8_e5m2", "bfloat16")}
    keys = jr.split(jr.key(0), 4)
    train.save(path, jax.device_put(state | {"keys": keys}, sharding))
    like = {name: jax.ShapeDtypeStruct((4, 2), name, sharding=sharding) for name in state}
    like["keys"] = jax.device_put(jr.split(jr.key(1), 4), sharding)
    restored = train.restore(path, like).state
    assert restored["keys"].sharding.is_equivalent_to(sharding, 1)
    assert bits(jr.key_data(restored.pop("keys"))) == bits(jr.key_data(keys))
    assert {each.sharding for each in restored.values()} == {sharding}
    assert jax.tree.map(bits, restored) == jax.tree.map(bits, state)


def test_no_implicit_transfers_are_made(path):
    state = {"key": jr.key(0), "w": jnp.ones(2)}
    with jax.transfer_guard("disallow"):
        train.save(path, state)
        restored = train.restore(path, state).state
    assert bits(jr.key_data(restored["key"])) == bits(jr.key_data(state["key"]))


def test_orbax_reads_the_arrays_without_eqxlike(path):
    import orbax.checkpoint as ocp

    train.save(path, {"weight": np.arange(3.0)})
    with ocp.PyTreeCheckpointer(use_ocdbt=False) as checkpointer:
        found = checkpointer.restore(path / "step_000000000" / "arrays")
    assert {name: array.tolist() for name, array in found.items()} == {"00000.weight": [0, 1, 2]}


def test_a_checkpoint_can_be_moved_and_replaced_through_a_symbolic_link(path, tmp_path):
    train.save(path, np.arange(3.0))
    moved = path.rename(tmp_path / "elsewhere")
    assert train.restore(moved, np.zeros(3)).state.tolist() == [0, 1, 2]
    (tmp_path / "link").symlink_to(moved)
    train.save(tmp_path / "link", np.ones(1))
    assert train.restore(moved, np.zeros(1)).state == 1
    assert (tmp_path / "link").is_symlink()


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(path, monkeypatch):
    train.save(path, np.zeros(1), 0)
    check, replacements = _checkpoints.check_files, iter([np.ones(1)])

    def check_files(*args):
        for state in replacements:
            train.save(path, state, 1)
        check(*args)

    monkeypatch.setattr(_checkpoints, "check_files", check_files)
    assert train.restore(path, np.zeros(1)) == (1, 1)


def test_error_without_orbax_names_the_package_to_install(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"pip install 'eqxlike\[train\]'"):
        train.save(path, np.zeros(1))


# --- errors ---


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


W = zeros(2)
RBG, UNSAFE_RBG = (jr.split(jr.key(0, impl=impl), 1) for impl in ("rbg", "unsafe_rbg"))


MISMATCHES = [
    ({"w": W}, {"w": zeros(3)}, r"like\['w'\] is an array of shape \(3,\) and"),
    ({"w": W}, {"w": zeros(2, dtype=np.int32)}, r"like\['w'\] .* dtype int32, but"),
    ({"w": W}, {"w": W, "b": W}, r"like\['b'\] is missing in the"),
    ({"w": W, "b": W}, {"w": W}, r"checkpoint has state\['b'\]"),
    ([W], (W,), "like is tuple, but was saved as list"),
    ([W, None], [W], r"checkpoint has state\[1\], which"),
    (zeros(2, dtype=np.uint32), jr.key(0), r"like is .* dtype key<fry>, but was"),
    (RBG, UNSAFE_RBG, r"key<urbg>, but was saved as .* key<rbg>"),
    ({"rate": 0.1}, {"rate": 0.2}, r"like\['rate'\] is 0.2, but was saved as 0.1"),
    ([1], [True], r"like\[0\] is True, but was saved as 1"),
    ([zeros()], [jnp.sin], r"like\[0\] is no array, but was saved as an array of"),
    ([1], [None], r"like\[0\] is NoneType, but was saved as 1"),
    (
        nn.LayerNorm(2, eps=1e-5),
        nn.LayerNorm(2, eps=0.1),
        r"like is LayerNorm\(.*eps=0.1.* was .*e",
    ),
]


def test_mismatches_are_named_with_their_path(path):
    for state, like, message in MISMATCHES:
        train.save(path, state)
        with pytest.raises(ValueError, match=message) as caught:
            train.restore(path, like)
        assert not isinstance(caught.value, train.CheckpointError)
        assert "does not fit `like`" in str(caught.value)
        assert "Create `like` in the same way as the saved state" in str(caught.value)


def test_all_mismatches_are_named_at_once_before_a_byte_of_the_arrays_is_read(path):
    train.save(path, [zeros(2)] * 12)
    for file in path.glob("*/arrays/*/*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"like\[0\] .*like\[7\] .*; and 4 more\.") as caught:
        train.restore(path, [zeros(3)] * 12)
    assert not isinstance(caught.value, train.CheckpointError)
    with pytest.raises(ValueError, match=r"; like\[11\] is [^;]*\. Create"):
        train.restore(path, [zeros(2)] * 4 + [zeros(3)] * 8)


def test_numbers_of_64_bits_need_the_flag_of_jax(path):
    for dtype in (np.float64, np.int64, np.uint64, np.complex128):
        train.save(path, zeros(2, dtype=dtype))
        with pytest.raises(ValueError, match=f"{np.dtype(dtype)}, which .*jax_enable_x64"):
            train.restore(path, jax.ShapeDtypeStruct((2,), dtype))


def test_states_and_data_that_cannot_be_written_are_refused(path):
    deleted = jnp.ones(2)
    deleted.delete()
    for leaf, error, message in [
        (np.array([None]), TypeError, r"of numbers and bools, .*; state\['x'\] .* dtype object"),
        (
            zeros(1, dtype=np.longdouble),
            TypeError,
            r"state\['x'\] has type ndarray and dtype float",
        ),
        (np.ma.zeros(2), TypeError, r"state\['x'\] has type MaskedArray"),
        (jax.new_ref(jnp.ones(2)), TypeError, r"state\['x'\] has type .*Ref"),
        (deleted, RuntimeError, r"deleted: state\['x'\]"),
    ]:
        with pytest.raises(error, match=message):
            train.save(path, {"x": leaf})
    with pytest.raises(TypeError, match=r"outside jit; state\['x'\] has type "):
        jax.jit(lambda x: train.save(path, {"x": x}))(jnp.ones(2))
    for data, message in [
        ({"a": [(1,)]}, r"got tuple at data\['a'\]\[0\]\."),
        ({1: 2}, r"strings as keys\), got int at data\[1\]"),
        ([np.zeros(1)], r"got ndarray at data\[0\]. Pass arrays in `state`"),
        (set(), "got set at data"),
    ]:
        with pytest.raises(TypeError, match=message):
            train.save(path, (), data)
    assert not path.exists()
    with pytest.raises(FileNotFoundError, match=f"There is no checkpoint at {path}"):
        train.restore(path, ())
    with pytest.raises(TypeError, match=r"^restore\(path, like\): path must .* got a list"):
        train.restore([1, 2], path)  # pyright: ignore[reportArgumentType]
    with pytest.raises(NotADirectoryError, match=r"path must be .*\.py' is a file\.$"):
        train.restore(__file__, ())


def test_other_files_are_not_overwritten(path):
    path.write_text("years")
    with pytest.raises(NotADirectoryError, match="checkpoint' is a file"):
        train.save(path, zeros(1))
    assert path.read_text() == "years"
    path.unlink()
    path.mkdir()
    (path / "thesis.tex").write_text("years")
    train.save(path, zeros(1))
    assert sorted(os.listdir(path)) == ["step_000000000", "thesis.tex"]
