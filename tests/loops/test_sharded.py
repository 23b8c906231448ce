"""Loops inside `jax.shard_map`, with its check of which arrays vary, and their transposes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from eqxlike import loops

KINDS = [("bounded", None), ("checkpointed", None), ("checkpointed", 3)]
WEIGHT, ROWS = np.array([0.9, 0.8], np.float32), np.array([[1, 2], [3, 5]], np.float32)


def scanned(weight, row, kind, checkpoints):
    """The carry starts replicated; one array of it stays so."""

    def body(carry, x):
        varying, replicated = carry
        return (jnp.tanh(varying * weight + x), jnp.cos(replicated * weight)), varying

    carry = jnp.zeros(2), jnp.ones(2)
    (varying, replicated), ys = loops.scan(body, carry, row, kind=kind, checkpoints=checkpoints)
    return jnp.sum(varying * replicated) + jnp.sum(ys**2)


def counted(weight, row, kind, checkpoints):
    """Each device runs another number of steps, and writes to a buffer that starts replicated."""

    def body(carry):
        step, x, written = carry
        return step + 1, x * weight, written.at[step].set(jnp.sin(x[0]))

    step, x, written = loops.while_loop(
        lambda carry: jnp.sum(carry[1]) > 0.7,
        body,
        (0, row, jnp.zeros(20)),
        max_steps=20,
        buffers=lambda carry: carry[2],
        kind=kind,
        checkpoints=checkpoints,
    )
    return jnp.sum(written**2) + step * jnp.sum(x)


def ranged(weight, row, kind, checkpoints):
    return loops.fori_loop(
        0,
        jnp.sum(row).astype(int),
        lambda i, x: jnp.tanh(x * weight + i.astype(float)),
        jnp.ones(2),
        max_steps=20,
        kind=kind,
        checkpoints=checkpoints,
    ).sum()


@pytest.mark.parametrize("function", [scanned, counted, ranged])
def test_sums_the_gradients_of_the_devices(function):
    mesh = jax.make_mesh((2,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))

    def derived(weight, rows):
        def total(weight, rows, kind):
            return jax.lax.psum(function(weight, rows[0], *kind), "b")

        return [jax.value_and_grad(total, (0, 1))(weight, rows, kind) for kind in KINDS]

    specs = [(P(), (P(), P("b")))] * len(KINDS)
    run = jax.jit(jax.shard_map(derived, mesh=mesh, in_specs=(P(), P("b")), out_specs=specs))
    each = jax.vmap(jax.value_and_grad(lambda *args: function(*args, *KINDS[0]), (0, 1)), (None, 0))
    values, (by_weight, by_rows) = jax.jit(each)(WEIGHT, ROWS)
    expected = values.sum(), (by_weight.sum(0), by_rows)
    for found in run(WEIGHT, ROWS):
        jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, 1e-4), found, expected)


def test_shared_array_needs_to_vary_if_the_numbers_of_steps_do():
    mesh = jax.make_mesh((2,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))

    def value(weight, row):
        def body(x):
            return jax.lax.scan(lambda x, _: (x * weight, None), x, None, 2)[0]

        x = loops.while_loop(lambda x: x[0] > 0.5, body, row[0], max_steps=9, kind="bounded")
        return jax.lax.psum(jnp.sum(x), "b")

    gradient = jax.shard_map(jax.grad(value), mesh=mesh, in_specs=(P(), P("b")), out_specs=P())
    with pytest.raises(ValueError, match=r"float32\[2\].*vary along the axes \['b'\].*pcast"):
        jax.eval_shape(gradient, WEIGHT, ROWS)


@pytest.mark.parametrize(("kind", "checkpoints"), KINDS)
def test_linear_loop_has_a_transpose(kind, checkpoints):
    matrix = jnp.array([[1.0, 2.0], [0.5, -1.0]])

    def linear(x, num_steps):
        return loops.while_loop(
            lambda carry: carry[0] < num_steps,
            lambda carry: (carry[0] + 1, matrix @ carry[1] + x),
            (0, x),
            max_steps=4,
            kind=kind,
            checkpoints=checkpoints,
        )[1]

    batch = jax.vmap(linear, (None, 0))
    x, counts = jnp.ones(2), jnp.array([0, 2, 3])
    cotangents = jnp.cos(batch(x, counts))
    for function in (lambda x: batch(x, counts), jax.jit(lambda x: batch(x, counts))):
        (found,) = jax.linear_transpose(function, x)(cotangents)
        (expected,) = jax.vjp(function, x)[1](cotangents)
        np.testing.assert_allclose(found, expected, 1e-5)


@pytest.mark.parametrize(
    ("condition", "body"),
    [
        (lambda carry: carry[0] < 3, lambda x: jnp.sin(x)),
        (lambda carry: carry[0] < 3, lambda x: x * x),
        (lambda carry: carry[1] < 9, lambda x: 2 * x),
    ],
)
def test_loop_that_is_not_linear_has_no_transpose(condition, body):
    def loop(x):
        return loops.while_loop(
            condition,
            lambda carry: (carry[0] + 1, body(carry[1])),
            (0, x),
            max_steps=9,
            kind="bounded",
        )[1]

    for function in (loop, lambda x: jax.vmap(loop)(jnp.stack([x, x]))[0]):
        with pytest.raises(ValueError, match=r"steps are linear in the input"):
            jax.linear_transpose(function, 1.0)(1.0)


@pytest.mark.parametrize(
    "loop",
    [
        lambda x: loops.while_loop(lambda x: x < 5, lambda x: 2 * x, x),
        lambda x: loops.fori_loop(0, x.astype(int), lambda i, y: x * y, x),
    ],
)
def test_default_kind_names_those_with_reverse_mode(loop):
    assert jax.jit(jax.jacfwd(loop))(2.0) > 0
    with pytest.raises(ValueError, match=r"kind='checkpointed' or kind='bounded'.*max_steps"):
        jax.jit(jax.grad(loop))(2.0)
