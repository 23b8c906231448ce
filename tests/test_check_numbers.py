"""Checks of integers and keys."""

import argparse

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from eqxlike._check_numbers import whole_number, whole_number_in
from eqxlike._dtypes import is_key


@pytest.mark.parametrize("value", [3, np.uint8(3), np.array(3), jnp.array(3)])
def test_whole_number_becomes_a_python_int(value):
    number = whole_number(value, "size", least=3)
    assert type(number) is int
    assert number == 3


@pytest.mark.parametrize("value", [-1, 1.0, "1", True, np.True_, np.array([1])])
def test_other_values_are_refused_by_name(value):
    with pytest.raises(ValueError, match="size must be an integer of at least 0, got ") as error:
        whole_number(value, "size", least=0)
    assert repr(value) in str(error.value)


def test_text_is_read_as_in_python():
    assert [whole_number_in(text) for text in ("1", " 7 ", "1_000")] == [1, 7, 1000]


@pytest.mark.parametrize("text", ["0", "1.5", "many", ""])
def test_other_text_is_refused(text):
    message = f"must be an integer of at least 1, got '{text}'"
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        whole_number_in(text)


def test_only_typed_arrays_structs_and_tracers_are_keys():
    keys, seen = jr.split(jr.key(0), 3), []
    jax.eval_shape(lambda traced: seen.append(is_key(traced)), keys)
    assert [is_key(keys), is_key(jax.eval_shape(lambda: keys)), *seen] == [True] * 3
    for value in (jr.PRNGKey(0), jnp.zeros(2), np.zeros(2, np.uint32), None, "key", jr.key):
        assert not is_key(value)
