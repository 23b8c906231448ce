"""The programs that `benchmarks.downstream` times exist and are in the sample."""

import pytest

from benchmarks import downstream
from tests.downstream.registry import programs_of


@pytest.mark.parametrize("timed", downstream.PROGRAMS)
def test_programs_that_are_timed_are_in_the_sample(timed):
    assert set(downstream.PROGRAMS[timed]) <= set(programs_of(timed).names(is_whole=False))


def test_each_library_is_timed_in_a_separate_process():
    row = downstream.Row(downstream.FIRST, "linear_solves", "what_operators_say")
    ours = downstream.in_process("eqxlike", row.topic, row.program)
    theirs = downstream.in_process("equinox", row.topic, row.program)
    assert ours["sums"] == pytest.approx(theirs["sums"])
    assert len(ours["later_s"]) >= 3
