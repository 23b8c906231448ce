"""Short runs of the tutorials, with the strict settings of the test suite."""

import re
from typing import Any

import jax
import numpy as np
import pytest

from eqxlike import bayes
from tests import scripts


def load(name: str) -> Any:
    """Imports a script of `examples/`."""
    return scripts.load(scripts.EXAMPLES / f"{name}.py")


@pytest.fixture
def output_of(capsys):
    """A function that runs a script and returns its output."""

    def run(script: Any, command: str) -> str:
        (load(script) if isinstance(script, str) else script).main(command.split())
        return capsys.readouterr().out

    return run


def test_each_method_has_a_line(output_of, monkeypatch):
    module = load("bayesian")
    one = {"most probable": (module.UNKNOWN, bayes.MAP(steps=2))}
    monkeypatch.setattr(module, "methods", lambda steps, draws: one)
    monkeypatch.setattr(
        module, "HELD_OUT", 80
    )  # the number of training examples: the same programs
    lines = output_of(module, "--width 3").splitlines()
    known, probable, flat = (line.split() for line in lines[-3:])
    assert float(known[4]) < float(flat[4])  # the NLL with the true function, and without a network
    assert probable[:2] == ["most", "probable"]


def test_resumed_run_ends_with_the_same_bits(output_of, monkeypatch):
    module = load("classifier")
    monkeypatch.setattr(module, "EVALUATE_EVERY", 2)
    output = output_of(module, "--steps 4")
    assert "resumed after step 2" in output
    assert "Bitwise equal: True" in output
    assert len(re.findall(r"(\d+\.\d)%", output.splitlines()[-1])) == 2


def test_shardings_have_equal_losses_and_the_expected_memory(output_of):
    _, one, parallel, split = output_of("devices", "--steps 3 --width 32").split("\n\n")

    def held(text):
        return int(re.findall(r"each device holds +([\d,]+)", text)[0].replace(",", ""))

    assert held(parallel) == held(one)
    assert held(one) / 2 < held(split) < 0.6 * held(one)
    assert "nothing" in one
    assert "all-reduce" in parallel
    assert "all-gather" in split
    for each in (one, parallel, split):
        (apart,) = re.findall(r"losses differ by +(\S+)", each)
        assert float(apart) < 1e-4


def test_modes_have_the_expected_verdicts():
    module = load("differentiation_modes")
    *rows, chosen = module.answer(module.settled(), rounds=1).splitlines()[1:]
    verdicts = {row.split()[0]: row.split()[-1] for row in rows}
    assert verdicts == {"Reverse()": "error", "Checkpointed()": "error", "Forward()": "ok"}
    assert chosen == "  chosen: Forward()"


def test_network_with_the_loop_inside_is_trained(capsys):
    module = load("differentiation_modes")
    module.train_settling(60)
    output = capsys.readouterr().out
    assert float(output.split("%")[0]) > 50
    assert "strength 0.50, was" not in output


def test_another_process_computes_the_same(output_of):
    output = output_of("export_model", "--steps 2")
    here, there = re.findall(r"([\d.]+%) (?:of held-out digits )?are right", output)
    assert here == there
    (off,) = re.findall(r"differ by (\S+) at most", output)
    assert float(off) < 1e-5
    assert "Exported: predict(pixels: uint8[batch, 64]) -> float32[batch, 10]" in output
    assert "loaded are equal: True" in output
    assert "A wrong input: pixels must be uint8[batch, 64]; it is uint8[500, 63]." in output
    assert "is cut off" in output


def test_language_model_is_compared_with_tables_and_writes(output_of):
    command = "--steps 2 --width 8 --depth 1 --characters 3000 --write 10"
    with jax.numpy_dtype_promotion("standard"):
        output = output_of("language_model", command)
    tables = re.findall(r"tables of \w+ +(\d\.\d+)", output)
    assert len(tables) == 3
    (model,) = re.findall(r"the transformer +(\d\.\d+)", output)
    assert float(model) > max(map(float, tables))  # the transformer has seen only two batches
    written = output.partition("It writes:\n\n")[2]
    assert len(written.replace("\n    ", "\n").removeprefix("    ").strip("\n")) <= 10


def test_factors_have_few_numbers_and_can_be_removed(output_of, monkeypatch):
    module = load("lora")
    monkeypatch.setattr(module, "WIDTH", 16)
    output = output_of(module, "--steps 2 --ranks 2")
    trained = dict(re.findall(r"^(\S.*?) {2,}([\d,]+)(?: +[\d.]+%){2}$", output, re.MULTILINE))
    # Two factors for each of the weights (16, 64), (16, 16) and (10, 16).
    assert trained == {
        "not adapted": "0",
        "new readout": "170",
        "all weights": "1,482",
        "factors of rank 2": str(2 * (16 + 64 + 16 + 16 + 10 + 16)),
    }
    assert "Merged: MergedLinear" in output
    assert "Factors removed, equal to the first network: True" in output


def test_each_cost_is_found_and_removed(output_of):
    output = output_of("profile_step", "--steps 4 --chunk 2")
    assert "trace 2, for rate: 1.0 -> 0.98" in output
    assert "compiled for each new number" in " ".join(output.split())
    assert "copies to the device: batch[0], batch[1]" in " ".join(output.split())
    assert "With batches on the device: nothing." in output
    rows = {
        name: (int(calls), int(traces))
        for name, calls, traces in re.findall(
            r"^  (\S.*?) {2,}(\d+) +(\d+) +[\d.]+ +[\d.]+ +(?:-|\d+)$", output, re.MULTILINE
        )
    }
    assert rows == {
        "first version": (4, 4),
        "the rate inside": (4, 1),
        "batches on the device": (4, 1),
        "2 steps a call": (2, 1),
    }
    (off,) = re.findall(r"Weights differ by (\S+) at most", output)
    assert float(off) < 1e-5


def test_autoencoder_is_compared_with_models_without_a_network(output_of):
    output = output_of("vae", "--steps 2 --width 8 --code 2")
    found = dict(re.findall(r"^  (\w.*?) +(-\d+\.\d)$", output, re.MULTILINE))
    assert list(found) == [
        "independent pixels",
        "independent pixels of each digit",
        "autoencoder, lower bound",
        "autoencoder",
    ]
    assert float(found["autoencoder"]) >= float(found["autoencoder, lower bound"])
    assert len(output.partition("New digits:\n\n")[2].splitlines()) == 8


@pytest.mark.usefixtures("promotion")
def test_physics_informed_network_approaches_the_exact_solution(output_of):
    output = output_of("physics_informed", "--rounds 1 --steps 60")
    before, after = re.findall(r"the largest error is (\S+)", output)
    assert float(after) < float(before) / 4


@pytest.mark.usefixtures("promotion")
def test_policy_learns_to_balance_for_longer(output_of):
    output = output_of("reinforcement_learning", "--updates 21")
    first, last = re.findall(r"stands for +(\S+) of", output)
    assert float(last) > 2 * float(first)


def test_flow_has_an_inverse_and_its_log_determinant():
    module = load("flow")
    flow = module.Flow(2, 4, key=jax.random.key(0))
    z = jax.numpy.array([0.3, -0.7])
    y, log_det = z, 0.0
    for layer in flow.layers:
        y = layer.to_data(y)
    back = y
    for layer in reversed(flow.layers):
        back, each = layer.to_noise(back)
        log_det += float(each)
    np.testing.assert_allclose(back, z, atol=1e-5)

    def to_noise(y):
        for layer in reversed(flow.layers):
            y, _ = layer.to_noise(y)
        return y

    _, expected = np.linalg.slogdet(jax.jacfwd(to_noise)(y))
    np.testing.assert_allclose(log_det, expected, atol=1e-5)


@pytest.mark.usefixtures("promotion")
def test_flow_has_a_higher_likelihood_than_a_normal_distribution(output_of):
    output = output_of("flow", "--steps 300")
    normal, flow = re.findall(r"^  (?:normal distribution|flow) +(\S+)$", output, re.MULTILINE)
    assert float(flow) > float(normal) + 0.2


@pytest.mark.usefixtures("promotion")
def test_ensemble_disagrees_most_away_from_the_data(output_of):
    output = output_of("ensemble", "--steps 300")
    found = dict(re.findall(r"^  (\w.*?) +(-?\d+\.\d+)$", output, re.MULTILINE))
    numbers = {name: float(number) for name, number in found.items()}
    assert numbers["the ensemble"] > numbers["one network, on average"]
    assert numbers["between"] > 2 * numbers["seen"]
    assert numbers["beyond"] > 2 * numbers["seen"]
