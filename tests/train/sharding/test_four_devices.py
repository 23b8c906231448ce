"""One hundred steps over four devices, that are dispatched as fast as it goes."""

import numpy as np
import pytest

from tests.train.sharding import processes

DTYPES = {"float32": 1e-5, "float64": 1e-12}
RUNS = [
    ("one", "float32"),
    ("data_parallel", "float32"),
    ("fsdp", "float32"),
    ("one", "float64"),
    ("data_parallel", "float64"),
    ("fsdp", "float64"),
    ("two axes", "float64"),
]


@pytest.fixture(scope="module")
def found():
    return processes.results(processes.start(4, steps=100, runs=RUNS))


@pytest.mark.parametrize(("name", "dtype"), [run for run in RUNS if run[0] != "one"])
def test_losses_are_those_of_one_device(name, dtype, found):
    losses = found[f"{name}, {dtype}"]["losses"]
    assert len(losses) == 100
    expected = found[f"one, {dtype}"]["losses"]
    np.testing.assert_allclose(losses, expected, rtol=0, atol=DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_fsdp_keeps_a_fourth_and_little_more_on_each_device(dtype, found):
    shares = found[f"fsdp, {dtype}"]["share"]
    assert len(shares) == 4
    assert max(shares.values()) <= 0.25 + 0.02
    assert set(found[f"data_parallel, {dtype}"]["share"].values()) == {1.0}


def test_programs_are_traced_once_and_no_step_compiles_another(found):
    counts = [(each["num_traces"], each["num_compiled_later"]) for each in found.values()]
    assert counts == [(1, 0)] * len(RUNS)


def test_devices_exchange_sums_and_split_parameters_alone(found):
    assert found["one, float32"]["collectives"] == []
    assert found["data_parallel, float32"]["collectives"] == ["all-reduce"]
    assert found["fsdp, float32"]["collectives"] == ["all-gather", "all-reduce"]
