"""The tutorial on a language model, in a short form."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.fixture
def module(script):
    return script("language_model")


def test_short_run_is_judged_beside_tables_and_writes(module, capsys):
    command = "--steps 4 --width 8 --depth 2 --characters 3000 --write 10"
    with jax.numpy_dtype_promotion("standard"):
        module.main(command.split())
    output = capsys.readouterr().out
    tables = re.findall(r"tables of \w+ +(\d\.\d+)", output)
    assert len(tables) == 3
    (model,) = re.findall(r"the transformer +(\d\.\d+)", output)
    assert float(model) > max(map(float, tables))  # after four batches
    written = output.partition("It writes:\n\n")[2]
    assert len(written.replace("\n    ", "\n").removeprefix("    ").strip("\n")) <= 10


def test_what_comes_later_changes_nothing_before(module):
    model = module.LanguageModel(5, 8, 2, jax.random.key(0))
    first, second = model(jnp.array([1, 2, 3, 4])), model(jnp.array([1, 2, 0, 0]))
    np.testing.assert_allclose(first[:2], second[:2], rtol=1e-5)
    assert not np.allclose(first[2:], second[2:])


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
