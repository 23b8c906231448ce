import dataclasses
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


class Freezing(eqx.Module):
    """Freezes a layer as it is called."""

    layer: nn.Linear

    def __call__(self, x):
        return nn.freeze(self.layer)(x)


class Mean(eqx.Module):
    """Needs a batch around it."""

    layer: nn.Linear

    def __call__(self, x):
        return jax.lax.pmean(self.layer(x), "batch")


class Jitted(eqx.Module):
    layer: nn.Linear

    @eqx.filter_jit
    def __call__(self, x):
        return self.layer(x)


class Scaled(eqx.Module, strict=True):
    """Final, with fields of its own in a generated `__init__`."""

    layers: dict
    factor: float = 2.0

    def __call__(self, x):
        assert isinstance(self.layers["a"][0], nn.Linear)
        return self.factor * dataclasses.replace(self, factor=1.0).apply(x)

    def apply(self, x):
        return self.layers["a"][0](x)


def linear(key, in_size=3, out_size=3):
    return nn.Linear(in_size, out_size, key=key)


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


def test_calls_are_counted_and_what_is_shared_counts_once(getkey):
    layer = linear(getkey())
    model = Tied(layer, layer, layer.bias, nn.Dropout(0.5))
    summary = nn.summary(model, jnp.ones(3), jnp.array(0), key=getkey())
    rows = by_path(summary)
    assert list(rows) == ["", ".first", ".unused"]
    assert rows[".first"].num_calls == 3
    assert rows[".first"].flops == 3 * (2 * 3 * 3 + 3)
    assert rows[".unused"].num_calls == 0
    assert rows[".unused"].flops is None
    assert rows[".unused"].cells[2:4] == ("-", "-")
    assert summary.num_parameters == rows[""].num_parameters == 12
    assert summary.flops == rows[""].flops > rows[".first"].flops


def test_output_of_any_form_is_shown_with_dtypes(getkey):
    model = Tied(linear(getkey()), linear(getkey()), jnp.ones(()), nn.Identity())
    row = nn.summary(model, jnp.ones(3), jnp.array(0), key=getkey()).rows[0]
    assert row.cells[3] == "(f32[3], weak_i32[])"
    assert row.outputs[0][0].shape == (3,)


def test_arrays_that_tie_two_layers_count_once_in_the_total(getkey):
    first = linear(getkey())
    second = eqx.tree_at(lambda layer: layer.weight, linear(getkey()), first.weight)
    summary = nn.summary([first, second])
    assert [row.num_parameters for row in summary.rows] == [12, 12]
    assert summary.num_parameters == 15
    assert summary.num_bytes == 60


def test_without_arguments_nothing_is_called(getkey):
    summary = nn.summary({"a": linear(getkey())})
    assert [(row.path, row.num_calls) for row in summary.rows] == [("['a']", 0)]
    assert summary.flops is None
    assert str(summary).endswith("- FLOPs")


def test_arguments_for_what_cannot_be_called_are_refused(getkey):
    with pytest.raises(TypeError, match="a dict cannot be called"):
        nn.summary({"a": linear(getkey())}, jnp.ones(3))


def test_layer_in_a_scan_counts_for_each_turn(getkey):
    stack = nn.ScanStack(linear, depth=5, key=getkey())
    summary = nn.summary(stack, jnp.ones(3))
    row = by_path(summary)[".layers"]
    assert row.num_calls == 5
    assert row.outputs[0].shape == (3,)
    assert row.flops == summary.flops == 5 * (2 * 3 * 3 + 3)
    assert row.num_parameters == summary.num_parameters == 5 * 12


def test_call_under_vmap_counts_for_all_examples(getkey):
    x = jnp.ones((4, 3))
    summary = nn.summary(eqx.filter_vmap(linear(getkey())), x)
    (row,) = summary.rows
    assert (row.path, row.num_calls, row.outputs[0].shape) == ("", 1, (3,))
    assert row.flops == summary.flops == 4 * 21


def test_layer_that_needs_an_axis_has_its_cost(getkey):
    model = eqx.filter_vmap(Mean(linear(getkey())), axis_name="batch")
    rows = by_path(nn.summary(model, jnp.ones((4, 3))))
    assert rows[""].outputs[0].shape == (3,)
    assert rows[".layer"].flops == 4 * 21
    # The sums over the batch, and a division of each.
    assert rows[""].flops == 4 * 21 + 3 * 3 + 3


def test_layers_in_a_compiled_function_are_seen_each_time(getkey):
    model = Jitted(linear(getkey()))
    for _ in range(2):
        assert by_path(nn.summary(model, jnp.ones(3)))[".layer"].num_calls == 1


def test_model_is_of_its_class_while_it_is_observed(getkey):
    model = Scaled({"a": [linear(getkey())]})
    rows = by_path(nn.summary(model, jnp.ones(3)))
    assert [row.num_calls for row in rows.values()] == [1, 1]
    assert list(rows) == ["", ".layers['a'][0]"]


def test_nothing_is_computed_and_shapes_may_stand_for_arrays(getkey):
    seen = []
    model = nn.Lambda(lambda x: seen.append(x) or x)
    nn.summary(model, jax.ShapeDtypeStruct((2,), jnp.float32))
    assert all(isinstance(x, jax.core.Tracer) for x in seen)


def test_model_may_freeze_a_layer_while_it_is_observed(getkey):
    summary = nn.summary(Freezing(nn.Linear(2, 3, key=getkey())), jnp.ones(2))
    assert [(row.path, row.num_calls) for row in summary.rows] == [("", 1), (".layer", 1)]


@pytest.mark.parametrize("change", [nn.freeze, nn.unfreeze])
def test_frozen_model_may_freeze_a_layer_while_it_is_observed(change, getkey):
    class Changing(eqx.Module):
        layer: nn.Linear

        def __call__(self, x):
            return change(self.layer)(x)

    model = nn.freeze(Changing(nn.Linear(2, 3, key=getkey())))
    rows = nn.summary(model, jnp.ones(2)).rows
    assert [(row.path, row.num_calls) for row in rows] == [("", 1), (".layer", 1)]


def test_calls_outside_leave_the_model_as_it_is(getkey):
    model = linear(getkey())
    before = jax.tree.structure(model)
    nn.summary(model, jnp.ones(3))
    assert type(model) is nn.Linear
    assert jax.tree.structure(model) == before


def test_error_of_the_model_is_the_error(getkey):
    with pytest.raises(ValueError, match=r"Linear.* expected x of shape \(3,\), got shape \(4,\)"):
        nn.summary(nn.Sequential([linear(getkey())]), jnp.ones(4))


def test_summary_keeps_no_array_of_the_model_alive(getkey):
    model = Jitted(linear(getkey()))
    gone = weakref.ref(model.layer.weight)
    summary = nn.summary(model, jnp.ones(3))
    del model
    gc.collect()
    assert gone() is None
    assert summary.num_parameters == 12


def test_rich_shows_the_same_cells(getkey):
    summary = nn.summary(nn.Sequential([linear(getkey())]), jnp.ones(3))
    console = rich.console.Console(width=120, file=io.StringIO())
    console.print(summary)
    text = console.file.getvalue()
    assert ".layers[0]" in text
    assert summary.totals in text
    assert summary.rows[1].cells[3] in text


def test_keys_and_counters_are_bytes_and_no_parameters(getkey):
    summary = nn.summary({"key": getkey(), "count": jnp.arange(3), "weight": jnp.ones(2)})
    assert (summary.num_parameters, summary.num_bytes) == (2, 8 + 12 + 8)


def make_stateful(key):
    norm = nn.BatchNorm(4, "batch", mode="batch")
    return nn.Sequential([nn.Linear(3, 4, key=key), norm, nn.Lambda(jnp.tanh)])


def test_state_that_a_layer_uses_up_is_shown_by_its_name(getkey):
    model, state = nn.make_with_state(make_stateful)(getkey())
    table = nn.summary(nn.inference_mode(model), jnp.ones(3), state)
    assert [row.type_name for row in table.rows] == ["Sequential", "Linear", "BatchNorm", "Lambda"]
    assert "(f32[4], State)" in str(table)
    assert table.rows[2].flops > 0
    assert table.rows[2].outputs[0][1].get(model[1].batch_counter).shape == ()


def test_layer_that_needs_a_batch_is_summed_up_inside_of_a_vmap(getkey):
    model, state = nn.make_with_state(make_stateful)(getkey())
    batched = eqx.filter_vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
    table = nn.summary(batched, jnp.ones((2, 3)), state)
    rows = {row.type_name: row for row in table.rows}
    assert rows["BatchNorm"].outputs[0][0].shape == (4,)
    assert rows["BatchNorm"].flops > 0
    assert table.flops == rows["Linear"].flops + rows["BatchNorm"].flops
    # Nothing was computed: the state is as it was.
    assert state.get(model[1].batch_counter) == 0
