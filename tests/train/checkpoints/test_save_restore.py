"""What is restored is what was saved, to the last bit."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import jax.random as jr
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import eqxlike as eqx
from eqxlike import nn, train
from eqxlike.train._checkpoints import _restore

NUMPYS = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
NUMPYS += ["float16", "float32", "float64", "complex64", "complex128"]
ADDED = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn", "int4"]
ADDED += ["uint4", "int2"]
SHAPES = [(), (3,), (2, 3), (0,), (2, 0, 3), (1, 1)]


def bits(array):
    return np.asarray(array).reshape(-1).view(np.uint8).tolist()


def random_bits(dtype, shape, seed=0):
    """An array with any bits, NaNs of all sorts among them, that its dtype has."""
    dtype = np.dtype(dtype)
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    if dtype.name in ("bool", "int4", "uint4", "int2", "float4_e2m1fn"):
        return (raw[..., 0] % 2).astype(dtype)
    return raw.view(dtype).reshape(shape)


def assert_same(restored, state):
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert isinstance(one, jax.Array) == isinstance(other, jax.Array)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert bits(one) == bits(other)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("background", [False, True])
def test_every_dtype_and_shape_of_numpy_comes_back(path, background):
    state = [random_bits(dtype, shape) for dtype in NUMPYS + ADDED for shape in SHAPES]
    train.save(path, state, background=background).wait()
    assert_same(train.restore(path, jax.tree.map(np.zeros_like, state)).state, state)


def test_every_dtype_of_jax_comes_back(path):
    with jax.enable_x64(True):
        state = [jnp.asarray(random_bits(dtype, (2, 3))) for dtype in NUMPYS + ADDED]
        train.save(path, state)
        assert_same(train.restore(path, state).state, state)


@settings(max_examples=10)
@given(
    st.recursive(
        st.builds(
            random_bits,
            st.sampled_from(NUMPYS + ADDED),
            st.sampled_from(SHAPES),
            st.integers(0, 99),
        ),
        lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_tree_comes_back(tmp_path_factory, state):
    path = tmp_path_factory.mktemp("any") / "checkpoint"
    train.save(path, state)
    assert_same(train.restore(path, jax.tree.map(np.zeros_like, state)).state, state)


def test_training_goes_on_with_the_same_bits(path, getkey):
    optimiser = optax.adam(0.1)

    def loss(model, batch, key):
        return jnp.mean(jax.vmap(model)(batch + jr.normal(key, batch.shape)) ** 2)

    def begin(key):
        return train.TrainState.create(nn.Linear(2, 1, key=key), optimiser, key=jr.key(1))

    step = train.make_step(loss, optimiser)
    state, _ = step(begin(getkey()), jnp.ones((3, 2)))
    train.save(path, state)
    other = train.restore(path, begin(getkey())).state
    for _ in range(3):
        state, loss_here = step(state, jnp.ones((3, 2)))
        other, loss_there = step(other, jnp.ones((3, 2)))
        assert bits(loss_here) == bits(loss_there)
    assert eqx.tree_equal(state, other)


def test_restored_arrays_are_traced_as_those_of_like(path):
    traces = []

    @jax.jit
    def f(x):
        traces.append(x)
        return x

    like = jnp.ones(2)
    f(like)
    train.save(path, like)
    f(train.restore(path, like).state)
    assert len(traces) == 1


def test_restored_arrays_can_be_donated(path):
    train.save(path, jnp.arange(64.0))
    restored = train.restore(path, jnp.zeros(64)).state
    doubled = jax.jit(lambda x: 2 * x, donate_argnums=0)(restored)
    assert doubled[-1] == 126
    assert restored.is_deleted()


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_typed_keys_come_back_with_their_implementation(path, implementation):
    keys = jr.split(jr.key(0, impl=implementation), 3)
    train.save(path, {"keys": keys})
    like = {"keys": jr.split(jr.key(1, impl=implementation), 3)}
    restored = train.restore(path, like).state["keys"]
    assert restored.dtype == keys.dtype
    assert bits(jr.key_data(restored)) == bits(jr.key_data(keys))


def test_saving_a_key_does_not_use_it_up(path):
    key = jr.key(0)
    train.save(path, key)
    jr.normal(key)


def test_structs_will_do_as_like(path):
    make = lambda key: (nn.Linear(2, 3, key=key), key)
    train.save(path, make(jr.key(0)))
    like = eqx.filter_eval_shape(make, jr.key(1))
    assert eqx.tree_equal(train.restore(path, like).state, make(jr.key(0)))


def test_numpy_array_comes_back_as_one_that_can_be_written(path):
    train.save(path, np.arange(3.0))
    restored = train.restore(path, np.zeros(3)).state
    restored[0] = 5


def test_numpy_scalar_comes_back_as_one(path):
    train.save(path, np.float32(1.5))
    assert type(train.restore(path, np.float32(0)).state) is np.float32


def test_like_says_whether_numpy_or_jax(path):
    train.save(path, [np.arange(3, dtype=np.int32), jnp.arange(3)])
    restored = train.restore(path, [jnp.zeros(3, int), np.zeros(3, np.int32)]).state
    assert isinstance(restored[0], jax.Array)
    assert isinstance(restored[1], np.ndarray)


def test_order_of_bytes_and_of_axes_of_an_array_does_not_matter(path):
    state = {"big": np.arange(3, dtype=">f4"), "fortran": np.asfortranarray(np.eye(2, 3))}
    train.save(path, state)
    restored = train.restore(path, jax.tree.map(np.zeros_like, state)).state
    assert restored["big"].dtype == ">f4"
    assert restored["big"].tolist() == [0, 1, 2]
    assert restored["fortran"].tolist() == np.eye(2, 3).tolist()


def test_what_is_no_array_is_that_of_like(path):
    train.save(path, {"f": jnp.sin, "x": jnp.ones(2), "rate": 0.1, "name": "a", "none": None})
    like = {"f": jnp.cos, "x": jnp.zeros(2), "rate": 0.1, "name": "a", "none": None}
    restored = train.restore(path, like).state
    assert restored["f"] is jnp.cos
    assert restored["rate"] == 0.1


def test_state_without_arrays_comes_back(path):
    train.save(path, {"rate": 0.1}, ["only data"])
    assert train.restore(path, {"rate": 0.1}) == ({"rate": 0.1}, ["only data"])


NAMES = ["", "/", "../up", ".", "..", "a.b", "a/b", "a']['b", "ä\N{SNOWMAN}", "\n", "A", "a", "\0"]
NAMES += ["con", ".zarray", "x" * 300, "\ud800"]


def test_any_name_of_a_leaf_will_do(path):
    state = {name: np.full(2, index) for index, name in enumerate(NAMES)}
    state["a"] = {"b": np.full(2, -1), "b']": np.full(2, -2)}
    train.save(path, state)
    assert_same(train.restore(path, jax.tree.map(np.zeros_like, state)).state, state)
    assert {each.name for each in path.parent.iterdir()} == {"checkpoint"}


class _OfOneName:
    def __init__(self, number):
        self.number = number

    def __repr__(self):
        return "same"

    def __lt__(self, other):
        return self.number < other.number


def test_leaves_whose_paths_read_the_same_are_kept_apart(path):
    names = [_OfOneName(0), _OfOneName(1)]
    state = {name: np.full(2, name.number) for name in names}
    train.save(path, state)
    restored = train.restore(path, jax.tree.map(np.zeros_like, state)).state
    assert [restored[name].tolist() for name in names] == [[0, 0], [1, 1]]


DATA = {"epoch": 3, "seed": 2**128, "rate": 0.1, "names": ["ä", "\ud800", ""], "none": None, "": {}}


def test_data_comes_back(path):
    train.save(path, (), DATA)
    assert train.restore(path, ()).data == DATA


def test_numbers_that_json_has_not_come_back(path):
    train.save(path, (), [float("nan"), float("inf")])
    assert repr(train.restore(path, ()).data) == "[nan, inf]"


def mesh(count):
    return Mesh(np.array(jax.devices()[:count]), ("x",))


def test_array_takes_the_sharding_of_like_whatever_it_was(path):
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


@pytest.mark.parametrize("dtype", ["uint4", "float8_e5m2", "bfloat16"])
def test_array_of_an_added_dtype_takes_the_sharding_of_like(path, dtype):
    values = random_bits(dtype, (4, 2))
    sharding = NamedSharding(mesh(2), P("x"))
    train.save(path, jax.device_put(jnp.asarray(values), sharding))
    restored = train.restore(path, jax.ShapeDtypeStruct((4, 2), dtype, sharding=sharding)).state
    assert restored.sharding == sharding
    assert bits(restored) == bits(values)


def test_transfers_that_nobody_asked_for_may_be_forbidden(path):
    state = {"key": jr.key(0), "w": jnp.ones(2)}
    with jax.transfer_guard("disallow"):
        train.save(path, state)
        restored = train.restore(path, state).state
    assert bits(jr.key_data(restored["key"])) == bits(jr.key_data(state["key"]))


def test_keys_take_the_sharding_of_like(path):
    keys = jr.split(jr.key(0), 4)
    sharding = NamedSharding(mesh(2), P("x"))
    train.save(path, keys)
    like = jax.device_put(jr.split(jr.key(1), 4), sharding)
    restored = train.restore(path, like).state
    assert restored.sharding.is_equivalent_to(sharding, 1)
    assert bits(jr.key_data(restored)) == bits(jr.key_data(keys))


def test_manifest_says_what_was_saved(path):
    state = train.TrainState.create(nn.Linear(2, 3, key=jr.key(0)), optax.sgd(1), key=jr.key(1))
    train.save(path, state)
    content = json.loads((path / "manifest.json").read_text())["content"]
    assert content["step"] == 0
    assert content["versions"]["jax"] == jax.__version__
    assert content["versions"]["eqxlike"] == eqx.__version__
    weight = content["leaves"][0]
    assert weight["leaf"]["path"] == ".model.weight"
    assert weight["leaf"]["shape"] == [3, 2]
    assert weight["leaf"]["dtype"] == "float32"
    assert "SingleDeviceSharding" in weight["sharding"]
    assert [".model", "Linear(in_features=2, out_features=3, use_bias=True)"] in content["nodes"]
    assert [leaf["leaf"]["key"] for leaf in content["leaves"] if leaf["leaf"]["kind"] == "key"] == [
        "threefry2x32"
    ]


def test_checksum_in_the_manifest_is_that_of_sha256sum(path):
    state = np.arange(5, dtype=np.int32)
    train.save(path, state)
    (leaf,) = json.loads((path / "manifest.json").read_text())["content"]["leaves"]
    (file,) = path.glob("arrays-*/00000/0")
    found = subprocess.run(["sha256sum", file], capture_output=True, text=True, check=True).stdout
    assert found.split()[0] == leaf["checksum"]


def test_orbax_reads_the_arrays_by_itself(path):
    import orbax.checkpoint as ocp

    train.save(path, {"weight": np.arange(3.0)})
    (arrays,) = path.glob("arrays-*")
    restored = ocp.PyTreeCheckpointHandler(use_ocdbt=False).restore(
        arrays,
        args=ocp.args.PyTreeRestore(
            {"00000.weight": 0},
            restore_args={"00000.weight": ocp.RestoreArgs(restore_type=np.ndarray)},
        ),
    )
    assert restored["00000.weight"].tolist() == [0, 1, 2]


def test_checkpoint_can_be_moved(path, tmp_path):
    train.save(path, np.arange(3.0))
    path.rename(tmp_path / "elsewhere")
    assert train.restore(tmp_path / "elsewhere", np.zeros(3)).state.tolist() == [0, 1, 2]


def test_checkpoint_that_is_replaced_while_it_is_read_is_read_anew(path, monkeypatch):
    train.save(path, np.zeros(1), 0)
    check = _restore.check_files
    calls = []

    def check_files(*args):
        if not calls:
            train.save(path, np.ones(1), 1)
        calls.append(args)
        check(*args)

    monkeypatch.setattr(_restore, "check_files", check_files)
    state, data = train.restore(path, np.zeros(1))
    assert (state, data, len(calls)) == (1, 1, 2)


def test_checkpoint_is_replaced_where_a_symbolic_link_points(path, tmp_path):
    train.save(path, np.zeros(1))
    (tmp_path / "link").symlink_to(path)
    train.save(tmp_path / "link", np.ones(1))
    assert train.restore(path, np.zeros(1)).state == 1
    assert (tmp_path / "link").is_symlink()


def test_import_of_train_brings_in_no_orbax():
    source = "import sys, eqxlike.train; print({'orbax', 'tensorstore'} & set(sys.modules))"
    command = [sys.executable, "-c", source]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert found.strip() == "set()"


def test_without_orbax_the_error_says_what_to_install(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"pip install 'eqxlike\[train\]'"):
        train.save(path, np.zeros(1))


def test_ml_dtypes_that_are_tested_are_those_of_jax():
    assert all(hasattr(ml_dtypes, name) and hasattr(jnp, name) for name in ADDED)
