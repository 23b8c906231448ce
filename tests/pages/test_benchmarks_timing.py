"""The statistics and the schedule of a measurement. No test uses a clock."""

import collections
import contextlib
import gc
import statistics

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.timing import (
    BURST,
    Quartiles,
    Samples,
    calls_for,
    dispatch_us,
    frozen_heap,
    measure,
    quartiles,
    round_orders,
    summarise,
)


def test_ratio_is_the_median_of_ratios():
    slow_rounds = Samples(dispatch_us=(1, 10, 100), completion_us=(2, 20, 200), calls=1)
    base = Samples(dispatch_us=(2, 5, 400), completion_us=(1, 40, 50), calls=1)
    measured = summarise({"base": base, "other": slow_rounds}, baseline="base")
    other = measured.columns["other"]
    assert other.dispatch_us == 10
    assert other.completion_us == 20
    assert other.dispatch_ratio.median == statistics.median([1 / 2, 10 / 5, 100 / 400])
    assert other.completion_ratio.median == statistics.median([2 / 1, 20 / 40, 200 / 50])


def test_quartiles_of_known_numbers():
    for numbers, expected in [
        ([7], (7, 7, 7)),
        ([1, 2, 3, 4, 5], (2, 3, 4)),
        ([4, 1], (1.75, 2.5, 3.25)),
    ]:
        assert quartiles(numbers) == Quartiles(*expected)


@given(st.floats(1e-6, 1), st.floats(1e-9, 10))
def test_calls_fill_the_target_in_whole_bursts(target_s, call_s):
    count = calls_for(target_s, call_s)
    assert count >= 1
    assert count < BURST or count % BURST == 0
    assert count * call_s <= target_s + BURST * call_s


@given(st.integers(1, 7), st.integers(0, 5), st.integers(0, 3))
def test_each_column_has_each_place_of_a_block_once(columns, blocks, seed):
    names = [f"column {number}" for number in range(columns)]
    orders = list(round_orders(names, columns * blocks, seed))
    assert len(orders) == columns * blocks
    for block in range(blocks):
        for place in zip(*orders[columns * block : columns * (block + 1)], strict=True):
            assert sorted(place) == names


def test_columns_have_equal_numbers_of_rounds():
    x = jnp.ones(3)
    calls = {"first": lambda: x + 1, "second": lambda: (x * 2, {"tree": x})}
    measured = measure(calls, baseline="second", rounds=4, target_s=1e-5)
    assert measured.baseline == "second"
    assert list(measured.columns) == ["first", "second"]
    for name, column in measured.columns.items():
        assert column.name == name
        assert len(column.samples.dispatch_us) == len(column.samples.completion_us) == 4
        assert min(column.samples.dispatch_us + column.samples.completion_us) > 0
        assert column.samples.calls >= 1


def test_each_result_of_a_burst_is_waited_for_once():
    results = []
    waits = collections.Counter()

    def call():
        results.append(object())
        return results[-1]

    dispatch_us(call, lambda result: waits.update([id(result)]), 2 * BURST + 1)
    assert len(results) == 3 * BURST
    assert all(waits[id(result)] == 1 for result in results)


def test_wrong_arguments_are_refused():
    for change, message in [
        ({"baseline": "none"}, "baseline 'none' is not among the callables: call"),
        ({"rounds": 0}, "rounds and warm_up must be 1 or more"),
        ({"warm_up": 0}, "rounds and warm_up must be 1 or more"),
    ]:
        arguments = {"baseline": "call", "rounds": 1} | change
        with pytest.raises(ValueError, match=message):
            measure({"call": lambda: jnp.ones(())}, **arguments)


def test_heap_is_frozen_inside_and_restored_after_an_exception():
    gc.unfreeze()
    with contextlib.suppress(KeyboardInterrupt), frozen_heap():
        assert gc.get_freeze_count() > 1000
        raise KeyboardInterrupt
    assert gc.get_freeze_count() == 0
    gc.freeze()
    with frozen_heap():
        pass
    assert gc.get_freeze_count() > 1000  # not exact, because frozen objects may be deleted
