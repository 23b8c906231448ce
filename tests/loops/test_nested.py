"""Nested batches, buffers and nested derivatives of loops."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxlike import loops
from tests.nn.arrays import assert_close

WAYS = [("checkpointed", 2), ("bounded", None)]
ways = pytest.mark.parametrize(("kind", "checkpoints"), WAYS)


def ways_and(*modes):
    """All pairs of a kind of loop and a mode."""
    cases = [(*way, mode) for way, mode in zip(WAYS, modes, strict=True)]
    return pytest.mark.parametrize(("kind", "checkpoints", "mode"), cases)


def repeated(count, body, *start, buffers=None, max_steps=6, kind="checkpointed", checkpoints=None):
    """The final carry of a loop of `count` steps. The body receives the index of the step."""
    return loops.while_loop(
        lambda carry: carry[0] < count,
        lambda carry: (carry[0] + 1, *body(*carry)),
        (jnp.array(0), *start),
        max_steps=max_steps,
        buffers=None if buffers is None else lambda carry: carry[buffers],
        kind=kind,
        checkpoints=checkpoints,
    )[1:]


assert_close = functools.partial(assert_close, rtol=1e-4, atol=1e-5)


def twice(total):
    """Reverse over reverse: the gradient of a projection of the gradient, as one number."""

    def projection(*args):
        gradient = jax.grad(total, tuple(range(len(args))))(*args)
        return sum(jnp.sum(jnp.cos(jnp.arange(1.0 * g.size)) * g.ravel()) for g in gradient)

    return lambda *args: jax.grad(projection, tuple(range(len(args))))(*args)


MATRIX = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3)) / 3, jnp.float32)


def test_gradients_of_arrays_that_nested_batches_share_are_summed():
    xs = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 4, 3)
    counts = np.array([[0, 1, 5, 6], [0, 0, 2, 0]])

    def total(way, matrix, of_outer):
        def run(matrix, of_outer, x, count):
            step = lambda _, x: [jnp.tanh(matrix @ x + of_outer)]
            return repeated(count, step, x, kind=way[0], checkpoints=way[1])[0]

        inner = jax.vmap(run, (None, None, 0, 0))
        return jnp.sum(jax.vmap(inner, (None, 0, 0, 0))(matrix, of_outer, xs, counts) ** 2)

    def backwards(matrix, of_outer):
        of_matrix, of_shifts = np.zeros((3, 3)), np.zeros(2)
        for outer, inner in np.ndindex(2, 4):
            path = [xs[outer, inner]]
            for _ in range(counts[outer, inner]):
                path.append(np.tanh(matrix @ path[-1] + of_outer[outer]))
            cotangent = 2 * path[-1]
            for x, new in reversed([*itertools.pairwise(path)]):
                cotangent = cotangent * (1 - new**2)
                of_matrix += np.outer(cotangent, x)
                of_shifts[outer] += cotangent.sum()
                cotangent = matrix.T @ cotangent
        return of_matrix, of_shifts

    args = np.asarray(MATRIX), np.array([0.1, -0.4], "f")
    found = jax.jit(lambda *args: [jax.grad(total, (1, 2))(way, *args) for way in WAYS])(*args)
    for each in found:
        assert_close(each, backwards(*args), rtol=1e-3, atol=1e-4)


def total_of_shared(run):
    return lambda w: jnp.sum(jax.vmap(jax.jit(run), (None, 0))(w, jnp.array([0.3, 0.6])))


@ways_and(twice, jax.grad)
def test_carry_may_have_entries_without_derivatives(kind, checkpoints, mode):
    """The time in the carry does not depend on the weight, so it has no tangent."""

    @jax.custom_jvp
    def of_time(t):
        return jnp.cos(t)

    @of_time.defjvp
    def _refuse(primals, tangents):
        raise AssertionError("the time has a tangent")

    def run(w, x):
        step = lambda _, t, x: (t + 0.1, jnp.sin(w * x) + of_time(t))
        return repeated(3, step, jnp.array(0.0), x, kind=kind, checkpoints=checkpoints)[1]

    def in_python(w, x):
        for step in range(3):
            x = jnp.sin(w * x) + jnp.cos(jnp.float32(0.1) * step)
        return x

    both = jax.jit(lambda w: [mode(total_of_shared(each))(w) for each in (run, in_python)])
    assert_close(*both(0.7))


@ways
def test_batches_of_different_lengths_share_an_inner_batch_and_a_buffer(kind, checkpoints):
    options = {"kind": kind, "checkpoints": checkpoints}

    def run(w, v, count):
        return repeated(count, lambda _, x: [x * w + v], 1.0, **options)[0]

    def fill(start, count):
        step = lambda index, buffer: [buffer.at[index].set(7.0)]
        return repeated(count, step, start, buffers=1, **options)[0]

    def total(ws, v, start):
        counts = jnp.array([1, 3])
        batch = jax.vmap(jax.vmap(run, (0, None, None)), (None, None, 0))
        return jnp.sum(batch(ws, v, counts)) + jnp.sum(jax.vmap(fill, (None, 0))(start, counts - 1))

    args = jnp.array([2.0, 3.0]), jnp.array(1.0), np.ones(4, np.float32)
    found = jax.jit(jax.grad(total, (0, 1, 2)))(*args)
    # The derivatives of w + v, and of ((w + v) w + v) w + v, at v = 1.
    expected = [1 + 12 + 4 + 1, 1 + 27 + 6 + 1], 1 + 7 + 1 + 13, [1, 1, 2, 2]
    assert_close(found, tuple(map(np.array, expected)), rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "checkpoints", "order"), [("checkpointed", None, 2), ("bounded", None, 1)]
)
def test_buffer_that_the_body_reads_has_second_derivatives(kind, checkpoints, order):
    def run(x):
        def step(index, buffer, y):
            buffer = buffer.at[index].set(y * x)
            return buffer, buffer[index] * buffer[0]

        options = {"kind": kind, "checkpoints": checkpoints, "max_steps": 4}
        return repeated(3, step, jnp.zeros(4), x, buffers=1, **options)[1]

    # The steps give x^4, x^7 and x^10.
    found, expected = run, 0.7**10
    for power in range(10, 10 - order, -1):
        found, expected = jax.grad(found), expected * power / 0.7
    np.testing.assert_allclose(jax.jit(found)(0.7), expected, rtol=1e-4)


@ways_and(jax.grad, jax.jacfwd)
def test_loop_may_be_in_a_batch_of_other_arrays(kind, checkpoints, mode):
    def run(w):
        step = lambda index, x, buffer: (jnp.sin(w * x), buffer.at[index].set(x))
        start = 0.5, jnp.zeros(4)
        return repeated(3, step, *start, buffers=2, kind=kind, checkpoints=checkpoints)[0]

    x, alone = 0.5, 0.0
    for _ in range(3):
        x, alone = np.sin(0.7 * x), np.cos(0.7 * x) * (x + 0.7 * alone)
    batch = jax.jit(jax.vmap(lambda x: x * mode(run)(0.7)))(np.ones(2, np.float32))
    np.testing.assert_allclose(batch, [alone, alone], rtol=1e-5)


def test_collectives_of_a_named_batch_work_in_a_loop():
    def run(weight, x):
        return repeated(3, lambda _, y: [jnp.sin(weight * jax.lax.pmean(y, "batch"))], x)[0]

    def total(weight):
        xs = jnp.array([0.5, 1.0])
        return jnp.sum(jax.vmap(run, (None, 0), axis_name="batch")(weight, xs))

    def expected(weight):
        return 2 * jnp.sin(weight * jnp.sin(weight * jnp.sin(weight * 0.75)))

    both = jax.jit(lambda weight: [jax.value_and_grad(f)(weight) for f in (total, expected)])
    assert_close(*both(jnp.array(0.8)))
