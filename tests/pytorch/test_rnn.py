import jax
import numpy as np
import pytest
import torch

from eqxlike import nn
from tests.pytorch.compare import Counterpart, assert_computes_the_same

SIZE = 4


def gru(use_bias):
    """PyTorch has two biases at each gate; those that add up are one in ours, and zero here."""
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
