"""What may be in a carry, and what is said of one that changes its form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike
from eqxlike import loops, nn
from tests.nn.arrays import filled

KINDS = ["lax", "checkpointed", "bounded"]


class Labelled(eqxlike.Module):
    x: jax.Array
    label: object = eqxlike.field(static=True, default=2)


def test_modules_keys_and_static_leaves_go_through():
    def body(carry):
        number, layer, key, x, function, name, none = carry
        key, noise_key = jax.random.split(key)
        x = function(layer(x)) + jax.random.normal(noise_key, (2,))
        return number + 1, layer, key, x, function, name, none

    @eqxlike.filter_jit
    def run(layer, key):
        expected = start = 0, layer, key, jnp.ones(2), jnp.sin, "a", None
        for _ in range(3):
            expected = body(expected)
        is_on = lambda carry: carry[0] < 3
        return expected, [
            loops.while_loop(is_on, body, start, max_steps=3, kind=kind) for kind in KINDS
        ]

    layer = filled(nn.Linear, 2, 2, key=jax.random.key(0))
    expected, all_found = run(layer, jax.random.key(1))
    for found in all_found:
        assert eqxlike.tree_equal(found[1], layer)
        keys = [jax.random.key_data(each[2]) for each in (found, expected)]
        assert np.array_equal(*keys)
        np.testing.assert_allclose(found[3], expected[3], atol=1e-6)
        assert found[4:] == (jnp.sin, "a", None)


def test_python_numbers_take_the_dtype_that_the_body_returns():
    for kind in KINDS:
        found = loops.while_loop(lambda x: x < 9, lambda x: 1.5 * x, 2, max_steps=9, kind=kind)
        assert (found.dtype, float(found)) == (jnp.float32, 10.125)


FORMS = [
    (lambda c: [c[0], c[1]], r"the carry is a tuple of length 2, and the returned carry is a list"),
    (lambda c: (c[0], c[1][None]), r"the carry\[1\] is an array of shape \(2,\)"),
    (lambda c: (c[0], c[1].astype(int)), r"carry\[1\] has dtype float32.* has dtype int32"),
    (lambda c: (c[0], "b"), r"the carry\[1\] is .*, and the returned carry\[1\] is .*'b'"),
]


def test_carry_of_another_form_or_static_part_is_an_error_with_its_path():
    start = jnp.zeros(()), jnp.ones(2)
    for change, message in FORMS:
        message = f"must return a carry with the .*{message}"
        with pytest.raises(ValueError, match=f"body_fun {message}"):
            loops.while_loop(lambda c: c[0] < 3, change, start, max_steps=3, kind="bounded")
        step = lambda c, x, change=change: (change(c), None)
        with pytest.raises(ValueError, match=f"f {message}"):
            loops.scan(step, start, None, length=3, kind="checkpointed")
    with pytest.raises(
        ValueError, match=r"the carry\[1\] is 'a', and the returned carry\[1\] is 'b'"
    ):
        loops.scan(lambda c, x: ((c[0], "b"), None), (1.0, "a"), None, length=2)
    with pytest.raises(
        ValueError,
        match="must return a carry with the structure, shapes and dtypes of its input",
    ):
        loops.while_loop(
            lambda carry: carry.x < 2,
            lambda carry: Labelled(carry.x + 1, 2.0),
            Labelled(jnp.array(0.0)),
        )


def test_condition_is_one_boolean_and_the_kind_one_of_three():
    for wrong in (1.0, jnp.ones(1, bool), "yes"):
        condition = lambda x, wrong=wrong: wrong
        with pytest.raises(TypeError, match="cond_fun must return one boolean, of shape"):
            loops.while_loop(condition, lambda x: x, 1.0, max_steps=2, kind="checkpointed")
    message = "kind must be one of 'lax', 'checkpointed', 'bounded'"
    with pytest.raises(ValueError, match=message):
        loops.scan(lambda c, x: (c, x), 1.0, jnp.ones(2), kind="Lax")
    with pytest.raises(ValueError, match=message):
        loops.while_loop(lambda x: x < 1, lambda x: x, 1.0, max_steps=1, kind=None)


LENGTHS = [
    (lambda: loops.scan(lambda c, x: (c, x), 0.0, None), "needs `length`"),
    (
        lambda: loops.scan(lambda c, x: (c, x), 0.0, {"a": jnp.ones(2), "b": jnp.ones(3)}),
        r"one number of steps, got several: xs\['a'\] has 2, xs\['b'\] has 3",
    ),
    (
        lambda: loops.scan(lambda c, x: (c, x), 0.0, jnp.ones(2), length=4),
        "one number of steps, got several: xs has 2, length has 4",
    ),
    (lambda: loops.scan(lambda c, x: (c, x), 0.0, 1.0), r"rows of arrays, but xs has shape \(\)"),
]


def test_lengths_that_do_not_agree_are_an_error():
    for run, message in LENGTHS:
        with pytest.raises(ValueError, match=message):
            run()


def test_a_scan_takes_and_returns_pairs_of_which_leaves_may_be_static():
    with pytest.raises(TypeError, match="f must return a pair"):
        loops.scan(lambda c, x: c, 0.0, None, length=2)
    with pytest.raises(TypeError, match=r"a pair .*: it returned a tuple of length 3"):
        loops.scan(lambda c, x: (c, x, x), 0.0, None, length=2)
    with pytest.raises(TypeError, match="scan expected f to be a function, got a leaf of type flo"):
        loops.scan(0.0, lambda c, x: (c, x), None, length=2)  # pyright: ignore
    _, (ys, name) = loops.scan(
        lambda c, x: (c, (x["a"], x["name"])), 0.0, {"a": jnp.arange(3), "name": "n"}
    )
    assert (ys.tolist(), name) == ([0, 1, 2], "n")


def written(write, start, buffers=lambda c: c[1], **options):
    """What is in the carry beside the number of steps, after two steps of a loop that writes."""
    body = lambda c: (c[0] + 1, write(*c))
    return loops.while_loop(
        lambda c: c[0] < 2, body, (0, start), buffers=buffers, max_steps=3, **options
    )[1]


def test_buffers_that_are_not_returned_no_arrays_of_the_carry_or_not_set_are_an_error():
    for kind in KINDS:
        with pytest.raises(ValueError, match="must return a buffer in the place of each"):
            written(lambda number, buffer: jnp.zeros(3), jnp.zeros(3), kind=kind)
    with pytest.raises(TypeError, match="buffers must return arrays of the carry"):
        written(lambda number, name: name, "name")
    with pytest.raises(TypeError, match="buffers must return arrays of the carry"):
        written(lambda number, x: x, jnp.zeros(3), lambda c: jnp.zeros(3))
    with pytest.raises(
        AttributeError, match=r"has no `\.at\[index\]\.add`: .* with `\.at\[index\]\.set"
    ):
        written(lambda number, buffer: buffer.at[0].add(1.0), jnp.zeros(2))


def test_index_counts_from_the_end_and_is_dropped_outside():
    indices = [-1, 2, 3, -3, -4, slice(0, 2), (1,)]

    def write(number, buffers):
        return [each.at[index].set(5.0) for index, each in zip(indices, buffers, strict=True)]

    @jax.jit
    def found_and_expected(start):
        expected = [start.at[index].set(5.0) for index in indices]
        return jnp.stack(written(write, [start] * len(indices))), jnp.stack(expected)

    assert np.array_equal(*found_and_expected(np.arange(3, dtype=np.float32)))


def test_buffers_may_be_nodes_with_arrays_and_none():
    def write(number, node):
        first, nothing, second = node
        place = jnp.minimum(number, 2)
        assert (len(first), first.shape, first.ndim, first.size) == (3, (3,), 1, 3)
        return first.at[place].set(1, pred=number > 0), nothing, second.at[place].set(2.0)

    first, _, second = written(write, (jnp.zeros(3, int), None, jnp.zeros(3)))
    assert (first.tolist(), second.tolist()) == ([0, 1, 0], [2, 2, 0])


def test_what_a_buffer_held_has_a_gradient_where_it_was_not_written():
    for kind in ("checkpointed", "bounded"):
        write = lambda number, buffer: buffer.at[number].set(2.0)
        total = lambda start: jnp.sum(written(write, start, kind=kind) ** 2)  # noqa: B023
        assert jax.jit(jax.grad(total))(np.arange(4, dtype=np.float32)).tolist() == [0, 0, 4, 6]


def test_buffer_is_written_where_it_is_asked_to():
    buffer = jnp.zeros(4)
    assert loops.buffer_at_set(buffer, 1, 2.0).tolist() == [0, 2, 0, 0]
    assert loops.buffer_at_set(buffer, 1, 2.0, pred=False).tolist() == [0, 0, 0, 0]
    with pytest.raises(TypeError, match="expected an array or a loop buffer"):
        loops.buffer_at_set("a", 0, 1.0)


@pytest.mark.parametrize(("kind", "is_named_inside"), [("checkpointed", True), ("bounded", False)])
def test_a_buffer_of_a_loop_may_be_one_of_a_loop_inside(kind, is_named_inside):
    def run(x, count):
        def write(carry):
            number, buffer = carry
            return number + 1, buffer.at[number].set(jnp.sin(x * number.astype(x.dtype)))

        def body(carry):
            number, buffer = carry
            is_on, buffers = lambda c: c[0] < 2 * number + 2, lambda c: c[1]
            options = {"buffers": buffers if is_named_inside else None, "kind": kind}
            start = 2 * number, buffer
            return number + 1, loops.while_loop(is_on, write, start, max_steps=6, **options)[1]

        carry = jnp.array(0), jnp.zeros(6)
        return loops.while_loop(
            lambda c: c[0] < count, body, carry, max_steps=3, buffers=lambda c: c[1], kind=kind
        )[1]

    def squared(x, count):
        buffer = run(x, count)
        return jnp.sum(buffer**2), buffer

    found = jax.jit(jax.vmap(jax.grad(squared, has_aux=True)))
    grad, value = found(np.array([0.7, 0.2], "f"), np.array([3, 2]))
    steps, is_written = np.arange(6.0), np.array([[1.0] * 6, [1.0] * 4 + [0.0] * 2])
    angles = np.outer([0.7, 0.2], steps)
    np.testing.assert_allclose(value, np.sin(angles) * is_written, rtol=1e-5)
    expected = np.sum(steps * np.sin(2 * angles) * is_written, axis=1)
    np.testing.assert_allclose(grad, expected, rtol=1e-5)


def test_a_loop_without_limit_asks_for_limit_or_checkpoints():
    with pytest.raises(ValueError, match=r"needs `max_steps`, .*, or `checkpoints`, the "):
        loops.while_loop(lambda x: x < 2, lambda x: x + 1, 0.0, kind="checkpointed")
    with pytest.raises(ValueError, match="needs `max_steps`, the largest number of steps: "):
        loops.while_loop(lambda x: x < 2, lambda x: x + 1, 0.0, kind="bounded", checkpoints=3)


def test_devices_that_share_what_a_scan_closes_over_share_its_gradient():
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

    ours = gradient(functools.partial(loops.scan, kind="checkpointed"))
    in_shards = jax.shard_map(ours, mesh=mesh, in_specs=(shared, rows), out_specs=shared)
    expected = jax.jit(gradient(jax.lax.scan))(w, xs)
    np.testing.assert_allclose(jax.jit(in_shards)(w, xs), expected, rtol=1e-5)
