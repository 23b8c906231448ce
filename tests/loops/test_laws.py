"""Every kind of loop comes to what a loop of Python comes to, in every mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eqxlike import loops

MOST = 13
KINDS = [
    ("checkpointed", None),
    ("checkpointed", 1),
    ("checkpointed", 3),
    ("bounded", None),
]


def step(p, x, u):
    return jnp.sin(p * x) + u


def in_python(p, x, us, count):
    """The last value and those before, for loops of any length up to `MOST`."""
    before = []
    for index in range(MOST):
        is_on = index < count
        before.append(jnp.where(is_on, x, 0.0))
        x = jnp.where(is_on, step(p, x, us[index]), x)
    return x, jnp.stack(before)


def with_while(kind, checkpoints, max_steps=MOST):
    def run(p, x, us, count):
        def body(carry):
            index, x, before = carry
            return index + 1, step(p, x, us[index]), before.at[index].set(x)

        _, x, before = loops.while_loop(
            lambda carry: carry[0] < jnp.minimum(count, MOST),
            body,
            (jnp.array(0), x, jnp.zeros(MOST)),
            max_steps=max_steps,
            buffers=lambda carry: carry[2],
            kind=kind,
            checkpoints=checkpoints,
        )
        return x, before

    return run


def with_scan(kind, checkpoints):
    def run(p, x, us, count):
        def body(carry, row):
            index, x = carry
            u = row[0]
            new = jnp.where(index < count, step(p, x, u), x)
            return (index + 1, new), jnp.where(index < count, x, 0.0)

        carry = jnp.array(0), x
        (_, x), before = loops.scan(body, carry, us[:, None], kind=kind, checkpoints=checkpoints)
        return x, before

    return run


WEIGHTS = jnp.asarray(np.random.default_rng(0).normal(size=MOST), jnp.float32)


def number(run):
    """One number of all that a loop returns."""

    def of_run(p, x, us, count):
        x, before = run(p, x, us, count)
        return x**2 + jnp.sum(WEIGHTS * before**2)

    return of_run


MODES = {
    "value": lambda f: f,
    "grad": lambda f: jax.grad(f, (0, 1, 2)),
    "jvp": lambda f: (
        lambda p, x, us, n: jax.jvp(
            lambda p, x, us: f(p, x, us, n), (p, x, us), (jnp.ones(()), 2 * jnp.ones(()), us)
        )
    ),
    "hessian": lambda f: jax.hessian(f, (0, 1)),
    "reverse-over-reverse": lambda f: jax.jacrev(jax.jacrev(f, (0, 1)), (0, 1)),
    "reverse-over-forward": lambda f: jax.jacrev(jax.jacfwd(f)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "vmap-of-grad": lambda f: (
        lambda p, x, us, n: jax.vmap(jax.grad(f, (0, 1)), (None, 0, None, 0))(
            p, x + jnp.arange(3.0), us, jnp.stack([n, n // 2, jnp.array(MOST)])
        )
    ),
    "grad-of-vmap": lambda f: (
        lambda p, x, us, n: jax.grad(
            lambda p, us: jnp.sum(
                jax.vmap(f, (None, 0, None, 0))(
                    p, x + jnp.arange(3.0), us, jnp.stack([n, n // 2, jnp.array(MOST)])
                )
            ),
            (0, 1),
        )(p, us)
    ),
}
EXPECTED = {name: jax.jit(mode(number(in_python))) for name, mode in MODES.items()}
LOOPS = {
    "while": with_while,
    "while-without-limit": functools.partial(with_while, max_steps=None),
    "scan": with_scan,
}
CASES = [
    (loop, kind, checkpoints, mode)
    for loop in LOOPS
    for kind, checkpoints in KINDS
    for mode in MODES
    # Without a limit, loops need to be told how many carries to save.
    if loop != "while-without-limit" or checkpoints == 3
]


@pytest.mark.parametrize(("loop", "kind", "checkpoints", "mode"), CASES)
def test_is_a_loop_of_python(loop, kind, checkpoints, mode):
    run = jax.jit(MODES[mode](number(LOOPS[loop](kind, checkpoints))))

    @settings(max_examples=4)
    @given(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 2, 5, MOST - 1, MOST, MOST + 3]))
    def check(seed, count):
        generator = np.random.default_rng(seed)
        p, x = (jnp.asarray(generator.uniform(0.2, 1.5), jnp.float32) for _ in range(2))
        us = jnp.asarray(generator.normal(size=MOST), jnp.float32)
        args = p, x, us, jnp.array(count)
        expected = EXPECTED[mode](*args)
        jax.tree.map(
            lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-4),
            run(*args),
            expected,
        )

    check()


@pytest.mark.parametrize("kind", ["lax", "checkpointed", "bounded"])
def test_length_of_a_scan_may_be_zero(kind):
    carry, ys = loops.scan(lambda c, x: (c + x, c), 1.0, jnp.zeros(0), kind=kind)
    assert (float(carry), ys.shape) == (1.0, (0,))


@pytest.mark.parametrize("kind", ["lax", "checkpointed", "bounded"])
def test_limit_ends_the_loop_and_the_condition_says_so(kind):
    def goes_on(x):
        return x < 100

    x = loops.while_loop(goes_on, lambda x: 2 * x, 1.0, max_steps=3, kind=kind)
    assert (float(x), bool(goes_on(x))) == (8.0, True)


def test_condition_may_close_over_what_is_differentiated():
    def run(limit):
        return loops.while_loop(
            lambda x: x < limit, lambda x: limit * x, 1.5, max_steps=9, kind="checkpointed"
        )

    # 1.5 * 4 = 6, in one step.
    assert (float(run(4.0)), float(jax.grad(run)(4.0))) == (6.0, 1.5)


def test_forward_mode_of_the_lax_kind_is_that_of_jax():
    def run(loop):
        return jax.jvp(lambda x: loop(lambda x: x < 9, lambda x: x**1.5, x), (2.0,), (1.0,))

    assert run(loops.while_loop) == run(jax.lax.while_loop)


def test_members_of_a_batch_that_have_ended_leave_no_nan():
    def run(x):
        # At the end x is 0, and the derivative of its root is infinite.
        return loops.while_loop(
            lambda x: x > 0, lambda x: jnp.sqrt(x) - 1, x, max_steps=8, kind="checkpointed"
        )

    xs = jnp.array([1.0, 4.0, 25.0])
    found = jax.grad(lambda xs: jnp.sum(jax.vmap(run)(xs)))(xs)
    assert jnp.array_equal(found, jax.vmap(jax.grad(run))(xs))
    np.testing.assert_allclose(found, [0.5, 0.125, 0.0125], rtol=1e-6)


@pytest.mark.parametrize("checkpoints", [None, 3])
def test_weights_that_a_batch_shares_have_no_nan_of_members_that_have_ended(checkpoints):
    def run(weight, x):
        # At the end x is 0, and the derivative of its root is infinite.
        return loops.while_loop(
            lambda x: x > 0,
            lambda x: weight * jnp.sqrt(x) - 1,
            x,
            max_steps=8,
            kind="checkpointed",
            checkpoints=checkpoints,
        )

    xs, weight = jnp.array([1.0, 4.0, 25.0]), jnp.array(1.0)
    found = jax.jit(jax.grad(lambda w: jnp.sum(jax.vmap(run, (None, 0))(w, xs))))(weight)
    of_one = jax.jit(jax.grad(run))
    expected = sum(of_one(weight, x) for x in xs)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


MATRIX = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3)) / 3, jnp.float32)


def total_of_batches(way):
    """A number of a batch of batches of loops that share a matrix and have it in part."""

    def run(matrix, of_outer, x, count):
        def body(carry):
            index, x = carry
            return index + 1, jnp.tanh(matrix @ x + of_outer)

        if way == "python":
            for index in range(6):
                x = jnp.where(index < count, jnp.tanh(matrix @ x + of_outer), x)
            return jnp.sum(x**2)
        kind, checkpoints = way
        _, x = loops.while_loop(
            lambda carry: carry[0] < count,
            body,
            (jnp.array(0), x),
            max_steps=6,
            kind=kind,
            checkpoints=checkpoints,
        )
        return jnp.sum(x**2)

    def total(matrix, of_outer):
        xs = jnp.linspace(-1, 1, 24).reshape(2, 4, 3)
        counts = jnp.array([[0, 1, 5, 6], [0, 0, 2, 0]])
        inner = jax.vmap(run, (None, None, 0, 0))
        return jnp.sum(jax.vmap(inner, (None, 0, 0, 0))(matrix, of_outer, xs, counts))

    return total


MODES_OF_BATCHES = {
    "grad": lambda f: jax.grad(f, (0, 1)),
    "reverse-over-reverse": lambda f: jax.jacrev(jax.grad(f, (0, 1)), (0, 1)),
    "forward-over-reverse": lambda f: jax.jacfwd(jax.grad(f, (0, 1)), (0, 1)),
}


# What a loop of Python comes to is compiled once, for all ways.
@functools.cache
def derived_from_batches(way, mode):
    args = MATRIX, jnp.array([0.1, -0.4])
    return jax.jit(MODES_OF_BATCHES[mode](total_of_batches(way)))(*args)


@pytest.mark.parametrize("mode", MODES_OF_BATCHES)
@pytest.mark.parametrize(
    "way", [("bounded", None), ("checkpointed", None), ("checkpointed", 2)], ids=str
)
def test_batches_of_batches_share_what_they_share(way, mode):
    found, expected = (derived_from_batches(each, mode) for each in (way, "python"))
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4),
        found,
        expected,
    )


def test_collectives_of_a_named_batch_go_through_a_loop():
    def run(weight, x):
        return loops.while_loop(
            lambda carry: carry[0] < 3,
            lambda carry: (carry[0] + 1, jnp.sin(weight * jax.lax.pmean(carry[1], "batch"))),
            (0, x),
            max_steps=4,
            kind="checkpointed",
        )[1]

    def total(weight):
        xs = jnp.array([0.5, 1.0])
        return jnp.sum(jax.vmap(run, (None, 0), axis_name="batch")(weight, xs))

    def expected(weight):
        x = jnp.array(0.75)
        for _ in range(3):
            x = jnp.sin(weight * x)
        return 2 * x

    one, other = (jax.value_and_grad(each)(jnp.array(0.8)) for each in (total, expected))
    np.testing.assert_allclose(one, other, rtol=1e-5)


def total_of_shared(run):
    def total(w):
        return jnp.sum(jax.vmap(jax.jit(run), (None, 0))(w, jnp.array([0.3, 0.6])))

    return total


@functools.cache
def derived_in_python(mode):
    def run(w, x):
        t, y = jnp.array(0.0), x
        for _ in range(7):
            t, y = t + 0.1 * w, jnp.tanh(w * y) + t * x
        return t * y

    return jax.jit(mode(total_of_shared(run)))(0.7)


@pytest.mark.parametrize("mode", [jax.grad, jax.jacfwd, jax.hessian], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "way", [("bounded", None), ("checkpointed", None), ("checkpointed", 2)], ids=str
)
def test_what_a_batch_shares_in_a_carry_stays_shared_in_a_compiled_loop(way, mode):
    def run(w, x):
        kind, checkpoints = way
        _, t, y = loops.while_loop(
            lambda state: state[1] < 0.45,
            lambda state: (
                state[0] + 1,
                state[1] + 0.1 * w,
                jnp.tanh(w * state[2]) + state[1] * x,
            ),
            (jnp.array(0), jnp.array(0.0), x),
            max_steps=16,
            kind=kind,
            checkpoints=checkpoints,
        )
        return t * y

    found = jax.jit(mode(total_of_shared(run)))(0.7)
    np.testing.assert_allclose(found, derived_in_python(mode), rtol=1e-5)
