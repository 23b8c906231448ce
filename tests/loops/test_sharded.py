"""Loops in `jax.shard_map` with its check of varying arrays, and transposes of loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from eqxlike import loops
from tests.nn.arrays import assert_close

KINDS = [{"kind": "bounded"}, {"kind": "checkpointed"}, {"kind": "checkpointed", "checkpoints": 3}]
AUTO = {"axis_types": (jax.sharding.AxisType.Auto,)}
WEIGHT, ROWS = np.array([0.9, 0.8], np.float32), np.array([[1, 2], [3, 5]], np.float32)


def scanned(weight, row, **options):
    """A scan whose carry starts replicated. One of its arrays stays replicated."""

    def body(carry, x):
        varying, replicated = carry
        return (jnp.tanh(varying * weight + x), jnp.cos(replicated * weight)), varying

    carry = jnp.zeros(2), jnp.ones(2)
    (varying, replicated), ys = loops.scan(body, carry, row, **options)
    return jnp.sum(varying * replicated) + jnp.sum(ys**2)


def counted(weight, row, **options):
    """The number of steps differs between devices. The buffer of the loop starts replicated."""

    def body(carry):
        step, x, written = carry
        return step + 1, x * weight, written.at[step].set(jnp.sin(x[0]))

    is_on, start = lambda carry: jnp.sum(carry[1]) > 0.7, (0, row, jnp.zeros(20))
    options = {"max_steps": 20, "buffers": lambda carry: carry[2], **options}
    step, x, written = loops.while_loop(is_on, body, start, **options)
    return jnp.sum(written**2) + step * jnp.sum(x)


def ranged(weight, row, **options):
    body = lambda i, x: jnp.tanh(x * weight + i.astype(float))
    num_steps = jnp.sum(row).astype(int)
    return loops.fori_loop(0, num_steps, body, jnp.ones(2), max_steps=20, **options).sum()


@pytest.mark.parametrize("function", [scanned, counted, ranged])
def test_gradients_of_the_devices_are_summed(function):
    mesh = jax.make_mesh((2,), ("b",), **AUTO)

    def derived(weight, rows):
        def total(weight, rows, kind):
            return jax.lax.psum(function(weight, rows[0], **kind), "b")

        return [jax.value_and_grad(total, (0, 1))(weight, rows, kind) for kind in KINDS]

    specs = [(P(), (P(), P("b")))] * len(KINDS)
    run = jax.jit(jax.shard_map(derived, mesh=mesh, in_specs=(P(), P("b")), out_specs=specs))
    each = jax.vmap(
        jax.value_and_grad(lambda *args: function(*args, **KINDS[0]), (0, 1)), (None, 0)
    )
    values, (by_weight, by_rows) = jax.jit(each)(WEIGHT, ROWS)
    expected = values.sum(), (by_weight.sum(0), by_rows)
    for found in run(WEIGHT, ROWS):
        assert_close(found, expected, rtol=1e-4, atol=0)


def test_shared_array_must_vary_if_the_numbers_of_steps_vary():
    mesh = jax.make_mesh((2,), ("b",), **AUTO)

    def value(weight, row):
        def body(x):
            return jax.lax.scan(lambda x, _: (x * weight, None), x, None, 2)[0]

        x = loops.while_loop(lambda x: x[0] > 0.5, body, row[0], max_steps=9, kind="bounded")
        return jax.lax.psum(jnp.sum(x), "b")

    gradient = jax.shard_map(jax.grad(value), mesh=mesh, in_specs=(P(), P("b")), out_specs=P())
    with pytest.raises(ValueError, match=r"float32\[2\].*vary along the axes \['b'\].*pcast"):
        jax.eval_shape(gradient, WEIGHT, ROWS)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_linear_loop_has_a_transpose(kind):
    matrix = jnp.array([[1.0, 2.0], [0.5, -1.0]])

    def linear(x, num_steps):
        is_on = lambda carry: carry[0] < num_steps
        body = lambda carry: (carry[0] + 1, matrix @ carry[1] + x)
        return loops.while_loop(is_on, body, (0, x), max_steps=4, **kind)[1]

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
        step = lambda carry: (carry[0] + 1, body(carry[1]))
        return loops.while_loop(condition, step, (0, x), max_steps=9, kind="bounded")[1]

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
def test_error_of_the_default_kind_names_the_kinds_with_reverse_mode(loop):
    assert jax.jit(jax.jacfwd(loop))(2.0) > 0
    with pytest.raises(ValueError, match=r"kind='checkpointed' or kind='bounded'.*max_steps"):
        jax.jit(jax.grad(loop))(2.0)
