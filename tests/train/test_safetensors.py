"""Models in safetensors files: what others read of ours, and what ours take from others."""

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
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import eqxlike as eqx
from eqxlike import nn, train


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def test_safetensors_reads_what_was_exported(path, getkey):
    model = nn.MLP(2, 3, 4, 1, key=getkey())
    train.export_safetensors(model, path)
    found = load_file(path)
    assert sorted(found) == [
        "layers.0.bias",
        "layers.0.weight",
        "layers.1.bias",
        "layers.1.weight",
    ]
    np.testing.assert_array_equal(found["layers.1.weight"], model.layers[1].weight)


def test_metadata_is_there_and_names_the_format_that_tools_ask_for(path):
    train.export_safetensors({"w": zeros(1)}, path, {"author": "ä"})
    with safe_open(path, framework="np") as file:
        assert file.metadata() == {"format": "pt", "author": "ä"}


def test_export_and_import_are_inverse(path, getkey):
    model = nn.MLP(2, 3, 4, 1, key=getkey())
    train.export_safetensors(model, path)
    like = eqx.filter_eval_shape(lambda key: nn.MLP(2, 3, 4, 1, key=key), jr.key(0))
    assert eqx.tree_equal(train.import_safetensors(like, path), model)


DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
DTYPES += ["float16", "float32", "float64", "bfloat16", "complex64"]
DTYPES += ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]


@pytest.mark.parametrize("shape", [(2, 3), (), (0, 3)])
def test_every_dtype_that_safetensors_has_comes_back(path, shape):
    names = [getattr(ml_dtypes, name, name) for name in DTYPES]
    model = {str(np.dtype(name)): np.ones(shape, name) * np.ones((), name) for name in names}
    train.export_safetensors(model, path)
    found = train.import_safetensors(jax.tree.map(np.zeros_like, model), path)
    assert sorted(model) == sorted(DTYPES)
    assert {name: array.dtype for name, array in found.items()} == {
        name: array.dtype for name, array in model.items()
    }
    for name, array in model.items():
        assert found[name].shape == shape
        assert found[name].tobytes() == array.tobytes()


def test_order_of_bytes_and_of_axes_of_an_array_does_not_matter(path):
    model = {"big": np.arange(3, dtype=">f4"), "fortran": np.asfortranarray(np.eye(2, 3))}
    train.export_safetensors(model, path)
    assert load_file(path)["big"].tolist() == [0, 1, 2]
    found = train.import_safetensors(jax.tree.map(np.zeros_like, model), path)
    assert found["big"].dtype == ">f4"
    assert found["big"].tolist() == [0, 1, 2]
    assert found["fortran"].tolist() == np.eye(2, 3).tolist()


def test_names_of_frozen_arrays_are_those_of_the_model(path, getkey):
    model = nn.freeze(nn.Linear(2, 3, key=getkey()))
    train.export_safetensors(model, path)
    assert sorted(load_file(path)) == ["bias", "weight"]
    assert eqx.tree_equal(train.import_safetensors(model, path), model)


def test_what_is_no_array_is_left_out_and_kept(path):
    train.export_safetensors({"w": zeros(1), "rate": 0.1, "f": jnp.sin, "none": None}, path)
    assert list(load_file(path)) == ["w"]
    like = {"w": zeros(1), "rate": 0.2, "f": jnp.cos, "none": None}
    found = train.import_safetensors(like, path)
    assert (found["rate"], found["f"]) == (0.2, jnp.cos)


def test_arrays_take_the_sharding_of_the_model(path):
    train.export_safetensors({"w": np.arange(4.0, dtype=np.float32)}, path)
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), P("x"))
    like = {"w": jax.device_put(jnp.zeros(4), sharding)}
    found = train.import_safetensors(like, path)
    assert found["w"].sharding == sharding
    assert found["w"].tolist() == [0, 1, 2, 3]


def test_imported_model_can_be_trained(path, getkey):
    model = nn.Linear(2, 1, key=getkey())
    train.export_safetensors(model, path)
    model = train.import_safetensors(model, path)
    optimiser = optax.sgd(0.1)
    state = train.TrainState.create(model, optimiser, key=getkey())
    step = train.make_step(lambda model, x, key: jnp.mean(jax.vmap(model)(x) ** 2), optimiser)
    assert train.fit(state, step, [jnp.ones((3, 2))] * 2, num_steps=2).stopped == "finished"


def linear(x, weights, name):
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def random_weights(shapes):
    random = np.random.default_rng(0)
    return {name: random.normal(size=shape).astype("f4") for name, shape in shapes.items()}


def linear_shapes(name, size_in, size_out):
    return {f"{name}.weight": (size_out, size_in), f"{name}.bias": (size_out,)}


def test_mlp_of_pytorch_computes_the_same(path):
    """`torch.nn.Sequential(Linear(2, 4), ReLU(), Linear(4, 3))`, in NumPy."""
    weights = random_weights(linear_shapes("0", 2, 4) | linear_shapes("2", 4, 3))
    save_file(weights, path)
    model = train.import_safetensors(
        nn.MLP(2, 3, 4, 1, key=jr.key(0)),
        path,
        lambda name: name.replace("layers.0.", "0.").replace("layers.1.", "2."),
    )
    x = np.random.default_rng(1).normal(size=(5, 2)).astype("f4")
    expected = linear(np.maximum(linear(x, weights, "0"), 0), weights, "2")
    np.testing.assert_allclose(jax.vmap(model)(x), expected, atol=1e-5)


class Block(eqx.Module):
    """`torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0, norm_first=True, batch_first=True)`."""

    attention: nn.MultiheadAttention
    norm_1: nn.LayerNorm
    norm_2: nn.LayerNorm
    mlp: nn.MLP

    def __init__(self, *, key):
        attention_key, mlp_key = jr.split(key)
        biases = dict.fromkeys(["query", "key", "value", "output"], True)
        self.attention = nn.MultiheadAttention(
            2, 4, key=attention_key, **{f"use_{name}_bias": value for name, value in biases.items()}
        )
        self.norm_1, self.norm_2 = nn.LayerNorm(4), nn.LayerNorm(4)
        self.mlp = nn.MLP(4, 4, 8, 1, key=mlp_key)

    def __call__(self, x):
        y = jax.vmap(self.norm_1)(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm_2)(x))


def third(index):
    return lambda stacked: np.split(stacked, 3)[index]


# For each name of ours that in PyTorch's encoder layer, which stacks three projections.
BLOCK_NAMES = {
    f"attention.{ours}_proj.{what}": (f"self_attn.in_proj_{what}", third(index))
    for index, ours in enumerate(["query", "key", "value"])
    for what in ("weight", "bias")
}
BLOCK_NAMES |= {
    f"{ours}.{what}": f"{theirs}.{what}"
    for what in ("weight", "bias")
    for ours, theirs in {
        "attention.output_proj": "self_attn.out_proj",
        "norm_1": "norm1",
        "norm_2": "norm2",
        "mlp.layers.0": "linear1",
        "mlp.layers.1": "linear2",
    }.items()
}


def norm(x, weights, name):
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def block_in_numpy(x, weights):
    """PyTorch's formula, as its page has it."""
    y = norm(x, weights, "norm1")
    stacked = y @ weights["self_attn.in_proj_weight"].T + weights["self_attn.in_proj_bias"]
    heads = []
    for head in range(2):
        query, key, value = (each[:, 2 * head : 2 * head + 2] for each in np.split(stacked, 3, -1))
        scores = np.exp(query @ key.T / np.sqrt(2))
        heads.append(scores / scores.sum(-1, keepdims=True) @ value)
    x = x + linear(np.concatenate(heads, -1), weights, "self_attn.out_proj")
    hidden = np.maximum(linear(norm(x, weights, "norm2"), weights, "linear1"), 0)
    return x + linear(hidden, weights, "linear2")


def test_transformer_block_of_pytorch_computes_the_same(path):
    weights = random_weights(
        {"self_attn.in_proj_weight": (12, 4), "self_attn.in_proj_bias": (12,)}
        | {f"norm{number}.{what}": (4,) for number in (1, 2) for what in ("weight", "bias")}
        | linear_shapes("self_attn.out_proj", 4, 4)
        | linear_shapes("linear1", 4, 8)
        | linear_shapes("linear2", 8, 4)
    )
    save_file(weights, path)
    model = train.import_safetensors(
        eqx.filter_eval_shape(lambda key: Block(key=key), jr.key(0)), path, BLOCK_NAMES
    )
    x = np.random.default_rng(1).normal(size=(5, 4)).astype("f4")
    np.testing.assert_allclose(model(x), block_in_numpy(x, weights), atol=1e-5)


def refusal(*arguments, **options):
    with pytest.raises(ValueError, match="safetensors") as caught:
        train.import_safetensors(*arguments, **options)
    return str(caught.value)


def test_all_that_does_not_fit_is_named_at_once(path):
    save_file({"a": zeros(2), "b": zeros(2), "d": zeros(1), "x": zeros(1), "y": zeros(1)}, path)
    like = {"a": zeros(3), "b": zeros(2, dtype=np.int32), "c": zeros(1), "d": zeros(1)}
    assert refusal(like, path) == (
        f"{path} does not fit `model_like`: a has shape (2,), and (3,) is expected; b has dtype "
        "float32, and int32 is expected; c is missing; x is in the file alone; y is in the file "
        "alone. If the file has other names, give a table of `names`."
    )


def test_names_in_the_file_are_named_too(path):
    save_file({"theirs": zeros(2)}, path)
    assert "ours (in the file theirs) has shape (2,), and (3,)" in refusal(
        {"ours": zeros(3)}, path, {"ours": "theirs"}
    )
    assert refusal({"ours": zeros(2)}, path, {"ours": "other"}).endswith(
        "ours (in the file other) is missing; theirs is in the file alone."
    )


def test_what_a_function_gives_is_compared_with_the_model(path):
    save_file({"w": zeros(2, 3)}, path)
    like = {"w": zeros(3, 2)}
    found = train.import_safetensors(like, path, {"w": ("w", np.transpose)})
    assert found["w"].shape == (3, 2)
    assert "w has shape (6,), and (3, 2) is" in refusal(like, path, {"w": ("w", np.ravel)})
    halve = lambda array: array.T.astype(np.float16)
    assert "w has dtype float16, and float32 is" in refusal(like, path, {"w": ("w", halve)})


def test_array_that_a_function_gives_is_copied(path):
    save_file({"w": zeros(256)}, path)
    memory = zeros(256 + 16)
    # JAX takes over memory only where 64 bytes divide its address.
    start = -memory.ctypes.data % 64 // 4
    kept = memory[start : start + 256]
    found = train.import_safetensors({"w": jnp.ones(256)}, path, {"w": ("w", lambda _: kept)})
    kept[:] = 5
    assert not found["w"].any()


def test_error_of_a_function_says_whose_it_is(path):
    save_file({"w": zeros(2)}, path)
    with pytest.raises(ValueError, match="equal division") as caught:
        train.import_safetensors({"w": zeros(1)}, path, {"w": ("w", third(0))})
    assert caught.value.__notes__ == ["This was raised by the function in `names` for w."]


def test_one_that_is_not_strict_keeps_what_is_missing_and_leaves_what_is_more(path):
    save_file({"a": np.ones(2, np.float32), "x": zeros(1)}, path)
    like = {"a": zeros(2), "b": np.full(2, 7)}
    found = train.import_safetensors(like, path, strict=False)
    assert (found["a"].tolist(), found["b"].tolist()) == ([1, 1], [7, 7])
    assert "a has shape (2,), and (3,)" in refusal({"a": zeros(3)}, path, strict=False)


def test_struct_is_never_left_in_the_model(path):
    save_file({"x": zeros(1)}, path)
    like = {"a": jax.ShapeDtypeStruct((2,), np.float32)}
    assert "a is missing" in refusal(like, path, strict=False)


def test_name_that_the_model_does_not_have_is_refused(path):
    save_file({"a": zeros(2)}, path)
    with pytest.raises(
        ValueError, match="`names` has typo, and the arrays of `model_like` are a, "
    ):
        train.import_safetensors({"a": zeros(2), "b": zeros(2)}, path, {"typo": "a"})


@pytest.mark.parametrize("entry", [None, 3, ("a", "b"), ("a",)])
def test_entry_of_names_that_is_none_is_refused(path, entry):
    save_file({"a": zeros(2)}, path)
    with pytest.raises(TypeError, match="a string, or a pair of it and a function; for a it gave"):
        train.import_safetensors({"a": zeros(2)}, path, lambda name: entry)


def test_names_that_are_no_table_are_refused(path):
    save_file({"a": zeros(2)}, path)
    with pytest.raises(TypeError, match=r"to be a table or a function, and is \['a'\]"):
        train.import_safetensors({"a": zeros(2)}, path, ["a"])


def test_names_that_stand_for_two_arrays_are_refused(path):
    model = {"a.b": zeros(1), "a": {"b": zeros(1)}}
    for call in (train.export_safetensors, train.import_safetensors):
        with pytest.raises(ValueError, match=r"stand for more than one array each: a\.b\. Rename"):
            call(model, path)
    assert not path.exists()


NO_DTYPES = {
    "key": lambda: jr.key(0),
    "complex128": lambda: zeros(1, dtype=np.complex128),
    "int4": lambda: jnp.zeros(1, "int4"),
    "objects": lambda: np.array([None]),
}


def test_number_of_64_bits_for_jax_needs_its_flag(path):
    save_file({"w": zeros(2, dtype=np.float64)}, path)
    like = {"w": jax.ShapeDtypeStruct((2,), np.float64)}
    assert "w has dtype float64, which JAX has only with `jax.config." in refusal(like, path)


@pytest.mark.parametrize("name", NO_DTYPES)
def test_dtype_that_safetensors_does_not_have_is_named(path, name):
    with pytest.raises(TypeError, match=r"safetensors has no dtype .* model\['w'\]\. Cast it"):
        train.export_safetensors({"w": NO_DTYPES[name]()}, path)


def test_donated_array_is_refused(path):
    x = jnp.ones(2)
    x.delete()
    with pytest.raises(RuntimeError, match=r"deleted: model\['x'\]"):
        train.export_safetensors({"x": x}, path)


def test_file_that_is_damaged_is_told(path):
    save_file({"a": np.arange(4.0)}, path)
    whole = path.read_bytes()
    for damaged in (b"", whole[:5], whole[:40], whole[:-1], whole + b"x", b"x" * 100, b"\xff" * 8):
        path.write_bytes(damaged)
        message = refusal({"a": np.zeros(4)}, path)
        assert message.startswith(f"{path} is damaged, or no safetensors file: ")


def test_header_that_promises_more_than_the_file_holds_is_told(path):
    save_file({"a": np.arange(4.0)}, path)
    whole = path.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    header["a"] |= {"shape": [10**9], "data_offsets": [0, 8 * 10**9]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + size :])
    assert "is damaged" in refusal({"a": jax.ShapeDtypeStruct((10**9,), np.float64)}, path)


def test_file_that_is_not_there_is_named(path):
    with pytest.raises(FileNotFoundError, match=str(path)):
        train.import_safetensors({"a": zeros(1)}, path)


def test_old_file_stays_where_the_new_one_cannot_be_written(path):
    train.export_safetensors({"a": zeros(1)}, path)
    with pytest.raises(TypeError):
        train.export_safetensors({"a": jr.key(0)}, path)
    with pytest.raises(OSError, match="model"):
        train.export_safetensors({"a": zeros(1)}, path / "below")
    assert list(load_file(path)) == ["a"]
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_without_safetensors_the_error_says_what_to_install(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'eqxlike\[train\]'"):
        train.export_safetensors({"a": zeros(1)}, path)


def test_import_of_train_brings_in_no_safetensors():
    command = [
        sys.executable,
        "-c",
        "import sys, eqxlike.train; print('safetensors' in sys.modules)",
    ]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert found.strip() == "False"
