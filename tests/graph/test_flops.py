"""The FLOPs of each operation equal closed forms and the count of XLA."""

import jax
import jax.numpy as jnp

from eqxlike import graph, nn


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def flops_of(kind, report):
    return sum(row.flops for row in report.kinds if row.name == kind)


def key():
    return jax.random.key(0)


def test_each_device_of_a_shard_map_counts():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    mapped = jax.shard_map(lambda x, y: x @ y, mesh=mesh, in_specs=(split, whole), out_specs=split)
    assert graph.report(mapped, jnp.ones((4, 3)), jnp.ones((3, 5))).flops == 2 * 4 * 3 * 5


def test_grouped_products_cost_as_much_as_one_product_of_all_rows():
    def function(x, y, sizes):
        return jax.lax.ragged_dot(x, y, sizes)

    args = (struct(6, 4), struct(2, 4, 5), struct(2, dtype=jnp.int32))
    assert graph.report(function, *args).flops == 2 * 6 * 4 * 5
    found = graph.report(function, *args, gradient=True).gradient
    assert flops_of("ragged_dot_general", found) == 2 * (2 * 6 * 4 * 5)


def test_unused_operations_cost_nothing():
    def function(x):
        x @ x  # unused
        return x + x

    found = graph.report(function, struct(3, 3))
    assert (found.flops, len(found.operations)) == (9, 2)


def flops_of_xla(function, *args):
    return jax.jit(lambda *args: function(*args)).lower(*args).cost_analysis()["flops"]


def test_convolutions_and_their_gradient_cost_what_xla_counts():
    for layer in (
        nn.Conv1d(2, 3, 3, padding=1, stride=2, key=key()),
        nn.Conv2d(2, 4, 3, padding=2, dilation=2, groups=2, key=key()),
        nn.ConvTranspose1d(2, 3, 3, stride=2, key=key()),
    ):
        x = jnp.ones((2, *(7,) * layer.num_spatial_dims))
        assert graph.report(layer, x).flops == flops_of_xla(layer, x)

    def gradient(weight, x):
        conv = lambda w, x: jax.lax.conv_general_dilated(w, x, (1, 1), "SAME")
        return jax.vjp(conv, weight, x)[1](jnp.ones((1, 3, 6, 5)))

    args = jnp.ones((1, 2, 6, 5)), jnp.ones((3, 2, 3, 3))
    assert graph.report(gradient, *args).flops == flops_of_xla(gradient, *args)


def test_arithmetic_costs_what_xla_counts():
    x = jnp.ones((4, 6))
    for function in (
        lambda x: jnp.sum(x * x - x / 3 + jnp.maximum(x, 0)),
        lambda x: jnp.where(x > 0, x, -x).max(axis=0),
        lambda x: x**3 + x**-2,
        lambda x: (x @ x.T).sum(axis=1),
        lambda x: jnp.clip(x, 0.0, 1.0),
    ):
        assert graph.report(function, x).flops == flops_of_xla(function, x)

    def function(x):
        return jnp.exp(x) + jnp.tanh(x) * jnp.log(x) - jnp.sqrt(x)

    before = jax.jit(function).lower(x).cost_analysis()
    found = graph.report(function, x)
    assert found.layers[0].transcendentals == before["transcendentals"] == 4 * 24
    assert found.flops == before["flops"]


def test_costs_of_operations_equal_their_closed_forms():
    x = struct(3, 4, dtype=jnp.complex64)
    assert graph.report(lambda x: x @ x.T, x).flops == 8 * 3 * 4 * 3
    assert graph.report(lambda x: x * x + 1, struct(4, dtype=jnp.int32)).flops == 0
    found = graph.report(lambda x: jax.lax.linalg.cholesky(x), struct(6, 6))
    assert flops_of("cholesky", found) == 6**3 // 3
    assert not found.layers[0].is_least
    found = graph.report(lambda x: jax.lax.linalg.eigh(x)[1], struct(3, 3))
    # An unknown cost is a lower bound.
    assert found.layers[0].is_least
    found = graph.report(lambda x: jax.lax.cumlogsumexp(x), struct(8))
    assert found.layers[0].transcendentals == 8


def test_iterations_of_a_scan_and_the_costliest_branch_count_and_a_while_loop_is_unknown():
    def of_scan(x):
        return jax.lax.scan(lambda carry, _: (carry * 2.0, None), x, None, length=7)[0]

    def of_while(x):
        return jax.lax.while_loop(lambda x: x[0] < 9.0, lambda x: x * 2.0, x)

    def of_cond(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, jnp.sin, x)

    row = graph.report(of_scan, struct(3)).layers[0]
    assert (row.flops, row.operations, row.runs) == (21, 1, 7)
    row = graph.report(of_while, struct(3)).layers[0]
    assert (row.flops, row.is_least) == (3 + 1, True)
    assert graph.report(of_cond, struct(3, 3)).flops == 2 * 27 + 1
