"""The benchmarks of training: their columns compute the same. No clock is read."""

import json

import jax
import jax.numpy as jnp
import pytest

import eqxlike
from benchmarks import cases, train_guard, training
from benchmarks.train_guard import CHECKED, PARAMETERS, UNCHECKED

ROW = train_guard.adam_step(1, 2, batch=4)


def test_columns_agree_and_train():
    calls, notes = cases.build(ROW)
    assert (list(calls), notes) == ([UNCHECKED, PARAMETERS, CHECKED], [])
    cases.check_agreement(calls)
    losses = [float(calls[CHECKED]()) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(
    ("make", "halts"),
    [
        (train_guard.unchecked, False),
        (train_guard.parameters_checked, False),
        (train_guard.checked, True),
    ],
)
def test_the_whole_guard_alone_sees_the_state_of_the_optimiser(make, halts):
    state = eqxlike.tree_at(
        lambda state: state.optimiser_state[0].nu.layers[0].weight,
        train_guard.start(1, 2),
        jnp.full((2, 2), jnp.inf),
    )
    state, _ = make()(state, (jnp.ones((4, 2)), jnp.ones((4, 2))))
    assert bool(state.is_halted) is halts


def test_report_has_every_column(tmp_path):
    path = tmp_path / "report.json"
    assert train_guard.main(["--rounds", "1", "--json", str(path)], [ROW]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert list(row["columns"]) == [UNCHECKED, PARAMETERS, CHECKED]
    assert row["baseline"] == UNCHECKED


# --- the loop ---


@pytest.fixture
def short_runs(monkeypatch):
    monkeypatch.setattr(training, "STEPS", 20)
    training.batches.cache_clear()
    # As others write loops.
    with jax.numpy_dtype_promotion("standard"):
        yield
    training.batches.cache_clear()


def test_all_loops_have_one_loss(short_runs):
    calls, notes = cases.build(training.row(2, 1))
    assert {training.BY_HAND, training.FIT, training.MANY, training.EQUINOX} <= calls.keys()
    assert all(note.startswith(training.KERAS) for note in notes)
    cases.check_agreement(calls)


def test_targets_are_found_in_a_report():
    columns = {
        name: {"samples": {"dispatch_us": [1.0], "completion_us": [us], "calls": 1}}
        for name, us in [
            *[(training.BY_HAND, 10.0), (training.BY_HAND_KEY, 12.0)],
            *[(training.FIT, 12.0), (training.MANY, 5.0)],
        ]
    }
    row = {"name": "8x32", "baseline": training.BY_HAND, "columns": columns}
    assert [(each.aim, each.is_reached) for each in training.found({"rows": [row]})] == [
        ("fit / by hand: at most 1.1", False),
        ("fit / by hand, with a key: at most 1.1", True),
        ("fit, 16 steps a call / by hand: at most 0.55", True),
    ]
