"""The FLOPs of `nn.summary` are those of the program that runs."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from tests.nn.test_laws import CASES, build, call_on_batch, inputs

LINEAR = 2 * 3 * 3 + 3
"""FLOPs of a product of 3 x 3 by 3, and a sum of 3."""


def linear(key):
    return nn.Linear(3, 3, key=key)


class Model(eqx.Module):
    """Calls its layer in a way of its own."""

    layer: nn.Linear
    way: object

    def __call__(self, x):
        return self.way(self.layer, x)


def layer_row(getkey, way, x=None, layer=None):
    model = Model(linear(getkey()) if layer is None else layer, way)
    summary = nn.summary(model, jnp.ones(3) if x is None else x)
    row = next(row for row in summary.rows if row.path == ".layer")
    return row, summary


def count_of_xla(model, *args):
    """What XLA counts before it optimises, without the -1 that it takes for each foreign call."""
    arrays, static = eqx.partition(model, eqx.is_array)
    lowered = jax.jit(lambda arrays, *args: eqx.combine(arrays, static)(*args)).lower(arrays, *args)
    analysis = lowered.cost_analysis()
    return analysis.get("flops", 0.0) - analysis.get("optimal_seconds", 0.0)


class OnBatch(eqx.Module):
    """A case of the registry, called on a batch."""

    layer: object
    name: str = eqx.field(static=True)

    def __call__(self, batch, keys):
        return call_on_batch(CASES[self.name], self.layer, batch, keys)


# None that is scanned: XLA counts one layer of them.
COUNTED = (
    "MultiheadAttention",
    "ConvTranspose1d",
    "Embedding",
    "GroupNorm",
    "MaxPool1d",
    "LSTMCell",
    "BatchNorm",
)


@pytest.mark.parametrize("name", COUNTED)
def test_total_of_a_batch_is_what_xla_counts_for_it(name, getkey):
    model = OnBatch(build(CASES[name]), name)
    batch, keys = inputs(CASES[name], (3,)), jr.split(getkey(), 3)
    summary = nn.summary(model, batch, keys)
    # To add a constant 0 is an operation here, and none to XLA.
    np.testing.assert_allclose(summary.flops, count_of_xla(model, batch, keys), rtol=0.04)
    assert summary.rows[0].flops == summary.flops


def test_total_is_exactly_what_xla_counts_where_no_constant_is_folded(getkey):
    keys = jr.split(getkey(), 3)
    model = nn.Sequential(
        [
            nn.Conv2d(3, 8, 3, padding=1, key=keys[0]),
            nn.GroupNorm(2, 8),
            nn.Lambda(jax.nn.relu),
            nn.AvgPool2d(2, 2),
            nn.Lambda(jnp.ravel),
            nn.MLP(8 * 4 * 4, 10, width_size=16, depth=2, key=keys[1]),
        ]
    )
    x = jnp.ones((5, 3, 8, 8))
    summary = nn.summary(eqx.filter_vmap(model), x)
    assert summary.flops == count_of_xla(eqx.filter_vmap(model), x)
    outermost = [row.flops for row in summary.rows if row.path.count(".") == 1]
    assert summary.flops == sum(outermost)


@pytest.mark.parametrize("options", [{"unroll": 2, "remat": True}])
def test_stack_costs_what_its_layers_cost_one_after_another(options, getkey):
    def block(key):
        return nn.Sequential([nn.MLP(3, 3, 5, 1, key=key), nn.LayerNorm(3)])

    stack = nn.ScanStack(block, 4, **options, key=getkey())
    x = jnp.ones((6, 3))
    stacked = nn.summary(eqx.filter_vmap(stack), x)
    plain = nn.summary(eqx.filter_vmap(nn.Sequential(stack.unstack())), x)
    assert stacked.flops == plain.flops
    assert stacked.num_parameters == plain.num_parameters
    assert stacked.num_parameters == sum(
        leaf.size for leaf in jax.tree.leaves(eqx.filter(stack, eqx.is_array))
    )


def test_stack_inside_of_a_stack_counts_for_each_turn_of_both(getkey):
    stack = nn.ScanStack(lambda key: nn.ScanStack(linear, 3, key=key), 4, key=getkey())
    summary = nn.summary(stack, jnp.ones(3))
    assert summary.flops == 12 * LINEAR
    assert [row.num_calls for row in summary.rows] == [1, 4, 12]
    assert summary.num_parameters == 12 * 12


def test_layer_that_computes_nothing_is_called_in_each_turn(getkey):
    stack = nn.ScanStack(lambda key: nn.Sequential([linear(key), nn.Identity()]), 4, key=getkey())
    rows = nn.summary(stack, jnp.ones(3)).rows
    assert [(row.type_name, row.num_calls) for row in rows[2:]] == [("Linear", 4), ("Identity", 4)]


def test_body_that_jax_traces_twice_counts_once(getkey):
    def scan(layer, x):
        # Weak in type, what is carried is not what the body returns: JAX begins anew.
        return jax.lax.scan(lambda c, _: (jnp.sum(layer(x)), None), 0.0, length=4)[0]

    row, _ = layer_row(getkey, scan)
    assert row.num_calls == 4
    assert row.flops == 4 * LINEAR


def test_function_that_jax_has_compiled_counts_at_each_call(getkey):
    def twice(layer, x):
        jitted = jax.jit(lambda x: layer(x))
        return jitted(jitted(x))

    row, summary = layer_row(getkey, twice)
    assert row.num_calls == 2
    assert row.flops == summary.flops == 2 * LINEAR


def test_gradient_counts_for_the_layer_that_it_is_of(getkey):
    row, summary = layer_row(getkey, lambda layer, x: jax.grad(lambda x: layer(x).sum())(x))
    # One product more, of the transposed matrix; that of the layer itself nobody needs.
    assert row.num_calls == 1
    assert row.flops == summary.flops == 2 * 3 * 3


def test_call_that_nothing_hangs_on_is_none(getkey):
    def discard(layer, x):
        layer(x)
        return x

    row, summary = layer_row(getkey, discard)
    assert (row.num_calls, row.outputs, row.flops) == (0, (), None)
    assert summary.flops == 0


def test_largest_branch_counts(getkey):
    def either(layer, x):
        # One that is known beforehand costs nothing to look at.
        return jax.lax.cond(True, lambda x: layer(x), lambda x: layer(layer(x)), x)

    row, summary = layer_row(getkey, lambda layer, x: either(layer, x) + x)
    assert row.num_calls == 3
    assert summary.flops == 2 * LINEAR + 3


def test_while_loop_counts_one_turn(getkey):
    def loop(layer, x):
        return jax.lax.while_loop(lambda x: x[0] > 0, lambda x: layer(x), x)

    row, _ = layer_row(getkey, loop)
    assert (row.num_calls, row.flops) == (1, LINEAR)


class Countdown(eqx.Module):
    layer: nn.Linear

    def __call__(self, x, turns):
        return self.layer(x) if turns == 0 else self(self.layer(x), turns - 1)


def test_layer_that_calls_itself_counts_once(getkey):
    summary = nn.summary(Countdown(linear(getkey())), jnp.ones(3), 2)
    assert [row.num_calls for row in summary.rows] == [3, 3]
    assert [row.flops for row in summary.rows] == [3 * LINEAR] * 2


def test_printing_costs_nothing(getkey):
    def show(layer, x):
        jax.debug.print("{}", x)
        return layer(x)

    assert layer_row(getkey, show)[1].flops == LINEAR


def test_checks_and_what_python_computes_cost_nothing(getkey):
    def checked(layer, x):
        x = eqx.error_if(layer(x), jnp.any(jnp.isnan(x)), "not a number")
        return jax.pure_callback(np.sin, x, x)

    row, summary = layer_row(getkey, checked)
    assert row.flops == LINEAR
    # To ask of three numbers.
    assert LINEAR < summary.flops < LINEAR + 10


def test_foreign_code_makes_a_dash_of_the_total_and_not_of_other_layers(getkey):
    def decompose(layer, x):
        return jnp.linalg.svd(jnp.outer(layer(x), x))[1]

    row, summary = layer_row(getkey, decompose)
    assert row.flops == LINEAR
    assert summary.flops is None
    assert summary.rows[0].cells[6] == "-"


def test_reference_to_an_array_does_no_harm(getkey):
    def through_a_reference(layer, x):
        reference = jax.new_ref(x)
        reference[...] = layer(reference[...])
        return reference[...]

    row, _ = layer_row(getkey, through_a_reference)
    assert (row.num_calls, row.flops) == (1, LINEAR)


class Apply(eqx.Module):
    def __call__(self, x, function):
        return function(x)


def test_calls_that_differ_in_a_closure_alone_are_costed_by_themselves():
    def power(exponent):
        return lambda x: x if exponent == 0 else x * power(exponent - 1)(x)

    def model(layer, x):
        return layer(layer(x, power(1)), power(4))

    summary = nn.summary(eqx.Partial(model, Apply()), jnp.ones(3))
    assert [row.flops for row in summary.rows if row.type_name == "Apply"] == [3 * 1 + 3 * 4]
