"""Every kind of loop comes to what a loop of Python comes to, in every mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxlike import loops

MOST = 13
COUNTS = [0, 1, 2, 5, MOST - 1, MOST, MOST + 3]
generator = np.random.default_rng(0)
WEIGHTS = generator.normal(size=MOST).astype("f")
# One example for each count: p, x, us and the count.
EXAMPLES = (
    generator.uniform(0.2, 1.5, len(COUNTS)).astype("f"),
    generator.uniform(0.2, 1.5, len(COUNTS)).astype("f"),
    generator.normal(size=(len(COUNTS), MOST)).astype("f"),
    np.array(COUNTS, np.int32),
)


def step(p, x, u):
    return jnp.sin(p * x) + u


def in_python(p, x, us, count):
    """The last value and those before, for loops of any length up to `MOST`.

    JAX's own scan in the place of Python's loop, which it compiles once and not `MOST` times.
    """

    def body(x, each):
        index, u = each
        is_on = index < count
        return jnp.where(is_on, step(p, x, u), x), jnp.where(is_on, x, 0.0)

    return jax.lax.scan(body, x, (jnp.arange(MOST), us))


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
            new = jnp.where(index < count, step(p, x, row[0]), x)
            return (index + 1, new), jnp.where(index < count, x, 0.0)

        carry = jnp.array(0), x
        (_, x), before = loops.scan(body, carry, us[:, None], kind=kind, checkpoints=checkpoints)
        return x, before

    return run


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
}
LOOPS = {
    "while": with_while,
    "while-without-limit": functools.partial(with_while, max_steps=None),
    "scan": with_scan,
}
# Without a limit, loops need to be told how many carries to save. Batches: see `test_nested`.
CASES = [
    ("while", "checkpointed", None, ["value", "hessian"]),
    ("while", "bounded", None, ["reverse-over-forward"]),
    ("while-without-limit", "checkpointed", 3, ["checkpoint"]),
    ("scan", "checkpointed", 3, ["jvp", "reverse-over-reverse"]),
    ("scan", "bounded", None, ["grad", "reverse-over-reverse"]),
]


@pytest.mark.parametrize(("loop", "kind", "checkpoints", "modes"), CASES)
def test_is_a_loop_of_python(loop, kind, checkpoints, modes):
    functions = number(LOOPS[loop](kind, checkpoints)), number(in_python)
    run = jax.jit(lambda *args: [[MODES[mode](f)(*args) for mode in modes] for f in functions])
    for row in range(len(COUNTS)):
        jax.tree.map(
            lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-4),
            *run(*(each[row] for each in EXAMPLES)),
        )


@functools.cache
def fewest_runs(steps, carries):
    """The fewest steps to run so that `steps` are reversed from a saved carry, by trying all.

    `carries` may be saved at one time, the one at the start among them.
    """
    if steps <= 1:
        return 0
    if carries == 1:
        return steps * (steps - 1) // 2
    return min(
        first + fewest_runs(first, carries) + fewest_runs(steps - first, carries - 1)
        for first in range(1, steps)
    )


@pytest.mark.parametrize("checkpoints", [1, 5])
def test_no_schedule_runs_fewer_steps(checkpoints):
    runs = []

    def step(carry):
        jax.debug.callback(lambda: runs.append(1))
        return carry[0] + 1, jnp.sin(carry[1])

    @jax.jit
    @jax.grad
    def gradient(x, steps):
        is_on = lambda carry: carry[0] < steps
        return loops.while_loop(is_on, step, (0, x), kind="checkpointed", checkpoints=checkpoints)[
            1
        ]

    for steps in (1, 2, 7, 23):
        runs.clear()
        jax.block_until_ready(gradient(1.0, steps))
        jax.effects_barrier()
        # Once to see how many steps there are, and once more each where its derivative is taken.
        assert len(runs) == steps + fewest_runs(steps, checkpoints) + steps


def test_length_of_a_scan_may_be_zero_and_a_limit_ends_a_loop():
    for kind in ("lax", "checkpointed", "bounded"):
        carry, ys = loops.scan(lambda c, x: (c + x, c), 1.0, jnp.zeros(0), kind=kind)
        assert (float(carry), ys.shape) == (1.0, (0,))
        for max_steps, expected in [(3, 8.0), (0, 1.0)]:
            x = loops.while_loop(
                lambda x: x < 100, lambda x: 2 * x, 1.0, max_steps=max_steps, kind=kind
            )
            assert float(x) == expected


def test_condition_may_close_over_what_is_differentiated():
    def run(limit):
        return loops.while_loop(
            lambda x: x < limit, lambda x: limit * x, 1.5, max_steps=9, kind="checkpointed"
        )

    # 1.5 * 4 = 6, in one step.
    assert (float(run(4.0)), float(jax.grad(run)(4.0))) == (6.0, 1.5)


@pytest.mark.parametrize("checkpoints", [3])
def test_members_of_a_batch_that_have_ended_leave_no_nan(checkpoints):
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
    total = lambda w, xs: jnp.sum(jax.vmap(run, (None, 0))(w, xs))
    of_weight, of_xs = jax.jit(jax.grad(total, (0, 1)))(weight, xs)
    of_one = jax.jit(jax.grad(run))
    np.testing.assert_allclose(of_weight, sum(of_one(weight, x) for x in xs), rtol=1e-6)
    np.testing.assert_allclose(of_xs, [0.5, 0.125, 0.0125], rtol=1e-6)


@pytest.mark.parametrize("kind", ["checkpointed", "bounded"])
def test_a_compiled_batch_has_the_second_derivatives_of_its_members(kind):
    # As many members as segments, or as steps: arrays of a batch fit also where axes are swapped.
    weights = jnp.linspace(0.5, 1.0, {"checkpointed": 2, "bounded": 4}[kind])

    def last(weight, kind):
        def body(carry, u):
            new = jnp.tanh(weight * carry + u)
            return new, new * u

        carry, ys = loops.scan(body, jnp.zeros(()), jnp.ones(4), kind=kind)
        return carry + (ys**2).sum()

    def second(kind):
        gradients = jax.jit(jax.vmap(jax.grad(lambda weight: last(weight, kind))))
        reverse = jax.grad(lambda weights: gradients(weights).sum())(weights)
        return reverse, jax.jvp(gradients, (weights,), (jnp.ones_like(weights),))[1]

    for found in second(kind):
        np.testing.assert_allclose(found, second("lax")[0], rtol=1e-5)
