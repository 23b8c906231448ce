import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import eqxlike as eqx
from eqxlike import nn
from tests.pytorch.compare import Counterpart, assert_computes_the_same

SIZE = 4


def gru(use_bias):
    """PyTorch adds two biases at the first two gates. Ours has one, so PyTorch's second is zero."""
    cell = torch.nn.GRUCell(3, SIZE, bias=use_bias)
    if use_bias:
        cell.bias_hh.data[: 2 * SIZE] = 0
    return cell


def lstm(use_bias):
    cell = torch.nn.LSTMCell(3, SIZE, bias=use_bias)
    if use_bias:
        cell.bias_hh.data[:] = 0
    return cell


def last_rows(bias):
    return np.array(bias[2 * SIZE :])


def states_of(cell, x, hidden, memory):
    h, c = cell(x, (hidden, memory))
    return h * 2 + c


def scan_of(cell, xs, hidden, memory):
    def step(state, x):
        state = cell(x, state)
        return state, state[0]

    return jax.lax.scan(step, (hidden, memory), xs)[1]


def loop_of(cell, xs, hidden, memory):
    states = []
    for x in xs:
        hidden, memory = cell(x, (hidden, memory))
        states.append(hidden)
    return torch.stack(states)


WEIGHTS = {"weight_ih": "weight_ih", "weight_hh": "weight_hh"}
GRU_BIASES = {"bias": "bias_ih", "bias_n": ("bias_hh", last_rows)}
COUNTERPARTS = {
    "GRUCell": Counterpart(
        lambda **options: nn.GRUCell(3, SIZE, **options),
        lambda: gru(use_bias=True),
        ((3,), (SIZE,)),
        WEIGHTS | GRU_BIASES,
    ),
    "GRUCell-no-bias": Counterpart(
        lambda **options: nn.GRUCell(3, SIZE, False, **options),
        lambda: gru(use_bias=False),
        ((3,), (SIZE,)),
        WEIGHTS,
    ),
    "LSTMCell": Counterpart(
        lambda **options: nn.LSTMCell(3, SIZE, **options),
        lambda: lstm(use_bias=True),
        ((3,), (SIZE,), (SIZE,)),
        WEIGHTS | {"bias": "bias_ih"},
        states_of,
        states_of,
    ),
    "LSTMCell-no-bias": Counterpart(
        lambda **options: nn.LSTMCell(3, SIZE, False, **options),
        lambda: lstm(use_bias=False),
        ((3,), (SIZE,), (SIZE,)),
        WEIGHTS,
        states_of,
        states_of,
    ),
    "LSTMCell-scan": Counterpart(
        lambda **options: nn.LSTMCell(3, SIZE, **options),
        lambda: lstm(use_bias=True),
        ((7, 3), (SIZE,), (SIZE,)),
        WEIGHTS | {"bias": "bias_ih"},
        scan_of,
        loop_of,
    ),
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", COUNTERPARTS)
def test_cell_computes_what_pytorch_does(name, dtype):
    assert_computes_the_same(COUNTERPARTS[name], dtype)


# --- Layers: PyTorch's bidirectional layer, and two of our layers, on a padded batch ---

LENGTHS = [7, 3, 1]


class TheirLayer(torch.nn.Module):
    """A bidirectional layer that packs its padded sequences."""

    def __init__(self, make):
        super().__init__()
        self.layer = make(3, SIZE, batch_first=True, bidirectional=True)
        for name, bias in self.layer.named_parameters():
            if name.startswith("bias_hh"):
                bias.data[: 2 * SIZE if make is torch.nn.GRU else None] = 0

    def forward(self, xs):
        utils = torch.nn.utils.rnn
        packed = utils.pack_padded_sequence(xs, LENGTHS, batch_first=True)
        outputs, last = self.layer(packed)
        outputs = utils.pad_packed_sequence(outputs, batch_first=True)[0]
        # The last state has the shape (directions, batch, size).
        last = torch.cat([*last] if isinstance(last, tuple) else [last])
        return torch.cat([outputs.flatten(), last.flatten()])


class OurLayer(eqx.Module):
    forward: nn.RNN
    backward: nn.RNN

    def __call__(self, xs):
        lengths = jnp.array(LENGTHS)
        results = [
            jax.vmap(lambda x, length: layer(x, length=length))(xs, lengths)  # noqa: B023
            for layer in (self.forward, self.backward)
        ]
        outputs = jnp.concatenate([each for each, _ in results], axis=-1)
        states = [state if isinstance(state, tuple) else (state,) for _, state in results]
        last = [part.ravel() for parts in zip(*states, strict=True) for part in parts]
        return jnp.concatenate([outputs.ravel(), *last])


def layer_counterpart(cell, make):
    def ours(key, dtype):
        forward, backward = (cell(3, SIZE, dtype=dtype, key=each) for each in jax.random.split(key))
        return OurLayer(nn.RNN(forward), nn.RNN(backward, reverse=True))

    parameters = {}
    for direction, suffix in (("forward", "_l0"), ("backward", "_l0_reverse")):
        names = {"weight_ih": "weight_ih", "weight_hh": "weight_hh", "bias": "bias_ih"}
        parameters |= {
            f"{direction}.cell.{name}": f"layer.{their}{suffix}" for name, their in names.items()
        }
        if cell is nn.GRUCell:
            parameters[f"{direction}.cell.bias_n"] = (f"layer.bias_hh{suffix}", last_rows)
    return Counterpart(ours, lambda: TheirLayer(make), ((3, 7, 3),), parameters)


@pytest.mark.parametrize(
    ("cell", "make"), [(nn.LSTMCell, torch.nn.LSTM), (nn.GRUCell, torch.nn.GRU)]
)
def test_two_layers_compute_what_a_bidirectional_layer_of_pytorch_does(cell, make):
    assert_computes_the_same(layer_counterpart(cell, make), "float64")
