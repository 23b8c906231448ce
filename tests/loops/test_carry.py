"""What may be in a carry, and what is said of one that changes its form."""

import functools

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike
from eqxlike import loops, nn

KINDS = ["lax", "checkpointed", "bounded"]


@pytest.mark.parametrize("kind", KINDS)
def test_static_leaves_go_through(kind):
    carry = {"x": jnp.ones(()), "function": jnp.sin, "name": "a", "none": None}

    def body(carry):
        return {**carry, "x": carry["function"](carry["x"])}

    found = loops.while_loop(lambda c: c["x"] > 0.7, body, carry, max_steps=9, kind=kind)
    assert (found["function"], found["name"], found["none"]) == (jnp.sin, "a", None)


@pytest.mark.parametrize("kind", KINDS)
def test_modules_and_keys_go_through(kind):
    layer = nn.Linear(2, 2, key=jax.random.key(0))

    def body(carry):
        number, layer, key, x = carry
        key, noise_key = jax.random.split(key)
        return number + 1, layer, key, layer(x) + jax.random.normal(noise_key, (2,))

    start = 0, layer, jax.random.key(1), jnp.ones(2)
    found = loops.while_loop(lambda c: c[0] < 3, body, start, max_steps=3, kind=kind)
    expected = start
    for _ in range(3):
        expected = body(expected)
    assert eqxlike.tree_equal(found[1], layer)
    assert jnp.array_equal(jax.random.key_data(found[2]), jax.random.key_data(expected[2]))
    assert jnp.allclose(found[3], expected[3], atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_python_numbers_take_the_dtype_that_the_body_returns(kind):
    found = loops.while_loop(lambda x: x < 9, lambda x: 1.5 * x, 2, max_steps=9, kind=kind)
    assert (found.dtype, float(found)) == (jnp.float32, 10.125)


FORMS = [
    (lambda c: [c[0], c[1]], r"the carry is a tuple of length 2, and what it returned is a list"),
    (lambda c: (c[0], c[1][None]), r"the carry\[1\] is an array of shape \(2,\)"),
    (lambda c: (c[0], c[1].astype(int)), r"carry\[1\] has dtype float32.* has dtype int32"),
    (lambda c: (c[0], "b"), r"the carry\[1\] is .*, and what it returned\[1\] is .*'b'"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("change", "message"), FORMS)
def test_carry_of_another_form_is_an_error_with_its_path(kind, change, message):
    start = jnp.zeros(()), jnp.ones(2)
    with pytest.raises(ValueError, match=f"body_fun must return a carry of the form.*{message}"):
        loops.while_loop(lambda c: c[0] < 3, change, start, max_steps=3, kind=kind)
    with pytest.raises(ValueError, match=f"f must return a carry of the form.*{message}"):
        loops.scan(lambda c, x: (change(c), None), start, None, length=3, kind=kind)


def test_static_leaf_that_changes_is_an_error():
    with pytest.raises(
        ValueError, match=r"the carry\[1\] is 'a', and what it returned\[1\] is 'b'"
    ):
        loops.scan(lambda c, x: ((c[0], "b"), None), (1.0, "a"), None, length=2)


@pytest.mark.parametrize("wrong", [1.0, jnp.ones(1, bool), "yes"])
def test_condition_is_one_boolean(wrong):
    with pytest.raises(TypeError, match="cond_fun must return one boolean, of shape"):
        loops.while_loop(lambda x: wrong, lambda x: x, 1.0, max_steps=2, kind="checkpointed")


def test_loop_backwards_needs_a_limit():
    with pytest.raises(ValueError, match=r"kind='checkpointed'\) needs `max_steps`"):
        loops.while_loop(lambda x: x < 1, lambda x: x, 1.0, kind="checkpointed")


@pytest.mark.parametrize("kind", ["Lax", "", None])
def test_unknown_kind_is_an_error(kind):
    with pytest.raises(ValueError, match="kind must be one of 'lax', 'checkpointed', 'bounded'"):
        loops.scan(lambda c, x: (c, x), 1.0, jnp.ones(2), kind=kind)


LENGTHS = [
    (lambda: loops.scan(lambda c, x: (c, x), 0.0, None), "needs `length`"),
    (
        lambda: loops.scan(lambda c, x: (c, x), 0.0, {"a": jnp.ones(2), "b": jnp.ones(3)}),
        r"one number of steps: xs\['a'\] has 2, xs\['b'\] has 3",
    ),
    (
        lambda: loops.scan(lambda c, x: (c, x), 0.0, jnp.ones(2), length=4),
        "one number of steps: xs has 2, length has 4",
    ),
    (lambda: loops.scan(lambda c, x: (c, x), 0.0, 1.0), r"rows of arrays, and xs has shape \(\)"),
]


@pytest.mark.parametrize(("run", "message"), LENGTHS)
def test_lengths_that_do_not_agree_are_an_error(run, message):
    with pytest.raises(ValueError, match=message):
        run()


def test_function_of_a_scan_returns_a_pair():
    with pytest.raises(TypeError, match="f must return a pair, the next carry and an output"):
        loops.scan(lambda c, x: c, 0.0, None, length=2)


def test_static_outputs_of_a_scan_are_those_of_a_step():
    _, (ys, name) = loops.scan(
        lambda c, x: (c, (x["a"], x["name"])), 0.0, {"a": jnp.arange(3), "name": "n"}
    )
    assert (ys.tolist(), name) == ([0, 1, 2], "n")


@pytest.mark.parametrize("kind", KINDS)
def test_buffer_that_is_not_returned_is_an_error(kind):
    def run():
        loops.while_loop(
            lambda c: c[0] < 2,
            lambda c: (c[0] + 1, jnp.zeros(3)),
            (0, jnp.zeros(3)),
            max_steps=3,
            buffers=lambda c: c[1],
            kind=kind,
        )

    with pytest.raises(ValueError, match="must return a buffer where it was given one"):
        run()


@pytest.mark.parametrize("kind", ["checkpointed", "bounded"])
def test_buffers_are_those_of_equinox(kind):
    def run(library, factor, start):
        def body(carry):
            number, x, buffer = carry
            x = jnp.sin(factor * x)
            return number + 1, x, buffer.at[number].set(x)

        carry = jnp.array(0), jnp.ones(()), start
        return library.while_loop(
            lambda c: c[0] < 4, body, carry, max_steps=5, buffers=lambda c: c[2], kind=kind
        )[2]

    def total(library):
        return jax.value_and_grad(
            lambda factor: jnp.sum(run(library, factor, jnp.arange(6.0)) ** 2)
        )(jnp.array(1.5))

    assert eqx.tree_equal(total(loops), total(eqxi), rtol=1e-5)


@pytest.mark.parametrize("kind", ["checkpointed", "bounded"])
def test_what_a_buffer_held_has_a_gradient_where_it_was_not_written(kind):
    def run(start):
        def body(carry):
            return carry[0] + 1, carry[1].at[carry[0]].set(2.0)

        carry = jnp.array(0), start
        found = loops.while_loop(
            lambda c: c[0] < 2, body, carry, max_steps=3, buffers=lambda c: c[1], kind=kind
        )
        return jnp.sum(found[1] ** 2)

    assert jax.grad(run)(jnp.arange(4.0)).tolist() == [0, 0, 4, 6]


def test_buffer_is_written_where_it_is_asked_to():
    buffer = jnp.zeros(4)
    assert loops.buffer_at_set(buffer, 1, 2.0).tolist() == [0, 2, 0, 0]
    assert loops.buffer_at_set(buffer, 1, 2.0, pred=False).tolist() == [0, 0, 0, 0]
    with pytest.raises(TypeError, match="expected an array or a buffer of a loop"):
        loops.buffer_at_set("a", 0, 1.0)


@pytest.mark.parametrize("index", [-1, 7, -7])
def test_index_counts_from_the_end_and_is_dropped_outside(index):
    def body(carry):
        return carry[0] + 1, carry[1].at[index].set(5.0)

    found = loops.while_loop(
        lambda c: c[0] < 1, body, (0, jnp.arange(3.0)), buffers=lambda c: c[1], max_steps=2
    )
    assert jnp.array_equal(found[1], jnp.arange(3.0).at[index].set(5.0))


def test_buffers_may_be_nodes_with_arrays_and_none():
    def body(carry):
        number, (first, nothing, second) = carry
        return number + 1, (first.at[number].set(1.0), nothing, second.at[number].set(2.0))

    carry = 0, (jnp.zeros(3), None, jnp.zeros(3))
    _, (first, _, second) = loops.while_loop(
        lambda c: c[0] < 2, body, carry, buffers=lambda c: c[1], max_steps=2
    )
    assert (first.tolist(), second.tolist()) == ([1, 1, 0], [2, 2, 0])


@pytest.mark.parametrize("chosen", ["name", jnp.zeros(3)], ids=["static", "of-another-tree"])
def test_buffers_that_are_no_arrays_of_the_carry_are_an_error(chosen):
    with pytest.raises(TypeError, match="buffers must return arrays of the carry"):
        loops.while_loop(
            lambda c: c[0] < 2,
            lambda c: c,
            (0, "name"),
            buffers=lambda c: c[1] if isinstance(chosen, str) else chosen,
        )


@pytest.mark.parametrize("kind", ["checkpointed", "bounded"])
@pytest.mark.parametrize("is_named_inside", [True, False])
def test_a_buffer_of_a_loop_may_be_one_of_a_loop_inside(kind, is_named_inside):
    def run(library, x, count):
        def write(carry):
            number, buffer = carry
            return number + 1, buffer.at[number].set(jnp.sin(x * number.astype(x.dtype)))

        def body(carry):
            number, buffer = carry
            _, buffer = library.while_loop(
                lambda c: c[0] < 2 * number + 2,
                write,
                (2 * number, buffer),
                max_steps=6,
                buffers=(lambda c: c[1]) if is_named_inside else None,
                kind=kind,
            )
            return number + 1, buffer

        carry = jnp.array(0), jnp.zeros(6)
        return library.while_loop(
            lambda c: c[0] < count, body, carry, max_steps=3, buffers=lambda c: c[1], kind=kind
        )[1]

    def found(library):
        value = jax.vmap(lambda x, n: run(library, x, n))
        grad = jax.vmap(jax.grad(lambda x, n: jnp.sum(run(library, x, n) ** 2)))
        args = jnp.array([0.7, 0.2]), jnp.array([3, 2])
        return jax.jit(lambda *args: (value(*args), grad(*args)))(*args)

    if is_named_inside:
        assert eqx.tree_equal(found(loops), found(eqxi), rtol=1e-5)
    else:
        angles = jnp.outer(jnp.array([0.7, 0.2]), jnp.arange(6.0))
        expected = jnp.sin(angles) * jnp.array([[1.0] * 6, [1.0] * 4 + [0.0] * 2])
        np.testing.assert_allclose(found(loops)[0], expected, rtol=1e-5)


def test_a_loop_without_limit_asks_for_limit_or_checkpoints():
    with pytest.raises(ValueError, match=r"needs `max_steps`, .*, or `checkpoints`, the "):
        loops.while_loop(lambda x: x < 2, lambda x: x + 1, 0.0, kind="checkpointed")
    with pytest.raises(ValueError, match="needs `max_steps`, the number of steps at most: "):
        loops.while_loop(lambda x: x < 2, lambda x: x + 1, 0.0, kind="bounded", checkpoints=3)


def test_a_buffer_is_set_and_nothing_else():
    def body(carry):
        return carry[0] + 1, carry[1].at[0].add(1.0)

    with pytest.raises(
        AttributeError, match=r"has no `\.at\[index\]\.add`: .* by `\.at\[index\]\.set"
    ):
        loops.while_loop(
            lambda carry: carry[0] < 1, body, (0, jnp.zeros(2)), buffers=lambda carry: carry[1]
        )


@pytest.mark.parametrize("kind", ["lax", "checkpointed"])
def test_devices_that_share_what_a_scan_closes_over_share_its_gradient(kind):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, shared = jax.sharding.PartitionSpec("d"), jax.sharding.PartitionSpec()
    w, xs = jnp.array([1.0, 2.0]), jnp.arange(8.0).reshape(4, 2)

    def gradient(scan):
        def of_shared(w, xs):
            def total(w):
                step = lambda carry, _: (jnp.tanh(carry * w[None]), None)
                return jnp.sum(scan(step, xs, None, length=5)[0])

            return jax.grad(total)(w)

        return of_shared

    ours = gradient(functools.partial(loops.scan, kind=kind))
    in_shards = jax.shard_map(ours, mesh=mesh, in_specs=(shared, rows), out_specs=shared)
    expected = gradient(jax.lax.scan)(w, xs)
    np.testing.assert_allclose(jax.jit(in_shards)(w, xs), expected, rtol=1e-5)
