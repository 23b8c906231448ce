"""The benchmark of first calls, large models and memory measures what it says."""

import jax
import pytest

from benchmarks import jit_edges
from benchmarks.cases import build, check_agreement

CASES = {case.name: case for case in jit_edges.warm_cases()}


@pytest.mark.parametrize("name", CASES)
def test_all_columns_of_a_row_agree(name):
    calls, notes = build(CASES[name])
    assert notes == []
    check_agreement(calls)


def test_a_first_call_gives_two_times_and_their_ratio():
    with jax.numpy_dtype_promotion("standard"):
        plain_s, filtered_s, ratio = jit_edges.first_calls(1, rounds=1)
    assert ratio == pytest.approx(filtered_s / plain_s)


def test_each_first_call_is_of_a_new_function():
    wrapped = []

    def wrap(function):
        wrapped.append(function)
        return lambda x: x

    for _ in range(2):
        jit_edges.first_call_s(wrap, (jax.numpy.ones(2),))
    assert wrapped[0] is not wrapped[1]


def test_a_kept_partition_of_more_arrays_takes_more_memory():
    assert 0 < jit_edges.partition_bytes(2) < jit_edges.partition_bytes(64)


def test_the_table_of_first_calls_has_a_row_for_each_depth():
    numbers = {"jax.jit": 1.0, "filter_jit": 1.1, "ratio": 1.1}
    assert jit_edges.first_call_rows({"2": numbers})[1:] == [["depth 2", "1.000", "1.100", "1.100"]]


def test_the_time_until_a_call_returns_is_part_of_that_until_its_result_is_ready():
    returned_s, ready_s = jit_edges.asynchrony(target_s=0.001)
    assert 0 < returned_s <= ready_s
