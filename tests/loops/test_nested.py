"""Batches, buffers and derivatives inside one another, where what is left out could be missed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike
from eqxlike import loops

WAYS = [("checkpointed", None), ("checkpointed", 2), ("bounded", None)]
ways = pytest.mark.parametrize(("kind", "checkpoints"), WAYS)


@ways
def test_a_batch_outside_may_be_of_other_lengths_than_one_inside(kind, checkpoints):
    def run(w, v, count):
        return loops.while_loop(
            lambda carry: carry[0] < count,
            lambda carry: (carry[0] + 1, carry[1] * w + v),
            (0, 1.0),
            max_steps=6,
            kind=kind,
            checkpoints=checkpoints,
        )[1]

    def in_python(ws, v):
        total = 0.0
        for index in range(2):
            for count in (1, 3):
                x = 1.0
                for _ in range(count):
                    x = x * ws[index] + v
                total = total + x
        return total

    def total(ws, v):
        batch = jax.vmap(jax.vmap(run, (0, None, None)), (None, None, 0))
        return jnp.sum(batch(ws, v, jnp.array([1, 3])))

    args = jnp.array([2.0, 3.0]), jnp.array(1.0)
    found, expected = (jax.jit(jax.grad(f, (0, 1)))(*args) for f in (total, in_python))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)


@ways
def test_what_a_buffer_holds_at_first_may_be_shared_by_loops_of_different_lengths(
    kind, checkpoints
):
    def run(start, count):
        return loops.while_loop(
            lambda carry: carry[0] < count,
            lambda carry: (carry[0] + 1, carry[1].at[carry[0]].set(7.0)),
            (0, start),
            max_steps=6,
            buffers=lambda carry: carry[1],
            kind=kind,
            checkpoints=checkpoints,
        )[1]

    def total(start):
        return jnp.sum(jax.vmap(run, (None, 0))(start, jnp.array([0, 3])))

    assert jax.jit(jax.grad(total))(np.ones(4, np.float32)).tolist() == [1, 1, 1, 2]


@ways
@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_buffer_that_is_read_back_has_derivatives_of_derivatives(kind, checkpoints, order):
    def run(x):
        def body(carry):
            index, buffer, y = carry
            buffer = buffer.at[index].set(y * x)
            return index + 1, buffer, y + buffer[index] * buffer[0]

        return loops.while_loop(
            lambda carry: carry[0] < 3,
            body,
            (0, jnp.zeros(4), x),
            max_steps=6,
            buffers=lambda carry: carry[1],
            kind=kind,
            checkpoints=checkpoints,
        )[2]

    def in_python(x):
        y, buffer = x, []
        for _ in range(3):
            buffer.append(y * x)
            y = y + buffer[-1] * buffer[0]
        return y

    found, expected = run, in_python
    for _ in range(order):
        found, expected = jax.grad(found), jax.grad(expected)
    np.testing.assert_allclose(jax.jit(found)(0.7), jax.jit(expected)(0.7), rtol=1e-4)


@ways
def test_a_gradient_may_be_taken_inside_a_custom_rule(kind, checkpoints):
    def run(x, count):
        return loops.while_loop(
            lambda carry: carry[0] < count,
            lambda carry: (carry[0] + 1, jnp.sin(carry[1] * x)),
            (0, x),
            max_steps=6,
            kind=kind,
            checkpoints=checkpoints,
        )[1]

    @jax.custom_jvp
    def function(x):
        return run(x, 3)

    function.defjvp(
        lambda primals, dots: (function(*primals), jax.grad(run)(*primals, 3) * dots[0])
    )
    found, expected = jax.jit(jax.grad(function))(0.5), jax.jit(jax.grad(run))(0.5, 3)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


class Labelled(eqxlike.Module):
    x: jax.Array
    label: object = eqxlike.field(static=True, default=2)


@pytest.mark.parametrize("kind", ["lax", "checkpointed", "bounded"])
def test_a_static_field_of_another_type_is_another_carry(kind):
    with pytest.raises(ValueError, match="must return a carry of the form that it was given"):
        loops.while_loop(
            lambda carry: carry.x < 2,
            lambda carry: Labelled(carry.x + 1, 2.0),
            Labelled(jnp.array(0.0)),
            max_steps=3,
            kind=kind,
        )


@ways
def test_what_cannot_be_differentiated_may_be_in_a_carry(kind, checkpoints):
    """Nothing but what follows from the weight has a tangent, and so the time has none."""

    @jax.custom_jvp
    def of_time(t):
        return jnp.cos(t)

    @of_time.defjvp
    def _refuse(primals, tangents):
        raise AssertionError("the time has a tangent")

    def run(w, x):
        return loops.while_loop(
            lambda carry: carry[0] < 0.45,
            lambda carry: (carry[0] + 0.1, jnp.sin(w * carry[1]) + of_time(carry[0])),
            (jnp.array(0.0), x),
            max_steps=9,
            kind=kind,
            checkpoints=checkpoints,
        )[1]

    def in_python(w, x):
        for step in range(5):
            x = jnp.sin(w * x) + jnp.cos(jnp.float32(0.1) * step)
        return x

    def derived(run):
        total = lambda w: jnp.sum(jax.vmap(run, (None, 0))(w, jnp.array([0.3, 0.6])))
        modes = jax.grad, jax.hessian, lambda f: jax.grad(jax.grad(f))
        return jax.jit(lambda w: [mode(total)(w) for mode in modes])(0.7)

    np.testing.assert_allclose(derived(run), derived(in_python), rtol=1e-4)


@ways
def test_a_loop_may_stand_in_a_batch_that_it_does_not_depend_on(kind, checkpoints):
    def run(w):
        return loops.while_loop(
            lambda carry: carry[0] < 3,
            lambda carry: (
                carry[0] + 1,
                jnp.sin(w * carry[1]),
                carry[2].at[carry[0]].set(carry[1]),
            ),
            (0, 0.5, jnp.zeros(4)),
            max_steps=5,
            buffers=lambda carry: carry[2],
            kind=kind,
            checkpoints=checkpoints,
        )[1]

    for mode in (jax.grad, jax.jacfwd, jax.hessian):
        alone = jax.jit(mode(run))(0.7)
        batch = jax.jit(jax.vmap(lambda x, mode=mode: x * mode(run)(0.7)))(np.ones(2, np.float32))
        np.testing.assert_allclose(batch, [alone, alone], rtol=1e-6)
