"""Every kind of loop equals a Python loop, in every mode of differentiation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxlike import loops
from tests.nn.arrays import assert_close

MOST = 13
COUNTS = [0, 1, 2, 5, MOST - 1, MOST, MOST + 3]
generator = np.random.default_rng(0)
WEIGHTS = generator.normal(size=MOST).astype("f")
# Examples (p, x, us, count), one for each count.
EXAMPLES = (
    generator.uniform(0.2, 1.5, len(COUNTS)).astype("f"),
    generator.uniform(0.2, 1.5, len(COUNTS)).astype("f"),
    generator.normal(size=(len(COUNTS), MOST)).astype("f"),
    np.array(COUNTS, np.int32),
)


def step(p, x, u):
    return jnp.sin(p * x) + u


def in_python(p, x, us, count):
    """The final value and all earlier values of a loop of at most `MOST` steps.

    A `jax.lax.scan` replaces the Python loop, because it compiles once instead of `MOST` times.
    """

    def body(x, each):
        index, u = each
        is_on = index < count
        return jnp.where(is_on, step(p, x, u), x), jnp.where(is_on, x, 0.0)

    return jax.lax.scan(body, x, (jnp.arange(MOST), us))


def with_while(kind, checkpoints, max_steps=MOST):
    options = {"max_steps": max_steps, "kind": kind, "checkpoints": checkpoints}

    def run(p, x, us, count):
        def body(carry):
            index, x, before = carry
            return index + 1, step(p, x, us[index]), before.at[index].set(x)

        is_on = lambda carry: carry[0] < jnp.minimum(count, MOST)
        start, buffers = (jnp.array(0), x, jnp.zeros(MOST)), lambda carry: carry[2]
        return loops.while_loop(is_on, body, start, buffers=buffers, **options)[1:]

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
    """Reduces the results of a loop to one number."""

    def of_run(p, x, us, count):
        x, before = run(p, x, us, count)
        return x**2 + jnp.sum(WEIGHTS * before**2)

    return of_run


def along(gradient):
    def of_gradient(*args):
        of_p, of_x = gradient(*args)
        return of_p + 2 * of_x

    return of_gradient


MODES = {
    "value": lambda f: f,
    "grad": lambda f: jax.grad(f, (0, 1, 2)),
    "jvp": lambda f: (
        lambda p, x, us, n: jax.jvp(
            lambda p, x, us: f(p, x, us, n), (p, x, us), (jnp.ones(()), 2 * jnp.ones(()), us)
        )[1]
    ),
    "hessian": lambda f: jax.hessian(f, (0, 1)),
    "reverse-over-reverse": lambda f: jax.grad(along(jax.grad(f, (0, 1))), (0, 1)),
    "reverse-over-forward": lambda f: jax.grad(jax.jacfwd(f)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
}
LOOPS = {
    "while": with_while,
    "while-without-limit": functools.partial(with_while, max_steps=None),
    "scan": with_scan,
}
# Loops without a limit need `checkpoints`. `test_nested` tests batches.
CASES = [
    ("while", "checkpointed", None, ["value", "hessian"]),
    ("while", "bounded", None, ["reverse-over-forward"]),
    ("while-without-limit", "checkpointed", 3, ["checkpoint"]),
    ("scan", "checkpointed", 3, ["jvp", "reverse-over-reverse"]),
    ("scan", "bounded", None, ["grad", "reverse-over-reverse"]),
]


@functools.cache
def expected():
    """The results of each mode for a Python loop, by example. All tests share one program."""
    function = number(in_python)
    derived = [MODES[mode](function) for mode in ("value", "grad", "hessian")]
    value, grad, hessian = jax.jit(jax.vmap(lambda *args: [each(*args) for each in derived]))(
        *EXAMPLES
    )
    (pp, px), (xp, xx) = hessian
    return {
        "value": value,
        "grad": grad,
        "jvp": grad[0] + 2 * grad[1] + np.sum(grad[2] * EXAMPLES[2], axis=1),
        "hessian": hessian,
        "reverse-over-reverse": (pp + 2 * px, xp + 2 * xx),
        "reverse-over-forward": pp,
        "checkpoint": grad[0],
    }


@pytest.mark.parametrize(("loop", "kind", "checkpoints", "modes"), CASES)
def test_loop_equals_a_loop_of_python(loop, kind, checkpoints, modes):
    function = number(LOOPS[loop](kind, checkpoints))
    run = jax.jit(lambda *args: {mode: MODES[mode](function)(*args) for mode in modes})
    rows = [run(*(each[row] for each in EXAMPLES)) for row in range(len(COUNTS))]
    found = jax.tree.map(lambda *each: np.stack(each), *rows)
    assert_close(found, {mode: expected()[mode] for mode in modes}, rtol=2e-3, atol=2e-4)


@functools.cache
def fewest_runs(steps, carries):
    """The smallest number of steps that reverse mode must run again, by dynamic programming.

    At most `carries` carries are saved at the same time, including the first.
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
def test_schedule_runs_the_fewest_steps(checkpoints):
    runs = []

    def step(carry):
        jax.debug.callback(lambda: runs.append(1))
        return carry[0] + 1, jnp.sin(carry[1])

    @jax.jit
    @jax.grad
    def gradient(x, steps):
        is_on = lambda carry: carry[0] < steps
        options = {"kind": "checkpointed", "checkpoints": checkpoints}
        return loops.while_loop(is_on, step, (0, x), **options)[1]

    for steps in (1, 2, 7, 23):
        runs.clear()
        jax.block_until_ready(gradient(1.0, steps))
        jax.effects_barrier()
        # The forward pass and the derivative of each step also run the step once.
        assert len(runs) == steps + fewest_runs(steps, checkpoints) + steps


def test_length_of_a_scan_may_be_zero_and_a_limit_ends_a_loop():
    def run(kind):
        double = functools.partial(loops.while_loop, lambda x: x < 100, lambda x: 2 * x, 1.0)
        scanned = loops.scan(lambda c, x: (c + x, c), 1.0, jnp.zeros(0), kind=kind)
        return *scanned, *(double(max_steps=max_steps, kind=kind) for max_steps in (3, 0))

    kinds = "lax", "checkpointed", "bounded"
    for carry, ys, *ends in jax.jit(lambda: [run(kind) for kind in kinds])():
        assert (carry, ys.shape, ends) == (1.0, (0,), [8.0, 1.0])


def test_reversed_and_unrolled_scans_equal_jax():
    """Compares values, gradients and second derivatives, for each setting of `checkpoints`."""
    xs = jnp.asarray(generator.normal(size=13).astype("f"))
    ways = [("lax", None), ("bounded", None), ("checkpointed", None), ("checkpointed", 3)]
    options = [(True, False), (True, 5), (False, 4), (False, True)]

    def body(weight, carry, x):
        new = jnp.sin(weight * carry) + x
        return new, new * x

    def results(scan, weight, xs):
        def loss(weight, xs):
            carry, ys = scan(lambda *args: body(weight, *args), 0.5, xs)
            return carry**2 + jnp.sum(WEIGHTS * ys), ys

        def of_weight(weight):
            return jax.grad(loss, has_aux=True)(weight, xs)[0]

        return jax.grad(loss, (0, 1), has_aux=True)(weight, xs), jax.grad(of_weight)(weight)

    @jax.jit
    def program(weight, xs):
        pairs = []
        for reverse, unroll in options:
            keywords = {"reverse": reverse, "unroll": unroll}
            ours = [
                functools.partial(loops.scan, kind=kind, checkpoints=checkpoints, **keywords)
                for kind, checkpoints in ways
            ]
            expected = results(functools.partial(jax.lax.scan, **keywords), weight, xs)
            pairs += [(results(scan, weight, xs), expected) for scan in ours]
        return pairs

    for found, expected in program(0.7, xs):
        assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_unroll_shortens_loops_in_reverse_mode_too():
    def turns(**options):
        def loss(x):
            return loops.scan(lambda c, x: (jnp.sin(c) * x, None), 1.0, x, **options)[0]

        text = str(jax.make_jaxpr(jax.grad(loss))(jnp.ones(12)))
        return text.count("unroll=4"), text.count("unroll=1\n")

    # Counts the scan and the scan of its derivative.
    assert turns(unroll=4) == (2, 0)
    assert turns(unroll=4, kind="bounded") == (2, 0)
    # The scan over segments is not unrolled.
    assert turns(unroll=4, kind="checkpointed")[0] > 0
    for unroll in (0, -1, 2.0, "2"):
        says = f"unroll must be an integer of at least 1, got {unroll!r}"
        with pytest.raises(ValueError, match=says):
            loops.scan(lambda c, x: (c, x), 0.0, jnp.ones(3), unroll=unroll)


def test_condition_may_close_over_differentiated_arrays():
    def run(limit):
        return loops.while_loop(
            lambda x: x < limit, lambda x: limit * x, 1.5, max_steps=9, kind="checkpointed"
        )

    # 1.5 * 4 = 6, in one step.
    assert jax.jit(lambda limit: (run(limit), jax.grad(run)(limit)))(4.0) == (6.0, 1.5)


def test_ended_members_of_a_batch_leave_no_nan():
    def run(weight, x):
        # At the end x is 0, and the derivative of its root is infinite.
        step, options = lambda x: weight * jnp.sqrt(x) - 1, {"max_steps": 8, "checkpoints": 3}
        return loops.while_loop(lambda x: x > 0, step, x, kind="checkpointed", **options)

    xs, weight = jnp.array([1.0, 4.0, 25.0]), jnp.array(1.0)
    total = lambda w, xs: jnp.sum(jax.vmap(run, (None, 0))(w, xs))
    of_weight, of_xs = jax.jit(jax.grad(total, (0, 1)))(weight, xs)
    # The derivatives of w - 1, w sqrt(2 w - 1) - 1 and w sqrt(w sqrt(5 w - 1) - 1) - 1, at w = 1.
    np.testing.assert_allclose(of_weight, 1 + 2 + 21 / 8, rtol=1e-6)
    np.testing.assert_allclose(of_xs, [0.5, 0.125, 0.0125], rtol=1e-6)


@pytest.mark.parametrize("kind", ["checkpointed", "bounded"])
def test_compiled_batch_has_the_second_derivatives_of_its_members(kind):
    # The batch is as large as the number of segments or steps, so swapped axes have equal shapes.
    weights = jnp.linspace(0.5, 1.0, {"checkpointed": 2, "bounded": 4}[kind])

    def last(weight, kind):
        def body(carry, u):
            new = jnp.tanh(weight * carry + u)
            return new, new * u

        carry, ys = loops.scan(body, jnp.zeros(()), jnp.ones(4), kind=kind)
        return carry + (ys**2).sum()

    @jax.jit
    def second(weights):
        gradients = jax.jit(jax.vmap(jax.grad(lambda weight: last(weight, kind))))
        reverse = jax.grad(lambda weights: gradients(weights).sum())(weights)
        forward = jax.jvp(gradients, (weights,), (jnp.ones_like(weights),))[1]
        return reverse, forward, jax.vmap(jax.grad(jax.grad(lambda w: last(w, "lax"))))(weights)

    *found, expected = second(weights)
    for each in found:
        np.testing.assert_allclose(each, expected, rtol=1e-5)
