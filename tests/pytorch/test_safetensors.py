"""A `state_dict` of PyTorch in one of our models, and one of ours in PyTorch's."""

import jax
import jax.random as jr
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import eqxlike as eqx
from eqxlike import nn, train
from tests.train.test_safetensors import BLOCK_NAMES, Block


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


def test_pytorch_takes_what_was_exported(path):
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
def test_dtype_of_pytorch_is_ours(path, name):
    tensor = torch.arange(4.0).to(getattr(torch, name))
    save_file({"w": tensor}, path)
    like = {"w": np.zeros(4, jax.numpy.dtype(name))}
    found = train.import_safetensors(like, path)["w"]
    assert found.astype(np.float32).tolist() == [0, 1, 2, 3]
    train.export_safetensors({"w": found}, path)
    assert torch.equal(load_file(path)["w"].float(), tensor.float())
