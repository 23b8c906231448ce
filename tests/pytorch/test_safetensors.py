"""A `state_dict` of PyTorch is imported in our models, and our models are exported to PyTorch."""

import jax
import jax.random as jr
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import eqxlike as eqx
from eqxlike import nn, train
from eqxlike.train import Stored


class Block(eqx.Module):
    """As `TransformerEncoderLayer(4, 2, 8, dropout=0, norm_first=True, batch_first=True)`."""

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


# Maps our names to PyTorch's. PyTorch's encoder layer stacks three projections.
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


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def assert_same_output(ours, theirs, shape):
    x = np.random.default_rng(0).normal(size=shape).astype("f4")
    with torch.no_grad():
        expected = theirs(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(jax.vmap(ours)(x), expected, atol=1e-5)


def test_mlp_of_pytorch_computes_the_same(path):
    theirs = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    save_file(theirs.state_dict(), path)
    ours = train.import_safetensors(
        nn.MLP(2, 3, 4, 1, key=jr.key(0)),
        path,
        lambda name: name.replace("layers.0.", "0.").replace("layers.1.", "2."),
    )
    assert_same_output(ours, theirs, (5, 2))


def test_transformer_block_of_pytorch_computes_the_same(path):
    theirs = torch.nn.TransformerEncoderLayer(
        4, 2, 8, dropout=0.0, norm_first=True, batch_first=True
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += torch.randn_like(parameter)
    save_file(theirs.state_dict(), path)
    like = eqx.filter_eval_shape(lambda key: Block(key=key), jr.key(0))
    ours = train.import_safetensors(like, path, BLOCK_NAMES)
    assert_same_output(ours, theirs, (2, 5, 4))


def test_pytorch_loads_an_exported_model(path):
    class Theirs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 4), torch.nn.Linear(4, 3)])

        def forward(self, x):
            return self.layers[1](torch.relu(self.layers[0](x)))

    ours, theirs = nn.MLP(2, 3, 4, 1, key=jr.key(0)), Theirs()
    train.export_safetensors(ours, path)
    theirs.load_state_dict(load_file(path))
    assert_same_output(ours, theirs, (5, 2))


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int64"])
def test_dtype_of_pytorch_is_kept(path, name):
    tensor = torch.arange(4.0).to(getattr(torch, name))
    save_file({"w": tensor}, path)
    like = {"w": np.zeros(4, jax.numpy.dtype(name))}
    found = train.import_safetensors(like, path)["w"]
    assert found.astype(np.float32).tolist() == [0, 1, 2, 3]
    train.export_safetensors({"w": found}, path)
    assert torch.equal(load_file(path)["w"].float(), tensor.float())


class Conv1D(torch.nn.Module):
    """A linear layer whose weight is (inputs, outputs), as in GPT-2."""

    def __init__(self, num_inputs, num_outputs):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(num_inputs, num_outputs))
        self.bias = torch.nn.Parameter(torch.randn(num_outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


class PackedAttention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(4, 12), Conv1D(4, 4)
        self.register_buffer("bias", torch.ones(5, 5).tril()[None, None])

    def forward(self, x):
        q, k, v = (
            each.unflatten(-1, (2, 2)).transpose(-2, -3) for each in self.c_attn(x).chunk(3, dim=-1)
        )
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(-2, -3).flatten(-2))


PACKED_NAMES = {
    f"{{i}}.{ours}_proj.*": Stored("h.{i}.c_attn.*", transpose=True, part=(index, 3))
    for index, ours in enumerate(["query", "key", "value"])
}
PACKED_NAMES["{i}.output_proj.*"] = Stored("h.{i}.c_proj.*", transpose=True)


@pytest.mark.parametrize("is_stacked", [True, False])
def test_packed_and_transposed_attention_of_pytorch_computes_the_same(path, is_stacked):
    biases = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
    make = lambda key: nn.MultiheadAttention(2, 4, key=key, **biases)
    stack = eqx.filter_eval_shape(lambda key: nn.ScanStack(make, 2, key=key), jr.key(0))
    like = stack if is_stacked else list(stack.unstack())
    theirs = torch.nn.ModuleDict({"h": torch.nn.ModuleList([PackedAttention(), PackedAttention()])})
    save_file(theirs.state_dict(), path)
    ours = train.import_safetensors(like, path, PACKED_NAMES, ignore="h.*.bias")
    first, second = ours.unstack() if is_stacked else ours
    causal = lambda layer: lambda x: layer(x, x, x, mask="causal")
    both = lambda x: causal(second)(causal(first)(x))
    assert_same_output(both, torch.nn.Sequential(*theirs["h"]), (3, 5, 4))
    train.export_safetensors(ours, path, PACKED_NAMES)
    parameters = dict(theirs.named_parameters())
    found = load_file(path)
    assert sorted(found) == sorted(parameters)
    assert all(torch.equal(found[name], parameters[name]) for name in found)


def test_both_biases_of_an_lstm_are_added_and_written(path):
    names = {
        "weight_*": "cell.weight_*_l0",
        "bias": Stored(
            "cell.bias_ih_l0", "cell.bias_hh_l0", load=np.add, save=lambda b: (b, 0 * b)
        ),
    }
    theirs = torch.nn.ModuleDict({"cell": torch.nn.LSTM(3, 4)})
    save_file(theirs.state_dict(), path)
    cell = train.import_safetensors(nn.LSTMCell(3, 4, key=jr.key(0)), path, names)

    def outputs(xs):
        step = lambda state, x: (new := cell(x, state), new[0])
        return jax.lax.scan(step, (jax.numpy.zeros(4), jax.numpy.zeros(4)), xs)[1]

    batch_of = lambda lstm: lambda x: lstm["cell"](x.transpose(0, 1))[0].transpose(0, 1)
    assert_same_output(outputs, batch_of(theirs), (2, 5, 3))
    train.export_safetensors(cell, path, names)
    again = torch.nn.ModuleDict({"cell": torch.nn.LSTM(3, 4)})
    again.load_state_dict(load_file(path))
    assert_same_output(outputs, batch_of(again), (2, 5, 3))


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_convolution_and_running_statistics_of_pytorch_compute_the_same(path, mode):
    def make():
        conv = nn.Conv2d(2, 4, 3, key=jr.key(0))
        return nn.Sequential(
            [conv, nn.BatchNorm(4, "batch", momentum=0.9, mode=mode, unbiased=True)]
        )

    theirs = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4))
    for _ in range(3):
        theirs(torch.randn(8, 2, 5, 5) + 1)
    save_file(theirs.eval().state_dict(), path)
    names = {
        "0.layers.0.bias": Stored("0.bias", shape=(-1,)),
        "0.layers.1.batch_counter" if mode == "batch" else "0.layers.1.ema_first_time": None,
        "0.layers.*": "*",
    }
    both = nn.make_with_state(make)()
    ours, state = train.import_safetensors(both, path, names, ignore="*.num_batches_tracked")
    running = lambda x: nn.inference_mode(ours)(x, state)[0]
    assert_same_output(running, theirs, (3, 2, 5, 5))
    # Training continues from the statistics, as in PyTorch.
    x = np.random.default_rng(1).normal(size=(8, 2, 5, 5)).astype("f4")
    batched = jax.vmap(ours, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    state = batched(x, state)[1]
    theirs.train()(torch.from_numpy(x))
    train.export_safetensors((ours, state), path, names)
    found = load_file(path)
    assert sorted(found) == sorted({*theirs.state_dict()} - {"1.num_batches_tracked"})
    np.testing.assert_allclose(found["1.running_mean"], theirs[1].running_mean, atol=1e-5)
    np.testing.assert_allclose(found["1.running_var"], theirs[1].running_var, rtol=1e-5)
    again = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4)).eval()
    again.load_state_dict(found)
    running = lambda x: nn.inference_mode(ours)(x, state)[0]
    assert_same_output(running, again, (3, 2, 5, 5))


def test_bfloat16_of_pytorch_becomes_float32_and_the_reverse(path):
    theirs = torch.nn.Linear(3, 4)
    save_file({name: each.bfloat16() for name, each in theirs.state_dict().items()}, path)
    like = nn.Linear(3, 4, key=jr.key(0))
    ours = train.import_safetensors(like, path, dtype="like")
    np.testing.assert_array_equal(ours.weight, theirs.weight.detach().bfloat16().float())
    save_file(theirs.state_dict(), path)
    half = jax.tree.map(lambda array: array.astype("bfloat16"), like)
    ours = train.import_safetensors(half, path, dtype="like")
    expected = theirs.weight.detach().bfloat16().float()
    np.testing.assert_array_equal(ours.weight.astype("float32"), expected)
