"""Cuts can be taken back one by one, and come back."""

import pytest

from benchmarks import columns
from profiling import cuts


@pytest.mark.parametrize("cut", cuts.CUTS, ids=lambda cut: cut.attribute)
def test_a_cut_that_was_taken_back_is_there_again(cut):
    before = getattr(cut.target, cut.attribute)
    with cut.taken_back():
        assert getattr(cut.target, cut.attribute) is cut.replacement
    assert getattr(cut.target, cut.attribute) is before


def test_a_call_of_before_gives_what_it_gives_now():
    cut = cuts.CUTS[0]
    build = cut.cases[0].builders[columns.OURS]
    assert (cuts.before(cut, build)() == cuts.anew(build)()).all()


def test_calls_of_before_and_of_now_share_nothing_that_is_compiled():
    build = cuts.CUTS[0].cases[0].builders[columns.OURS]
    before, now = cuts.before(cuts.CUTS[0], build), cuts.anew(build)
    assert before.func.__wrapped__ is not now.func.__wrapped__


def test_a_row_has_a_cell_for_each_heading():
    cut = cuts.CUTS[0]
    assert len(cuts.measured(cut, cut.cases[0], rounds=2)) == len(cuts.HEADINGS)
