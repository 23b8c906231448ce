"""The layer benchmark: its columns compute the same, its report is whole; no clock is looked at."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import eqxlike
from benchmarks import (
    cases,
    layer_cases,
    layer_depth,
    layer_fused,
    layer_models,
    layer_networks,
    layers,
    report,
    table,
)
from benchmarks.layer_networks import EQUINOX, IMPLEMENTATIONS, NNX, OURS, Network
from benchmarks.layer_rows import check_sizes
from benchmarks.layer_timing import measure_first_calls
from eqxlike._timing import Samples, summarise

# Sizes of 4 and 16 throughout: each new shape of a parameter costs the compilation of its initial
# values, in each library.
MLP = Network("MLP", "mlp", layer_models.MLPSizes(4, 4, 2, 4), (3, 4))
NETWORKS = (
    MLP,
    Network("CNN", "cnn", layer_models.CNNSizes(4, (4, 4), 4), (2, 4, 4, 4)),
    Network("LSTM", "lstm", layer_models.LSTMSizes(4, 4), (2, 5, 4)),
    Network("Transformer", "transformer", layer_models.TransformerSizes(4, 2, 1), (2, 5, 4)),
)


@pytest.fixture(autouse=True)
def standard_promotion():
    """What NNX needs: its layers mix ranks."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def checked(row):
    """The columns of a row, after its own check of them."""
    calls, notes = cases.build(row.case)
    assert notes == []
    row.check(calls)
    return list(calls)


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.maker)
def test_libraries_compute_the_same_outputs_losses_and_gradients(network):
    assert checked(layer_cases.forward(network)) == [OURS, EQUINOX, NNX]
    assert checked(layer_cases.gradient(network)) == [OURS, EQUINOX, NNX]


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.maker)
def test_libraries_build_models_of_the_same_size(network):
    assert checked(layer_cases.construct(network)) == [OURS, EQUINOX, NNX]


def test_a_model_is_built_for_the_first_time_where_nothing_is_compiled(monkeypatch):
    cleared = []
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(1))
    assert checked(layer_cases.first_construct(MLP)) == [OURS, EQUINOX, NNX]
    assert len(cleared) == 3


def test_each_library_compiles_its_forward_pass_and_nothing_else():
    for network in NETWORKS[:2]:
        calls, notes = cases.build(layer_cases.compilation(network).case)
        assert notes == []
        reorder = [layer_cases.REORDER] if network.maker == "cnn" else []
        assert list(calls) == [OURS, EQUINOX, NNX, *reorder]
        for prepare in calls.values():
            assert "Compiled" in type(prepare()()).__name__


def test_order_of_arrays_alone_is_that_of_the_images_each_kernel_and_the_features():
    network = Network("CNN", "cnn", layer_models.CNNSizes(8, (3, 4, 5), 2), (2, 3, 8, 8))
    images, kernels, features = layer_cases._reordering(network).out_info
    assert images.shape == (2, 8, 8, 3)
    assert [kernel.shape for kernel in kernels] == [(3, 3, 3, 4), (3, 3, 4, 5)]
    assert features.shape == (2, 5, 2, 2)


def test_first_calls_compute_the_same():
    assert checked(layer_cases.first_call(MLP)) == [OURS, EQUINOX, NNX]


@pytest.mark.parametrize("make", [layer_depth.sequential, layer_depth.mlp])
def test_deep_models_have_the_size_of_the_arrays_alone(make):
    columns = [layer_depth.ARRAYS, OURS, EQUINOX, NNX]
    assert checked(make(depth=3, width=4)) == columns


def test_arrays_alone_have_the_shapes_and_limits_of_the_model_that_they_are_beside():
    key = jax.random.key(0)
    shapes = layer_models.linear_shapes(width=4, depth=3)
    model = layer_models.linears(eqxlike, 4, 3, key)
    assert [leaf.shape for leaf in jax.tree_util.tree_leaves(model)] == shapes
    arrays = layer_models.uniform_arrays([(100, 4)], 0.5, jax.random.clone(key))
    assert 0.45 < jnp.max(jnp.abs(arrays[0])) <= 0.5


def test_stacks_compute_the_same_and_only_the_unrolled_one_grows():
    shallow, deep = layer_depth.stack(2, width=4), layer_depth.stack(6, width=4)
    assert checked(shallow) == [layer_depth.SEQUENTIAL, layer_depth.SCAN_STACK]
    assert shallow.count_lines is not None
    assert deep.count_lines is not None
    before, after = shallow.count_lines(), deep.count_lines()
    assert before[layer_depth.SEQUENTIAL] < after[layer_depth.SEQUENTIAL]
    assert before[layer_depth.SCAN_STACK] == after[layer_depth.SCAN_STACK]


@pytest.mark.parametrize("table_of", [layer_fused.FORWARD, layer_fused.GRADIENT])
def test_fused_attention_computes_the_same(table_of):
    row = layer_fused.attention(width=4, length=3, batch=2, table=table_of)
    assert checked(row) == [layer_fused.APART, layer_fused.FUSED]


def test_a_wrong_gradient_names_the_column(monkeypatch):
    def of_other_weights(network):
        right = layer_networks.of_modules(eqxlike, network)
        return dataclasses.replace(right, batch=2 * right.batch)

    monkeypatch.setitem(IMPLEMENTATIONS, NNX, of_other_weights)
    with pytest.raises(AssertionError, match="the loss or gradient of 'NNX' differs"):
        layer_networks.check_gradients(MLP, [EQUINOX, NNX])


def test_a_gradient_of_zero_is_told_since_too_much_agrees_with_it(monkeypatch):
    zeros = [jnp.zeros_like(array) for array in layer_networks.weights(MLP)]
    monkeypatch.setattr(layer_networks, "weights", lambda network: zeros)
    with pytest.raises(AssertionError, match="the gradient of a parameter of 'MLP' is zero"):
        layer_networks.check_gradients(MLP, [])


def test_models_of_different_sizes_are_told():
    calls = {"one": lambda: jnp.ones(2), "two": lambda: [jnp.ones(2), jnp.ones(3)]}
    with pytest.raises(AssertionError, match=r"\{'one': 2, 'two': 5\}"):
        check_sizes(calls)


def test_each_first_call_is_of_a_new_function():
    prepared = []

    def prepare():
        prepared.append(jnp.ones(len(prepared) + 1))
        return lambda: prepared[-1]

    measured = measure_first_calls({"one": prepare, "two": prepare}, baseline="one", rounds=3)
    assert len(prepared) == 2 * (1 + 3)
    for column in measured.columns.values():
        pairs = zip(column.samples.dispatch_us, column.samples.completion_us, strict=True)
        assert all(0 < dispatch <= completion for dispatch, completion in pairs)
        assert len(column.samples.dispatch_us) == 3


ROWS = (
    layer_cases.construct(MLP),
    layer_cases.first_call(MLP),
    layer_cases.forward(MLP),
    layer_depth.sequential(depth=2, width=4),
    layer_depth.stack(2, width=4),
)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The report of one round of small rows, as it was written."""
    path = tmp_path_factory.mktemp("folder") / "report.json"
    arguments = ["--quick", "--rounds", "1", "--first-rounds", "1", "--json", str(path)]
    # Models are built of one key again and again.
    with jax.debug_key_reuse(False):
        assert layers.main(arguments, ROWS) == 0
    return path


def test_report_has_every_row_in_its_table(written):
    found = json.loads(written.read_text())
    assert found["is_complete"]
    assert found["method"] == {"rounds": 1, "first_rounds": 1}
    assert {"jax", "equinox", "flax", "cpu", "date"} <= set(found["machine"])
    assert [(row["table"], row["name"]) for row in found["rows"]] == [
        (row.table.title, row.case.name) for row in ROWS
    ]
    assert [each["title"] for each in found["tables"]] == [row.table.title for row in ROWS]
    for row in found["rows"]:
        assert row["notes"] == []
        assert all(column["completion_us"] > 0 for column in row["columns"].values())


def test_written_report_prints_one_table_for_each_clock(written, capsys):
    assert table.main([str(written)]) == 0
    printed = capsys.readouterr().out
    for row in ROWS:
        heading = f"{row.table.title}: completion, milliseconds a call until the result is ready"
        assert printed.count(f"{heading} (ratio to {row.case.baseline})") == 1
        assert (f"{row.table.title}: dispatch" in printed) == ("dispatch" in row.table.clocks)
    assert printed.count("Lines of the lowered program\n") == 1
    assert "1 interleaved rounds, median of per-round ratios; 1 of first calls" in printed


def test_another_baseline_leaves_tables_without_that_column_as_they_are(written, capsys):
    assert table.main([str(written), "--baseline", OURS]) == 0
    printed = capsys.readouterr().out
    assert f"(ratio to {EQUINOX})" not in printed
    assert f"(ratio to {OURS})" in printed
    assert f"(ratio to {layer_depth.SEQUENTIAL})" in printed


def test_rows_are_selected_by_table_and_name(capsys):
    found = cases.find("first call.*CNN", layers.ROWS)
    assert [row.case.name for row in found] == [layer_networks.NETWORKS[1].name]
    assert len({row.name for row in layers.ROWS}) == len(layers.ROWS)
    assert layers.main(["--rows", "nothing"]) == 2
    assert capsys.readouterr().err.startswith("benchmarks.layers: no case matches 'nothing'")


def test_times_in_milliseconds_keep_three_digits():
    times_us = (1234567.0, 56780.0, 9123.0, 45.6)
    columns = {f"{time_us}": Samples((time_us,), (time_us,), 1) for time_us in times_us}
    row = report.row("row", summarise(columns, f"{times_us[0]}"), [])
    (_, cells) = table.cells({"rows": [row]}, "completion", unit="milliseconds")
    assert [cell.split()[0] for cell in cells[1:]] == ["1235", "56.8", "9.12", "0.046"]
