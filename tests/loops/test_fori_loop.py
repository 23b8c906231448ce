"""`fori_loop` equals `jax.lax.fori_loop`, and its reverse mode equals JAX's forward mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxlike import loops
from tests.nn.arrays import assert_close

KINDS = [("lax", None), ("checkpointed", None), ("checkpointed", 2), ("bounded", None)]
BACKWARDS = KINDS[1:]
BOUNDS = [(0, 5), (-3, 4), (2, 3), (4, 4), (5, -5), (-7, -2)]
WEIGHTS = jnp.asarray(np.random.default_rng(0).normal(size=(2, 2)), jnp.float32)


def body(parameter, index, carry):
    """A step that depends on the index."""
    x, total = carry
    x = jnp.sin(parameter * (WEIGHTS @ x)) + 0.1 * jnp.asarray(index, jnp.float32)
    return x, total + index


def looped(loop, **options):
    """The final carry of a loop as a function of the bounds and a parameter."""

    def run(lower, upper, parameter):
        start = jnp.array([0.3, -0.8]), jnp.array(0)
        return loop(lower, upper, lambda i, c: body(parameter, i, c), start, **options)

    return run


assert_close = functools.partial(assert_close, rtol=1e-4, atol=1e-5)


def pushed(run, *bounds):
    (x, total), (dot, _) = jax.jvp(lambda parameter: run(*bounds, parameter), (0.9,), (1.0,))
    return x, total, dot


@functools.cache
def of_jax():
    """The values and tangents of JAX's loop for all bounds."""
    run = jax.jit(jax.vmap(functools.partial(pushed, looped(jax.lax.fori_loop))))
    return list(map(np.asarray, run(*np.array(BOUNDS, np.int32).T)))


@pytest.mark.parametrize(
    ("kind", "checkpoints", "is_known"),
    [(*KINDS[0], False), (*KINDS[1], True), (*KINDS[2], False), (*KINDS[3], True)],
)
def test_value_and_forward_mode_equal_jax(kind, checkpoints, is_known):
    run = looped(loops.fori_loop, max_steps=10, kind=kind, checkpoints=checkpoints)
    places = [1, 4] if is_known else range(len(BOUNDS))
    if is_known:
        found = jax.jit(lambda: [pushed(run, *BOUNDS[place]) for place in places])()
    else:
        compiled = jax.jit(functools.partial(pushed, run))
        found = [compiled(*BOUNDS[place]) for place in places]
    for place, each in zip(places, found, strict=True):
        assert_close(list(each), [rows[place] for rows in of_jax()])


def derived(run):
    return lambda lower, upper: jax.grad(lambda p: jnp.sum(run(lower, upper, p)[0] ** 2))(0.9)


def test_derivatives_of_members_of_a_batch_equal_jax():
    @jax.jit
    def run(lower, upper):
        found = {}
        for kind, checkpoints in BACKWARDS[1:]:
            options = {"max_steps": 8, "kind": kind, "checkpoints": checkpoints}
            of_bounds = derived(looped(loops.fori_loop, **options))
            found[kind] = jax.vmap(of_bounds)(lower, upper), of_bounds(*BOUNDS[1])
        return found

    x, _, dot = of_jax()
    expected = np.sum(2 * x * dot, axis=1)
    for in_a_batch, alone in run(*np.array(BOUNDS, np.int32).T).values():
        assert_close(in_a_batch, expected)
        assert_close(alone, expected[1])


def test_limit_ends_the_loop():
    def run(lower, upper):
        add = lambda i, x: x + i
        return [
            loops.fori_loop(lower, upper, add, 0, max_steps=3, kind=kind, checkpoints=checkpoints)
            for kind, checkpoints in BACKWARDS
        ]

    assert run(2, 9) == jax.jit(run)(2, 9) == [2 + 3 + 4] * 3


@pytest.mark.parametrize(("kind", "is_known"), [("checkpointed", False), ("bounded", True)])
def test_buffers_are_chosen_from_the_carry_without_the_index(kind, is_known):
    def run(upper, factor):
        def write(index, carry):
            x, (rows,) = carry
            x = jnp.sin(factor * x)
            return x, (rows.at[index].set(x),)

        start = jnp.ones(()), (jnp.zeros(4),)
        options = {"max_steps": 4, "buffers": lambda carry: carry[1][0], "kind": kind}
        _, (rows,) = loops.fori_loop(0, upper, write, start, **options)
        return jnp.sum(rows**2)

    found = jax.value_and_grad(run, 1)
    found = jax.jit(lambda x: found(2, x))(1.5) if is_known else jax.jit(found)(2, 1.5)
    first, second = np.sin(1.5), np.sin(1.5 * np.sin(1.5))
    slopes = np.cos(1.5), np.cos(1.5 * first) * (first + 1.5 * np.cos(1.5))
    assert_close(found, (first**2 + second**2, 2 * first * slopes[0] + 2 * second * slopes[1]))


def test_known_bounds_are_a_scan_and_need_no_limit():
    def run(x):
        return loops.fori_loop(0, 9, lambda i, x: jnp.sin(x), x, kind="checkpointed")

    text = str(jax.make_jaxpr(jax.grad(run))(1.0))
    assert "scan[" in text
    assert "while[" not in text


def dtypes_seen(loop, lower, upper):
    seen = []

    def body(index, x):
        seen.append((index.dtype, jax.typeof(index).weak_type))
        return x

    def run(lower, upper):
        return loop(lower, upper, body, 0.0)

    run(3, 5) if lower is None else jax.eval_shape(run, lower, upper)
    return seen[0]


def test_index_has_the_same_dtype_as_in_jax():
    of_numpy = [(np.int8(-9), np.int8(3)), (0, np.int16(3)), (np.uint8(1), np.uint8(4))]
    for bounds in [(None, None), (0, 3), *of_numpy]:
        assert dtypes_seen(loops.fori_loop, *bounds) == dtypes_seen(jax.lax.fori_loop, *bounds)


WRONG = [
    ((0.0, 3), "an integer of shape .. for `lower`, got a leaf of type float"),
    ((0, jnp.array([3])), "for `upper`, got an array of shape"),
    ((True, 3), "for `lower`, got"),
    (("a", 3), "for `lower`, got"),
    ((np.int8(0), np.int16(3)), "`lower` and `upper` of the same dtype, got int8 and int16"),
]


def test_bounds_must_be_integers_of_one_dtype_and_the_carry_stays_the_same():
    for bounds, message in WRONG:
        with pytest.raises(TypeError, match=f"fori_loop expected .*{message}"):
            loops.fori_loop(*bounds, lambda i, x: x, 0.0)

    def run(upper):
        change = lambda i, c: {"x": c["x"][None]}
        return loops.fori_loop(0, upper, change, {"x": jnp.ones(2)}, kind="lax")

    message = r"body_fun must return a carry .*: the carry\['x'\] is an array of shape \(2,\)"
    for each in (run, jax.jit(run)):
        with pytest.raises(ValueError, match=message):
            each(3)


def test_reverse_mode_with_unknown_bounds_needs_a_limit_or_checkpoints():
    def run(n, x=1.0, **options):
        return loops.fori_loop(0, n, lambda i, y: x * y, 1.0, **options)

    with pytest.raises(ValueError, match=r"fori_loop\(kind='bounded'\) needs `max_steps`, the la"):
        jax.jit(lambda n: run(n, kind="bounded"))(3)
    with pytest.raises(ValueError, match=r"fori_loop\(kind='checkpointed'\).* or `checkpoints`"):
        jax.jit(lambda n: run(n, kind="checkpointed"))(3)
    with_checkpoints = jax.grad(lambda x, n: run(n, x, kind="checkpointed", checkpoints=2))
    assert jax.jit(with_checkpoints)(2.0, 5) == 5 * 2.0**4
