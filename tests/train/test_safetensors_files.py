"""Shards, folders and large arrays: which files are read, and in which parts."""

import json
import re
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from eqxlike import nn, train

MODEL = {name: np.full(64, number, np.float32) for number, name in enumerate("cabd")}
LIKE = jax.tree.map(np.zeros_like, MODEL)


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("limit", "num"), [(1, 4), (256, 4), (512, 2), (800, 2)])
def test_shards_fill_their_limit_and_an_index_lists_them(tmp_path, limit, num):
    train.export_safetensors(MODEL, tmp_path, metadata={"by": "us"}, max_shard_bytes=limit)
    index = tmp_path / "model.safetensors.index.json"
    names = [f"model-{i:05}-of-{num:05}.safetensors" for i in range(1, num + 1)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, index.name])
    content = json.loads(index.read_text())
    assert content["metadata"] == {"total_size": 4 * 256}
    for name, shard in content["weight_map"].items():
        np.testing.assert_array_equal(load_file(tmp_path / shard)[name], MODEL[name])
    with safe_open(tmp_path / names[-1], framework="np") as file:
        assert file.metadata() == {"format": "pt", "by": "us"}
    shards = [tmp_path / name for name in names]
    for source in (tmp_path, str(index), shards):
        assert_same(train.import_safetensors(LIKE, source), MODEL)
    index.unlink()
    assert_same(train.import_safetensors(LIKE, tmp_path), MODEL)


def test_model_below_the_limit_is_one_file(tmp_path):
    for limit in (None, 1024):
        train.export_safetensors(MODEL, tmp_path, max_shard_bytes=limit)
        assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert_same(train.import_safetensors(LIKE, tmp_path), MODEL)


def test_export_is_refused_next_to_files_that_other_tools_would_read_instead(tmp_path):
    train.export_safetensors(MODEL, tmp_path)
    with pytest.raises(FileExistsError, match=r"model\.safetensors exists, and tools would read"):
        train.export_safetensors(MODEL, tmp_path, max_shard_bytes=256)
    (tmp_path / "model.safetensors").unlink()
    train.export_safetensors(MODEL, tmp_path, max_shard_bytes=256)
    with pytest.raises(FileExistsError, match=r"index\.json exists, and tools would read"):
        train.export_safetensors(MODEL, tmp_path)


def test_a_failed_export_leaves_all_files_unchanged(tmp_path):
    train.export_safetensors(MODEL, tmp_path, max_shard_bytes=512)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    calls = []

    def save(array):
        calls.append(None)
        if len(calls) > 1:
            raise RuntimeError("second call")
        return array

    names = {"d": train.Stored("d", load=np.copy, save=save)}
    other = jax.tree.map(lambda array: array + 1, MODEL)
    with pytest.raises(RuntimeError, match="second call"):
        train.export_safetensors(other, tmp_path, names, max_shard_bytes=512)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_unreadable_sources_are_refused(tmp_path):
    def refusal(source, error):
        with pytest.raises(error) as caught:
            train.import_safetensors(LIKE, source)
        return str(caught.value)

    assert refusal(tmp_path, FileNotFoundError) == f"{tmp_path} has no file `*.safetensors`."
    one, two = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    save_file({"a": MODEL["a"]}, one)
    save_file({"a": MODEL["a"], "x": MODEL["b"]}, two)
    message = f"a is in two files, {one} and {two}: pass one of them."
    assert refusal(tmp_path, ValueError) == refusal([one, two], ValueError) == message
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": one.name, "b": "3.safetensors"}}))
    message = f"{index} lists shards that are missing: {tmp_path / '3.safetensors'}."
    assert refusal(tmp_path, FileNotFoundError) == message
    for damaged in ("{", "[]", "{}"):
        index.write_text(damaged)
        assert refusal(index, ValueError).startswith(f"{index} is damaged or not an index")
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    several = "has several indices, model.safetensors.index.json, other"
    assert several in refusal(tmp_path, ValueError)
    # An error about arrays in several files names the file of each array.
    like = {"a": np.zeros(3, np.float32), "x": np.zeros(3, np.float32)}
    save_file({"x": MODEL["a"]}, two)
    message = f"{one}, {two} does not fit `model_like`: a (a in 1.safetensors) is float32 of shape"
    with pytest.raises(ValueError, match=re.escape(message) + r".*; x \(x in 2\.safetensors\) is"):
        train.import_safetensors(like, [one, two])


@pytest.mark.parametrize("spec", [(), ("x",), (None, "x"), (None, None, "x")])
def test_each_device_gets_its_part(tmp_path, spec, getkey):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    stack = nn.ScanStack(lambda key: nn.Linear(6, 4, use_bias=False, key=key), 2, key=getkey())
    names, path = {"*": train.Stored("*", transpose=True)}, tmp_path / "model.safetensors"
    train.export_safetensors(stack, path, names)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    struct = jax.ShapeDtypeStruct((2, 4, 6), jnp.bfloat16, sharding=sharding)
    for weight in (struct, jax.device_put(jnp.zeros((2, 4, 6), jnp.bfloat16), sharding)):
        like = jax.tree.map(lambda _, weight=weight: weight, stack.with_layers(stack.unstack()))
        found = train.import_safetensors(like, tmp_path, names, dtype="like").layers.weight
        assert found.sharding == sharding
        np.testing.assert_array_equal(found, stack.layers.weight.astype(jnp.bfloat16))
    # An array on two devices can also be written.
    train.export_safetensors({"w": found}, path)
    np.testing.assert_array_equal(load_file(path)["w"], found)


def test_each_part_of_an_array_on_two_devices_is_read_and_written_separately(tmp_path, monkeypatch):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    size, shape = 2**20, (1024, 256)
    model = {str(i): jax.device_put(jnp.full(shape, float(i)), sharding) for i in range(8)}
    # Arrays do not keep the host copy that is written.
    peak, _ = peak_of(lambda: train.export_safetensors(model, tmp_path))
    assert peak < 2.1 * size
    sizes, make = [], jax.make_array_from_callback

    def recorded(shape, sharding, callback):
        def record(index):
            part = callback(index)
            sizes.append(part.nbytes)
            return part

        return make(shape, sharding, record)

    monkeypatch.setattr(jax, "make_array_from_callback", recorded)
    like = jax.tree.map(lambda array: array - array, model)
    found = train.import_safetensors(like, tmp_path)
    assert sizes == [size // 2] * 16
    assert_same(found, model)


def peak_of(function):
    tracemalloc.start()
    try:
        result = function()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


def test_memory_is_at_most_the_model_and_one_array(tmp_path):
    size = 2**20
    model = {str(i): np.ones(size // 4, np.float32) for i in range(8)}
    peak, _ = peak_of(lambda: train.export_safetensors(model, tmp_path, max_shard_bytes=2 * size))
    assert peak < 1.1 * size
    for dtype in (np.float32, jnp.bfloat16):
        like = {name: np.zeros(1, dtype).repeat(size // 4) for name in model}
        read = lambda like=like: train.import_safetensors(like, tmp_path, dtype="like")
        peak, found = peak_of(read)
        assert peak < sum(array.nbytes for array in found.values()) + 1.1 * size
