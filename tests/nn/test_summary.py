"""`nn.summary` shows layers, outputs and parameters, and counts the FLOPs of the program."""

import gc
import io
import weakref

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
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
    # The product of a 16 x 8 matrix and a vector, and a sum of 16 numbers.
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


def test_summary_without_arguments_calls_nothing(getkey):
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
    # Each call of a compiled function is counted.
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


LINEAR = 2 * 3 * 3 + 3
"""The FLOPs of the product of a 3 x 3 matrix and a vector, and of a sum of 3 numbers."""


class Model(eqx.Module):
    """Calls its layer with the function `way`."""

    layer: nn.Linear
    way: object

    def __call__(self, x):
        return self.way(self.layer, x)


def count_of_xla(model, *args):
    """The FLOPs that XLA counts before optimisation, without the -1 for each custom call."""
    arrays, static = eqx.partition(model, eqx.is_array)
    program = jax.jit(lambda arrays, *args: eqx.combine(arrays, static)(*args))
    shapes = jax.eval_shape(lambda *args: args, arrays, *args)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        analysis = program.lower(*shapes).cost_analysis()
    return analysis.get("flops", 0.0) - analysis.get("optimal_seconds", 0.0)


def test_total_equals_the_count_of_xla(getkey):
    def make(key):
        conv_key, mlp_key = jax.random.split(key)
        conv = nn.Conv2d(3, 8, 3, padding=1, key=conv_key)
        layers = [conv, nn.GroupNorm(2, 8), nn.Lambda(jax.nn.relu), nn.AvgPool2d(2, 2)]
        mlp = nn.MLP(8 * 4 * 4, 10, width_size=16, depth=1, key=mlp_key)
        return nn.Sequential([*layers, nn.Lambda(jnp.ravel), mlp])

    model, x = eqx.filter_vmap(filled(make, getkey())), jnp.ones((5, 3, 8, 8))
    summary = nn.summary(model, x)
    assert summary.flops == count_of_xla(model, x)
    outermost = [row.flops for row in summary.rows if row.path.count(".") == 1]
    assert summary.flops == sum(outermost)


def test_stack_inside_a_stack_counts_each_iteration_of_both(getkey):
    def make(key):
        return nn.Sequential([linear(key), nn.Identity()])

    stack = filled(nn.ScanStack, lambda key: nn.ScanStack(make, 3, key=key), 4, key=getkey())
    summary = nn.summary(stack, jnp.ones(3))
    assert summary.flops == 12 * LINEAR
    # `Identity` computes nothing, but is called in each iteration.
    assert [row.num_calls for row in summary.rows] == [1, 4, 12, 12, 12]
    assert summary.num_parameters == 12 * 12


def scan(layer, x):
    # Only the initial carry is weakly typed, so JAX traces the body twice.
    return jax.lax.scan(lambda c, _: (jnp.sum(layer(x)), None), 0.0, length=4)[0]


def jit(layer, x):
    jitted = jax.jit(lambda x: layer(x))
    return jitted(jitted(x))


def discard(layer, x):
    layer(x)
    return x


def cond(layer, x):
    # A constant condition adds no FLOPs.
    return x + jax.lax.cond(True, lambda x: layer(x), lambda x: layer(layer(x)), x)


def while_loop(layer, x):
    return jax.lax.while_loop(lambda x: x[0] > 0, lambda x: layer(x), x)


def show(layer, x):
    jax.debug.print("{}", x)
    return jax.pure_callback(np.sin, x, layer(x))


def decompose(layer, x):
    # A custom call, whose cost is unknown.
    return jnp.linalg.svd(jnp.outer(layer(x), x))[1]


def through_a_reference(layer, x):
    reference = jax.new_ref(x)
    reference[...] = layer(reference[...])
    return reference[...]


def shard_map(layer, x):
    mesh = jax.sharding.AbstractMesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    both = jax.sharding.PartitionSpec("d")
    return jax.shard_map(layer, mesh=mesh, in_specs=both, out_specs=both)(jnp.concatenate([x, x]))


# Tuples (way to call a layer, number of calls, FLOPs of the layer, FLOPs of the program).
WAYS = [
    (scan, 4, 4 * LINEAR, None),
    (jit, 2, 2 * LINEAR, 2 * LINEAR),
    # One product with the transposed matrix. The output of the layer is not needed.
    (lambda layer, x: jax.grad(lambda x: layer(x).sum())(x), 1, 2 * 3 * 3, 2 * 3 * 3),
    (discard, 0, None, 0),
    (cond, 3, 3 * LINEAR, 2 * LINEAR + 3),
    (while_loop, 1, LINEAR, None),
    (show, 1, LINEAR, LINEAR),
    (decompose, 1, LINEAR, None),
    (through_a_reference, 1, LINEAR, None),
    (shard_map, 2, 2 * LINEAR, 2 * LINEAR),
]


@pytest.mark.parametrize(("way", "num_calls", "flops", "total"), WAYS)
def test_costs_of_a_layer_and_of_the_program_around_it(way, num_calls, flops, total, getkey):
    summary = nn.summary(Model(linear(getkey()), way), jnp.ones(3))
    row = summary.rows[1]
    assert (row.path, row.num_calls, row.flops) == (".layer", num_calls, flops)
    assert bool(row.outputs) == bool(num_calls)
    if total is not None:
        assert summary.flops == total
    if way is decompose:
        assert (summary.flops, summary.rows[0].cells[6]) == (None, "-")


class Countdown(eqx.Module):
    layer: nn.Linear

    def __call__(self, x, turns):
        return self.layer(x) if turns == 0 else self(self.layer(x), turns - 1)


def test_layer_that_calls_itself_counts_once(getkey):
    summary = nn.summary(Countdown(linear(getkey())), jnp.ones(3), 2)
    assert [row.num_calls for row in summary.rows] == [3, 3]
    assert [row.flops for row in summary.rows] == [3 * LINEAR] * 2


class Apply(eqx.Module):
    def __call__(self, x, function):
        return function(x)


def test_calls_that_differ_only_in_a_closure_have_separate_costs():
    def power(exponent):
        return lambda x: x if exponent == 0 else x * power(exponent - 1)(x)

    def model(layer, x):
        return layer(layer(x, power(1)), power(4))

    summary = nn.summary(eqx.Partial(model, Apply()), jnp.ones(3))
    assert [row.flops for row in summary.rows if row.type_name == "Apply"] == [3 * 1 + 3 * 4]
