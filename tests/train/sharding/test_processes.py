"""Two processes with two devices each, joined on the loopback interface."""

import signal

import numpy as np
import pytest

from tests.train.sharding import processes, trainings

STEPS = 20
RUNS = [("data_parallel", "float32"), ("fsdp", "float32")]


@pytest.fixture(scope="module")
def alone():
    return trainings.run(None, STEPS)


@pytest.fixture(scope="module")
def found():
    port = processes.free_port()
    started = [
        processes.start(2, steps=STEPS, runs=RUNS, port=port, process=number, heartbeat_s=60)
        for number in (0, 1)
    ]
    return [processes.results(process) for process in started]


@pytest.mark.parametrize("name", [name for name, _ in RUNS])
def test_losses_are_those_of_one_device(name, found, alone):
    for own in found:
        losses = own[f"{name}, float32"]["losses"]
        np.testing.assert_allclose(losses, alone.losses, rtol=0, atol=1e-5)


def test_each_process_has_its_parts_of_what_one_would_have(found, alone):
    weight = np.asarray(alone.state.model.first.weight)
    rows = []
    for own in found:
        parts = own["fsdp, float32"]["weight"]
        assert len(parts) == 2
        for (row, column), numbers in parts:
            assert (len(numbers), column) == (4, 0)
            np.testing.assert_allclose(numbers, weight[row : row + 4], rtol=1e-3, atol=1e-5)
            rows.append(row)
    assert sorted(rows) == [0, 4, 8, 12]


def test_programs_are_traced_once_and_no_step_compiles_another(found):
    counts = {
        (run["num_traces"], run["num_compiled_later"]) for own in found for run in own.values()
    }
    assert counts == {(1, 0)}


def test_no_sum_is_scattered_between_processes_on_cpu(found):
    # The reduce-scatter of some versions of JAX sums wrongly there.
    kinds = {kind for own in found for run in own.values() for kind in run["collectives"]}
    assert kinds == {"all-gather", "all-reduce"}


def test_process_whose_peer_died_stops_and_says_so():
    port = processes.free_port()
    first, second = (
        processes.start(
            2, steps=STEPS, runs=RUNS[1:], port=port, process=number, heartbeat_s=5, **options
        )
        for number, options in ((0, {}), (1, {"dies_at": 3}))
    )
    processes.finish(second)
    _, errors = processes.finish(first)
    assert second.returncode == -signal.SIGKILL
    assert first.returncode not in (0, -signal.SIGKILL)
    assert "another task died" in errors
