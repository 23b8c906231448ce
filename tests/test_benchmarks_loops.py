"""The benchmark of loops: the columns of each row compute the same. No clock is read."""

import pytest

from benchmarks import cases, loops

ROWS = [
    loops.recurrence("scalar", 6, loops.gradient),
    loops.recurrence("64-wide tanh", 5, loops.forward),
    loops.few_of_many(3, 9),
    loops.batch(3, 20, loops.forward),
    loops.batch(3, 20, loops.gradient),
    loops.writing(5, 2, 3, loops.gradient),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.slug)
def test_columns_agree(row):
    calls, notes = cases.build(row)
    assert (list(calls), notes) == (list(row.builders), [])
    cases.check_agreement(calls)


def test_memory_of_each_column_is_told():
    calls, _ = cases.build(ROWS[0])
    assert all(call.temporary_bytes >= 0 for call in calls.values())
