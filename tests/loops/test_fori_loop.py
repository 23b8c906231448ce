"""A loop over integers comes to what JAX's comes to, and backwards to what one of Python does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxlike import loops

KINDS = [("lax", None), ("checkpointed", None), ("checkpointed", 2), ("bounded", None)]
BACKWARDS = KINDS[1:]
BOUNDS = [(0, 5), (-3, 4), (2, 3), (4, 4), (5, -5), (-7, -2)]
WEIGHTS = jnp.asarray(np.random.default_rng(0).normal(size=(2, 2)), jnp.float32)


def body(parameter, index, carry):
    """A step that depends on its number."""
    x, total = carry
    x = jnp.sin(parameter * (WEIGHTS @ x)) + 0.1 * jnp.asarray(index, jnp.float32)
    return x, total + index


def start():
    return jnp.array([0.3, -0.8]), jnp.array(0)


def looped(loop, **options):
    """The last carry of a loop over integers, as a function of the bounds and of a parameter."""

    def run(lower, upper, parameter):
        return loop(lower, upper, lambda i, c: body(parameter, i, c), start(), **options)

    return run


def in_python(lower, upper, body_fun, carry):
    for index in range(lower, upper):
        carry = body_fun(index, carry)
    return carry


def assert_close(found, expected):
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5),
        found,
        expected,
    )


def pushed(run, *bounds):
    return jax.jvp(lambda parameter: run(*bounds, parameter), (0.9,), (1.0,))


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(("kind", "checkpoints"), KINDS)
def test_value_and_forward_mode_are_those_of_jax(kind, checkpoints, is_known):
    def both(loop, **options):
        run = looped(loop, **options)
        if is_known:
            return jax.jit(lambda: [pushed(run, *bounds) for bounds in BOUNDS])()
        compiled = jax.jit(functools.partial(pushed, run))
        return [compiled(*bounds) for bounds in BOUNDS]

    found = both(loops.fori_loop, max_steps=10, kind=kind, checkpoints=checkpoints)
    for one, other in zip(found, both(jax.lax.fori_loop), strict=True):
        assert_close((one[0], one[1][0]), (other[0], other[1][0]))


DERIVATIVES = {"grad": jax.grad, "hessian": jax.hessian}


def derived(run, derivative):
    def of_bounds(lower, upper):
        return DERIVATIVES[derivative](lambda p: jnp.sum(run(lower, upper, p)[0] ** 2))(0.9)

    return of_bounds


def derived_with_known(run, derivative, bounds):
    return jax.jit(lambda: derived(run, derivative)(*bounds))()


@functools.cache
def derived_in_python(derivative, bounds):
    return derived_with_known(looped(in_python), derivative, bounds)


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(("kind", "checkpoints"), BACKWARDS)
def test_derivatives_are_those_of_a_loop_of_python(kind, checkpoints, is_known, derivative):
    run = looped(loops.fori_loop, max_steps=8, kind=kind, checkpoints=checkpoints)
    compiled = jax.jit(derived(run, derivative))
    for bounds in [(-3, 4), (5, -5)]:
        found = derived_with_known(run, derivative, bounds) if is_known else compiled(*bounds)
        assert_close(found, derived_in_python(derivative, bounds))


@pytest.mark.parametrize(("kind", "checkpoints"), BACKWARDS)
def test_members_of_a_batch_have_bounds_of_their_own(kind, checkpoints):
    run = looped(loops.fori_loop, max_steps=8, kind=kind, checkpoints=checkpoints)

    found = jax.jit(jax.vmap(derived(run, "grad")))(*np.array(BOUNDS).T)
    expected = [derived_in_python("grad", bounds) for bounds in BOUNDS]
    assert_close(found, np.stack(expected))


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(("kind", "checkpoints"), BACKWARDS)
def test_limit_ends_the_loop(kind, checkpoints, is_known):
    def run(lower, upper):
        return loops.fori_loop(
            lower, upper, lambda i, x: x + i, 0, max_steps=3, kind=kind, checkpoints=checkpoints
        )

    assert (run if is_known else jax.jit(run))(2, 9) == 2 + 3 + 4


@pytest.mark.parametrize("kind", ["checkpointed", "bounded"])
@pytest.mark.parametrize("is_known", [True, False])
def test_buffers_are_chosen_from_the_carry_alone(kind, is_known):
    def run(upper, factor):
        def write(index, carry):
            x, (rows,) = carry
            x = jnp.sin(factor * x)
            return x, (rows.at[index].set(x),)

        _, (rows,) = loops.fori_loop(
            0,
            upper,
            write,
            (jnp.ones(()), (jnp.zeros(4),)),
            max_steps=4,
            buffers=lambda carry: carry[1][0],
            kind=kind,
        )
        return jnp.sum(rows**2)

    def expected(factor):
        first = jnp.sin(factor)
        return first**2 + jnp.sin(factor * first) ** 2

    found = jax.value_and_grad(run, 1)
    found = found(2, 1.5) if is_known else jax.jit(found)(2, 1.5)
    assert_close(found, jax.value_and_grad(expected)(1.5))


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

    run(3, 5) if lower is None else jax.jit(run)(lower, upper)
    return seen[0]


@pytest.mark.parametrize(
    ("lower", "upper"),
    [(None, None), (0, 3), (np.int8(-9), np.int8(3)), (0, np.int16(3)), (np.uint8(1), np.uint8(4))],
)
def test_index_has_the_dtype_that_it_has_in_jax(lower, upper):
    assert dtypes_seen(loops.fori_loop, lower, upper) == dtypes_seen(
        jax.lax.fori_loop, lower, upper
    )


def test_bounds_may_lie_further_apart_than_their_dtype_reaches():
    def run(lower, upper):
        return loops.fori_loop(lower, upper, lambda i, x: x + 1, 0, max_steps=500, kind="bounded")

    assert jax.jit(run)(np.int8(-100), np.int8(100)) == 200


WRONG = [
    ((0.0, 3), "an integer of shape .. for `lower`, got a leaf of type float"),
    ((0, jnp.array([3])), "for `upper`, got an array of shape"),
    ((True, 3), "for `lower`, got"),
    (("a", 3), "for `lower`, got"),
    ((np.int8(0), np.int16(3)), "bounds of one dtype, got `lower` of int8 and `upper` of int16"),
]


@pytest.mark.parametrize(("bounds", "message"), WRONG)
def test_bounds_that_are_no_integers_of_one_dtype_are_an_error(bounds, message):
    lower, upper = bounds
    with pytest.raises(TypeError, match=f"fori_loop expected .*{message}"):
        loops.fori_loop(lower, upper, lambda i, x: x, 0.0)


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(("kind", "checkpoints"), KINDS)
def test_changed_carry_is_an_error_with_its_path(kind, checkpoints, is_known):
    def run(upper):
        return loops.fori_loop(
            0,
            upper,
            lambda i, c: {"x": c["x"][None]},
            {"x": jnp.ones(2)},
            max_steps=3,
            kind=kind,
            checkpoints=checkpoints,
        )

    message = r"body_fun must return a carry .*: the carry\['x'\] is an array of shape \(2,\)"
    with pytest.raises(ValueError, match=message):
        (run if is_known else jax.jit(run))(3)


def test_unknown_bounds_backwards_need_a_limit():
    with pytest.raises(ValueError, match=r"fori_loop\(kind='bounded'\) needs `max_steps`, the nu"):
        jax.jit(lambda n: loops.fori_loop(0, n, lambda i, x: x, 0.0, kind="bounded"))(3)
    with pytest.raises(ValueError, match=r"fori_loop\(kind='checkpointed'\).* or `checkpoints`"):
        jax.jit(lambda n: loops.fori_loop(0, n, lambda i, x: x, 0.0, kind="checkpointed"))(3)


def test_checkpoints_serve_where_there_is_no_limit():
    def run(x, n):
        return loops.fori_loop(0, n, lambda i, y: x * y, 1.0, kind="checkpointed", checkpoints=2)

    assert jax.jit(jax.grad(run))(2.0, 5) == 5 * 2.0**4
