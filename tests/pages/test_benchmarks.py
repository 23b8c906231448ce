"""The columns of a benchmark agree, and reports are complete. No test uses a clock."""

import dataclasses
import importlib.util
import json
import os
import sys
import types

import jax
import jax.numpy as jnp
import pytest

import eqxlike
from benchmarks import all as everything
from benchmarks import (
    cases,
    downstream,
    edge_arguments,
    generation,
    import_time,
    jit_edges,
    jit_overhead,
    layer_models,
    layers,
    loops,
    model_steps,
    models,
    scaling,
    table,
    training,
)
from benchmarks.layers import IMPLEMENTATIONS, NNX, Network
from benchmarks.timing import Samples, summarise

PEERS = {cases.EQUINOX_MODULE: "equinox", cases.EQUINOX: "equinox", cases.NNX: "flax"}
INSTALLED = [
    name
    for name in (cases.FLAT, cases.MODULE, cases.OURS, cases.WATCHED, *PEERS)
    if name not in PEERS or importlib.util.find_spec(PEERS[name])
]


pytestmark = pytest.mark.usefixtures("promotion")


# --- the columns of each row ---

# All sizes are 4 or 16: each library compiles an initialiser for each shape of a parameter.
MLP = Network("MLP", "mlp", layer_models.MLPSizes(4, 4, 2, 4), (3, 4))
CNN = Network("CNN", "cnn", layer_models.CNNSizes(4, (4, 4), 4), (2, 4, 4, 4))


# All other rows differ from these only in size or class.
CHOSEN = {
    "list-of-2-layers",
    "flax-trainstate-8-layers-in-and-out",
    "equinox-mlp-depth-8",
    "kwargs",
    "mlp-2-layers-of-32-in-the-program",
}


def few(case, *chosen):
    """The case with only the chosen columns."""
    builders = {column: case.builders[column] for column in chosen}
    return dataclasses.replace(case, builders=builders, baseline=chosen[0])


def gradient_beside_nnx(network):
    row = layers.gradient(network)
    return dataclasses.replace(row, case=few(row.case, layers.OURS, NNX))


# Rows with a check of their own.
CHECKED = [
    *(
        row
        for of in (jit_edges.warm_rows, edge_arguments.rows, jit_edges.exported_rows)
        for row in of()
        if row.case.slug in CHOSEN
    ),
    jit_edges.adam_step(1),
    *map(gradient_beside_nnx, (MLP, CNN)),
    layers.construct(MLP),
]
AGREE = [loops.recurrence("scalar", 5, loops.forward), loops.writing(5, 2, 3, loops.forward)]


@pytest.mark.parametrize("row", CHECKED, ids=lambda row: row.case.slug)
def test_columns_pass_the_check_of_their_row(row):
    calls, notes = cases.build(row.case)
    assert notes == []
    row.check(calls)


@pytest.mark.parametrize("case", AGREE, ids=lambda case: case.slug)
def test_columns_agree(case):
    calls, notes = cases.build(case)
    assert len(calls) + len(notes) == len(case.builders)
    cases.check_agreement(calls)


def test_training_steps_feed_their_state_back():
    calls, _ = cases.build(jit_overhead.adam_step(2, 8))
    assert list(calls) == INSTALLED
    losses = [float(calls[cases.FLAT]()) for _ in range(4)]
    assert losses == sorted(set(losses), reverse=True)
    calls[cases.FLAT] = iter(losses).__next__
    cases.check_agreement(calls, times=4)


def test_training_loops_have_one_loss(monkeypatch):
    monkeypatch.setattr(training, "num_steps", lambda width: 16)
    training.batches.cache_clear()
    # All other columns are similar to these.
    chosen = training.BY_HAND, training.MANY_UNCHECKED, training.AHEAD, training.EQUINOX
    calls, notes = cases.build(few(training.row(2, 1, has_peers=True), *chosen))
    training.batches.cache_clear()
    assert (list(calls), notes) == ([*chosen], [])
    cases.check_agreement(calls)
    for is_fit in (False, True):
        calls, _ = cases.build(training.prefetch_row(1, 0, is_fit))
        cases.check_agreement(calls, times=1)


LANGUAGE = layer_models.LanguageSizes(16, 4, layer_models.TransformerSizes(4, 2, 2))
WHOLE = (
    model_steps.Network("language model", "language_model", LANGUAGE, (2, 4)),
    model_steps.Network("CNN", "normalised_cnn", layer_models.CNNSizes(4, (4, 4), 4), (2, 4, 4, 4)),
    model_steps.resnet("ResNet", layer_models.ResNetSizes(8, 4, (1, 1), 4), 4),
)


@pytest.mark.parametrize("network", WHOLE, ids=lambda network: network.maker)
def test_steps_of_whole_networks_have_one_loss_and_fit_in_memory(network):
    case = models.case(network)
    chosen = [column for column in case.builders if column != model_steps.EQUINOX]
    steps, notes = cases.build(few(case, *chosen))
    assert all("'torch'" in note for note in notes)
    models.check(steps, models.tolerance(network))
    state_bytes = 3 * 4 * sum(array.size for array in model_steps.weights(network))
    steps.pop(model_steps.TORCH_EAGER, None)  # PyTorch does not report its memory.
    assert all(step.peak_bytes() > state_bytes for step in steps.values())
    steps[model_steps.NNX] = steps[model_steps.OURS]  # This training is three steps ahead.
    with pytest.raises(AssertionError, match="the losses of 'NNX' differ from those by hand"):
        models.check(steps, times=1)


def test_rate_of_a_row_has_its_share_of_the_peak(monkeypatch):
    # torchvision states 4.09e9 multiplications an image. A step has six operations for each.
    network = next(each for each in model_steps.NETWORKS if each.name.startswith("ResNet-50"))
    assert network.flops / 128 == pytest.approx(6 * 4.09e9, rel=1e-3)
    times = summarise({"one": Samples((1e5,), (1e5,), 1)}, "one")
    gpu = types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    row = {"name": "row", "columns": {"one": 0}, "rates": models.rates(network, times)}
    assert table.rate_cells([row]) == [["", "one"], ["row", "1280 (0.03)"]]
    monkeypatch.undo()
    assert models.rates(network, times)["peak_per_second"] is None


def test_column_without_enough_memory_is_left_out_with_a_note():
    def fails(message):
        def call():
            raise RuntimeError(message)

        return model_steps.Step(call, lambda: None)

    fits, notes = model_steps.Step(lambda: jnp.ones(()), lambda: None), []
    steps = {"fits": fits, "large": fails("RESOURCE_EXHAUSTED: Out of memory")}
    models.leave_out_large("GPT", steps, notes)
    assert (list(steps), notes) == (["fits"], ["large is left out of GPT: out of memory"])
    with pytest.raises(RuntimeError, match="other"):
        models.leave_out_large("GPT", {"wrong": fails("other")}, notes)


def test_disagreement_names_the_column(monkeypatch):
    calls = {"one": lambda: jnp.zeros(2), "two": lambda: jnp.asarray([0.0, 0.1])}
    with pytest.raises(AssertionError, match="'two' differs from 'one' at call 1"):
        cases.check_agreement(calls)

    def of_other_weights(network):
        right = layers.of_modules(eqxlike, network)
        return dataclasses.replace(right, batch=2 * right.batch)

    monkeypatch.setitem(IMPLEMENTATIONS, NNX, of_other_weights)
    with pytest.raises(AssertionError, match="the loss or gradient of 'NNX' differs"):
        layers.check_gradients(MLP, [NNX])


def test_missing_peer_is_left_out_with_a_note():
    def missing():
        raise ImportError("No module named 'peer'")

    case = cases.Case("row", {"there": lambda: lambda: 1, "peer": missing}, baseline="there")
    calls, notes = cases.build(case)
    assert list(calls) == ["there"]
    assert notes == ["peer is left out: No module named 'peer'"]


# --- separate processes ---


def test_import_is_timed_in_a_separate_process(monkeypatch, report_of):
    statements = {
        import_time.OURS: "import stringprep",
        import_time.EQUINOX: "import json",
        import_time.NNX: "from no_such_module import nothing",
    }
    rows = [import_time.row("small modules", statements)]
    (row,) = report_of(import_time, "--rounds", "2", rows=rows)["rows"]
    assert list(row["columns"]) == [import_time.OURS, import_time.EQUINOX]
    assert "no_such_module" in row["notes"][0]
    # The current process cannot import the module.
    monkeypatch.setitem(sys.modules, "stringprep", None)
    assert import_time.import_s("import stringprep") > 0


def test_first_steps_are_timed_in_separate_processes(monkeypatch, report_of, capsys):
    seconds = {model_steps.OURS: 2.0, model_steps.NNX: 4.0}

    def in_process(program):
        column = program.split("'")[1]
        return {"first_s": seconds.get(column, 1.0), "build_s": 0.5}

    monkeypatch.setattr(models, "_in_process", in_process)
    report = report_of(models, "--first-steps", "--first-rounds", "2", rows=[])
    first, building = report["rows"]
    ours = first["columns"][model_steps.OURS]
    assert (ours["completion_us"], ours["completion_ratio"]["median"]) == (2e6, 0.5)
    assert building["columns"][model_steps.SCAN_STACK]["completion_us"] == 5e5
    assert models.FIRST_STEP in capsys.readouterr().out


def test_programs_of_libraries_must_agree_with_equinox(monkeypatch, report_of):
    def in_process(library, topic, program):
        seconds = 2.0 if library == "equinox" else 1.0
        sums = [1.0, seconds if program == "differs" else 2.0]
        return {"first_s": 10 * seconds, "later_s": [9.0, seconds, 0.1], "sums": sums}

    downstream.samples_of.cache_clear()
    monkeypatch.setattr(downstream, "in_process", in_process)
    rows = [downstream.Row(kind, "a_topic", "one") for kind in (downstream.FIRST, downstream.WARM)]
    report = report_of(downstream, "--rounds", "2", rows=rows)
    found = [row["columns"] for row in report["rows"]]
    for column, seconds in ((downstream.OURS, [10, 1]), (downstream.EQUINOX, [20, 2])):
        assert [row[column]["completion_us"] / 1e6 for row in found] == seconds
    with pytest.raises(AssertionError, match="a_topic: differs"):
        downstream.measure(downstream.Row(downstream.WARM, "a_topic", "differs"), rounds=1)


# --- reports ---


def test_report_is_complete_and_its_table_can_be_printed(report_of, tmp_path, capsys):
    found = report_of(jit_overhead, "--quick", "--rounds", "2", "--rows", "Identity")
    assert found["is_complete"]
    assert found["method"]["rounds"] == 2
    assert {"jax", "equinox", "flax", "python", "cpu", "cores", "date"} <= set(found["machine"])
    (row,) = found["rows"]
    assert (row["name"], row["baseline"]) == ("Identity, (1, 1)", cases.MODULE)
    assert list(row["columns"]) == INSTALLED
    for column in row["columns"].values():
        for kind in ("dispatch", "completion"):
            assert column[f"{kind}_us"] > 0
            assert set(column[f"{kind}_ratio"]) == {"lower", "median", "upper"}
            assert len(column["samples"][f"{kind}_us"]) == 2
    capsys.readouterr()
    path = tmp_path / "made" / "report.json"
    assert table.main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("Identity, (1, 1)", *INSTALLED))
    assert table.main([str(path), "--baseline", cases.FLAT, "--markdown"]) == 0
    assert f"(ratio to {cases.FLAT})" in capsys.readouterr().out


def test_memory_is_divided_by_the_number_of_devices(report_of):
    (row,) = report_of(scaling, "--rounds", "1", rows=[scaling.Row("FSDP", 1, 32)])["rows"]
    alone, half = (row["memory"][column]["at rest"] for column in ("1 device", "2 devices"))
    assert 0.5 <= half / alone < 0.51
    assert row["memory"]["1 device"]["exchanged"] == 0 < row["memory"]["2 devices"]["exchanged"]


def test_ctrl_c_keeps_and_prints_the_measured_rows(monkeypatch, capsys, report_of):
    def interrupted():
        raise KeyboardInterrupt

    first = cases.Case("first", {cases.MODULE: lambda: lambda: 0.0})
    second = cases.Case("second", {cases.MODULE: interrupted})
    monkeypatch.setattr(jit_overhead, "CASES", (first, second))
    found = report_of(jit_overhead, "--rounds", "1", status=130)
    assert "first" in capsys.readouterr().out
    assert [row["name"] for row in found["rows"]] == ["first"]
    assert not found["is_complete"]


def test_wrong_rows_and_unwritable_file_are_errors_before_measuring(capsys, tmp_path):
    for benchmark in (jit_overhead, layers, scaling):
        assert benchmark.main(["--rows", "nothing of the kind"]) == 2
        assert "no case matches 'nothing of the kind'" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert jit_overhead.main(["--json", str(tmp_path / "file" / "report.json")]) == 2
    assert capsys.readouterr().err.startswith("benchmarks.jit_overhead: ")


def test_summary_lists_cut_jobs_and_failed_tests(monkeypatch, capsys, tmp_path):
    commands = [("import time; time.sleep(60)", 1), ("1 / 0", 60)]
    with open(tmp_path / "output", "w+") as output:
        for (source, share_s), status in zip(commands, ("cut", "failed"), strict=True):
            assert everything._execute(["-c", source], share_s, os.environ, output) == status
    text = "FAILED tests/a.py::test_b - Error\nERROR tests/c.py\n1 failed, 7 passed, 1 error in 3s"
    found = everything.tests_in(text)
    assert found["failures"] == ["tests/a.py::test_b", "tests/c.py"]
    row = {"name": "tests", "seconds": 1.0, "status": "cut", "is_short": True} | found
    monkeypatch.setattr(everything, "run", lambda *_: row)
    only = ["--only", "^tests$", "--out", str(tmp_path)]
    assert everything.main([*only, "--minutes", "1"]) == 0
    out = capsys.readouterr().out
    assert "cut, short  7 passed, 1 failed, 1 error, 0 skipped" in out
    assert "- tests/a.py::test_b" in out
    (path,) = tmp_path.glob("all-cpu-jax-*.json")
    assert not json.loads(path.read_text())["is_complete"]
    assert everything.in_time(everything.JOBS, 120) == everything.JOBS
    assert [job.name for job in everything.in_time(everything.JOBS, 5)] == ["models", "tests"]
    assert everything.main([*only, "--device", "tpu"]) == 2
    assert "JAX runs on cpu here, not on tpu" in capsys.readouterr().err


def test_libraries_generate_the_same_text(monkeypatch):
    small = {"WIDTH": 8, "HEADS": 2, "DEPTH": 2, "VOCABULARY": 11, "PROMPT": 4, "NEW": 5}
    for name, size in small.items():
        monkeypatch.setattr(generation, name, size)
    calls, notes = cases.build(generation.case(2))
    assert (len(calls), notes) == (4, [])
    generation.check(calls)
    assert calls[generation.EQXLIKE]().shape == (2, 5)
