"""The benchmark of the guard of a training step: its columns compute the same. No clock is read."""

import json

import jax.numpy as jnp
import pytest

import eqxlike
from benchmarks import cases, train_guard
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
