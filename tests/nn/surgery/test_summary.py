import gc
import io
import weakref

import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
import rich.console

import eqxlike as eqx
from eqxlike import nn
from tests.nn.arrays import filled


class Tied(eqx.Module):
    first: nn.Linear
    second: nn.Linear
    scale: jax.Array
    unused: nn.Dropout
    num_calls: int = eqx.field(static=True, default=2)

    def __call__(self, x, state, *, key):
        for call_key in jr.split(key, self.num_calls):
            x = self.first(x) * jr.normal(call_key)
        return self.second(x), state + 1


class Jitted(eqx.Module):
    layer: nn.Linear

    @eqx.filter_jit
    def __call__(self, x):
        return self.layer(x)


def linear(key, in_size=3, out_size=3):
    return filled(nn.Linear, in_size, out_size, key=key)


def by_path(summary):
    return {row.path: row for row in summary.rows}


def test_table_of_a_sequential(getkey):
    model = nn.Sequential([linear(getkey(), 8, 16), nn.Dropout(0.5), linear(getkey(), 16, 2)])
    table = str(nn.summary(nn.freeze(model, lambda model: model[2]), jnp.ones(8), key=getkey()))
    lines = table.splitlines()
    assert len(lines) == 6
    header = "Path Type Calls Output Parameters Bytes FLOPs Trained"
    assert lines[0].split() == header.split()
    cells = [line.split() for line in lines[1:-1]]
    assert cells[0][:6] == ["(model)", "Sequential", "1", "f32[2]", "178", "712"]
    # A product of 16 x 8 by 8, and a sum of 16.
    assert cells[1] == [".layers[0]", "Linear", "1", "f32[16]", "144", "576", "272", "all"]
    assert cells[2][:6] == [".layers[1]", "Dropout", "1", "f32[16]", "0", "0"]
    assert cells[3] == [".layers[2]", "Linear", "1", "f32[2]", "34", "136", "66", "frozen"]
    assert [row[-1] for row in cells] == ["part", "all", "-", "frozen"]
    assert lines[-1].startswith("178 parameters, 144 of them trained; 712 bytes;")


def test_calls_are_counted_and_shared_layers_count_once(getkey):
    layer = linear(getkey())
    model = Tied(layer, layer, layer.bias, nn.Dropout(0.5))
    summary = nn.summary(model, jnp.ones(3), jnp.array(0), key=getkey())
    rows = by_path(summary)
    assert list(rows) == ["", ".first", ".unused"]
    assert rows[""].cells[3] == "(f32[3], weak_i32[])"
    assert rows[""].outputs[0][0].shape == (3,)
    assert rows[".first"].num_calls == 3
    assert rows[".first"].flops == 3 * (2 * 3 * 3 + 3)
    assert rows[".unused"].num_calls == 0
    assert rows[".unused"].flops is None
    assert rows[".unused"].cells[2:4] == ("-", "-")
    assert summary.num_parameters == rows[""].num_parameters == 12
    assert summary.flops == rows[""].flops > rows[".first"].flops


def test_tied_arrays_count_once_and_keys_and_counters_are_no_parameters(getkey):
    first = linear(getkey())
    second = eqx.tree_at(lambda layer: layer.weight, linear(getkey()), first.weight)
    summary = nn.summary([first, second])
    assert [row.num_parameters for row in summary.rows] == [12, 12]
    assert (summary.num_parameters, summary.num_bytes) == (15, 60)
    summary = nn.summary({"key": getkey(), "count": jnp.arange(3), "weight": jnp.ones(2)})
    assert (summary.num_parameters, summary.num_bytes) == (2, 8 + 12 + 8)


def test_without_arguments_nothing_is_called(getkey):
    model = {"a": linear(getkey())}
    summary = nn.summary(model)
    assert [(row.path, row.num_calls) for row in summary.rows] == [("['a']", 0)]
    assert summary.flops is None
    assert str(summary).endswith("- FLOPs")
    with pytest.raises(TypeError, match="a dict is not callable"):
        nn.summary(model, jnp.ones(3))


def test_summary_keeps_no_array_of_the_model_alive(getkey):
    model = Jitted(linear(getkey()))
    gone = weakref.ref(model.layer.weight)
    summary = nn.summary(model, jnp.ones(3))
    del model
    gc.collect()
    assert gone() is None
    assert summary.num_parameters == 12


def test_arguments_may_be_shapes_and_all_examples_of_a_batch_count(getkey):
    model, x = Jitted(linear(getkey())), jax.ShapeDtypeStruct((4, 3), jnp.float32)
    # A compiled function is seen each time.
    for _ in range(2):
        rows = nn.summary(eqx.filter_vmap(model), x).rows
        assert [(row.path, row.num_calls) for row in rows] == [("", 1), (".layer", 1)]
        assert [row.outputs[0].shape for row in rows] == [(3,), (3,)]
        assert [row.flops for row in rows] == [4 * 21] * 2


def test_rich_shows_the_same_cells(getkey):
    summary = nn.summary(nn.Sequential([linear(getkey())]), jnp.ones(3))
    console = rich.console.Console(width=120, file=io.StringIO())
    console.print(summary)
    text = console.file.getvalue()
    assert ".layers[0]" in text
    assert summary.totals in text
    assert summary.rows[1].cells[3] in text


def test_state_is_shown_by_its_name():
    model, state = nn.make_with_state(nn.BatchNorm)(3, "batch", mode="batch", inference=True)
    (row,) = nn.summary(model, jnp.ones(3), state).rows
    assert row.cells[3] == "(f32[3], State)"
    assert row.flops > 0
    assert row.outputs[0][1].get(model.batch_counter).shape == ()
