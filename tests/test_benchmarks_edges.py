"""The benchmark of large models, arguments of other kinds and first calls measures what it says."""

import json

import jax
import pytest

import eqxlike
from benchmarks import (
    cases,
    edge_arguments,
    edge_exported,
    edge_first_calls,
    edge_models,
    edge_resources,
    jit_edges,
)
from benchmarks.columns import EQUINOX, FLAT, OURS

pytest.importorskip("equinox")
pytest.importorskip("flax")

WARM = {
    row.name: row for row in (*edge_models.rows(), *edge_arguments.rows(), *edge_exported.rows())
}
FIRST_CALLS = {
    row.case.name: row
    for row in (
        edge_first_calls.adam_step(1),
        edge_first_calls.static_leaves_in(10),
        edge_first_calls.dict_of_arrays(10),
        edge_first_calls.static_leaves_out(10),
    )
}


@pytest.fixture
def standard_promotion():
    """What Optax's Adam needs: it raises a float to the power of an integer array."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("name", WARM)
def test_all_columns_of_a_row_agree(name):
    calls, notes = cases.build(WARM[name].case)
    assert notes == []
    WARM[name].check(calls)


@pytest.mark.parametrize("row", edge_arguments.rows(), ids=lambda row: row.case.slug)
def test_arguments_of_other_kinds_stand_beside_jax_and_equinox(row):
    assert list(row.case.builders) == [FLAT, edge_arguments.TREE, OURS, EQUINOX]


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", FIRST_CALLS)
def test_all_columns_of_a_first_call_agree(name):
    calls, notes = cases.build(FIRST_CALLS[name].case)
    assert notes == []
    FIRST_CALLS[name].check(calls)


def test_each_first_call_is_of_a_new_function_and_new_leaves(monkeypatch):
    functions, leaves = [], []

    def filter_jit(function):
        functions.append(function)
        return lambda statics, x: leaves.extend(statics)

    monkeypatch.setattr(eqxlike, "filter_jit", filter_jit)
    prepare = edge_first_calls.static_leaves_in(3).case.builders[OURS]()
    for _ in range(2):
        prepare()()
    assert functions[0] is not functions[1]
    assert leaves == [0, 1, 2, 3, 4, 5]


def test_a_report_has_the_chosen_rows_and_their_tables(tmp_path, capsys):
    path = tmp_path / "report.json"
    chosen = ["--rows", "one flax struct|dict of 8", "--rounds", "1", "--json", str(path)]
    assert jit_edges.main(chosen) == 0
    written = json.loads(path.read_text())
    assert [row["name"] for row in written["rows"]] == ["dict of 8 layers", "one flax struct"]
    assert written["is_complete"]
    out = capsys.readouterr().out
    assert "Our Modules: dispatch, microseconds a call" in out
    assert "Arguments of other kinds: completion, microseconds a call" in out
    assert "Memory" not in out


def test_a_kept_partition_of_more_arrays_takes_more_memory():
    assert 0 < edge_resources.partition_bytes(2) < edge_resources.partition_bytes(64)


def test_the_time_until_a_call_returns_is_part_of_that_until_its_result_is_ready():
    returned_s, ready_s = edge_resources.asynchrony(target_s=0.001)
    assert 0 < returned_s <= ready_s


def test_memory_and_the_time_of_a_call_are_said():
    measured = {
        "partition_bytes": {"4": 628.4},
        "asynchrony": {"returned_s": 0.0005, "ready_s": 1.25},
    }
    described = jit_edges.describe_resources(measured)
    assert "4 arrays    628" in described
    assert "A call on 1.250 s of work returned after 0.500 ms" in described
