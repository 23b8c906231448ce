"""Integers, however a caller writes them, and what is none."""

import argparse

import jax.numpy as jnp
import numpy as np
import pytest

from eqxlike._numbers import whole_number, whole_number_in


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), np.array(3), jnp.array(3)])
def test_whole_number_is_an_int_of_python_whoever_made_it(value):
    number = whole_number(value, "size")
    assert type(number) is int
    assert number == 3


@pytest.mark.parametrize("value", [-1, 1.0, "1", True, np.True_, None, np.array([1])])
def test_what_is_no_whole_number_is_refused_by_name(value):
    with pytest.raises(ValueError, match="size must be an integer of at least 0, got ") as error:
        whole_number(value, "size", least=0)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(("text", "number"), [("1", 1), (" 7 ", 7), ("1_000", 1000)])
def test_whole_number_is_read_from_text_as_python_reads_it(text, number):
    assert whole_number_in(text) == number


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "many", ""])
def test_text_that_is_no_whole_number_is_refused(text):
    message = f"must be an integer of at least 1, got '{text}'"
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        whole_number_in(text)


def test_text_of_a_number_above_the_most_is_refused():
    message = "must be an integer of at least 0 and at most 9, got '10'"
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        whole_number_in("10", 0, 9)
