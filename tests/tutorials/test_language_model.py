"""The tutorial on a language model, in a short form."""

import re

import jax
import numpy as np
import pytest


@pytest.fixture
def module(script):
    return script("language_model")


def test_short_run_is_judged_beside_tables_and_writes(module, capsys):
    command = "--steps 2 --width 8 --depth 1 --characters 3000 --write 10"
    with jax.numpy_dtype_promotion("standard"):
        module.main(command.split())
    output = capsys.readouterr().out
    tables = re.findall(r"tables of \w+ +(\d\.\d+)", output)
    assert len(tables) == 3
    (model,) = re.findall(r"the transformer +(\d\.\d+)", output)
    assert float(model) > max(map(float, tables))  # after two batches
    written = output.partition("It writes:\n\n")[2]
    assert len(written.replace("\n    ", "\n").removeprefix("    ").strip("\n")) <= 10


@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_chances_of_all_characters_sum_to_one(module, length):
    random = np.random.default_rng(0)
    learned, before = random.integers(0, 4, 50), [2, 1]
    chances = [
        module.chances(length, learned, np.array([*before, each]), 4)[2] for each in range(4)
    ]
    assert sum(chances) == pytest.approx(1)


def test_pairs_are_counted(module):
    learned, text = np.array([0, 1, 0, 1, 1]), np.array([1, 0, 1])
    # Of the ring 0 1 0 1 1: 11 once, 10 twice, 01 twice; `text` ends in 11, 10 and 01.
    np.testing.assert_array_equal(module.counted(2, learned, text, 2), [1, 2, 2])
