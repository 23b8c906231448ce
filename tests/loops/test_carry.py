"""Carries of all types, buffers in carries, and errors for a carry that changes its structure."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike
from eqxlike import loops, nn
from tests.nn.arrays import filled
from tests.nn.mistakes import each_mistake

KINDS = ["lax", "checkpointed", "bounded"]


class Labelled(eqxlike.Module):
    x: jax.Array
    label: object = eqxlike.field(static=True, default=2)


def test_modules_keys_and_static_leaves_pass_through():
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


def test_changed_structure_or_static_part_of_a_carry_is_an_error_with_its_path():
    start = jnp.zeros(()), jnp.ones(2)
    for change, message in FORMS:
        message = f"must return a carry with the .*{message}"
        with pytest.raises(ValueError, match=f"body_fun {message}"):
            loops.while_loop(lambda c: c[0] < 3, change, start, max_steps=3, kind="bounded")
        step = lambda c, x, change=change: (change(c), None)
        with pytest.raises(ValueError, match=f"f {message}"):
            loops.scan(step, start, None, length=3, kind="checkpointed")


def while_loop(condition=lambda x: x < 2, body=lambda x: x, start=1.0, **options):
    return lambda: loops.while_loop(condition, body, start, **options)


def scan(*args, step=lambda c, x: (c, x), start=0.0, **options):
    return lambda: loops.scan(step, start, *args, **options)


KIND = "kind must be one of 'lax', 'checkpointed', 'bounded'"
MISTAKES = {
    TypeError: {
        "cond_fun must return one boolean, of shape": while_loop(lambda x: 1.0),
        "one boolean, of shape ": while_loop(lambda x: jnp.ones(1, bool), kind="lax"),
        "must return one boolean": while_loop(lambda x: "yes", max_steps=2, kind="checkpointed"),
        "f must return a pair": scan(None, step=lambda c, x: c, length=2),
        r"a pair .*: it returned a tuple of length 3": (
            scan(None, step=lambda c, x: (c, x, x), length=2)
        ),
        "scan expected f to be a function, got a leaf of type flo": scan(None, step=0.0),
        "expected an array or a loop buffer": lambda: loops.buffer_at_set("a", 0, 1.0),
    },
    ValueError: {
        KIND: scan(jnp.ones(2), kind="Lax"),
        f"{KIND}.*": while_loop(max_steps=1, kind=None),
        "needs `length`": scan(None),
        r"one number of steps, got several: xs\['a'\] has 2, xs\['b'\] has 3": (
            scan({"a": jnp.ones(2), "b": jnp.ones(3)})
        ),
        "several: xs has 2, length has 4": scan(jnp.ones(2), length=4),
        r"rows of arrays, but xs has shape \(\)": scan(1.0),
        r"needs `max_steps`, .*, or `checkpoints`, the ": while_loop(kind="checkpointed"),
        "needs `max_steps`, the largest number of steps: ": (
            while_loop(kind="bounded", checkpoints=3)
        ),
        r"the carry\[1\] is 'a', and the returned carry\[1\] is 'b'": (
            scan(None, step=lambda c, x: ((c[0], "b"), None), start=(1.0, "a"), length=2)
        ),
        "must return a carry with the structure, shapes and dtypes of its input": while_loop(
            lambda carry: carry.x < 2,
            lambda carry: Labelled(carry.x + 1, 2.0),
            Labelled(jnp.array(0.0)),
        ),
    },
}


@each_mistake(MISTAKES)
def test_mistakes_are_refused(error, words, call):
    with pytest.raises(error, match=words):
        call()


def test_pairs_of_a_scan_may_have_static_leaves():
    step, xs = lambda c, x: (c, (x["a"], x["name"])), {"a": jnp.arange(3), "name": "n"}
    _, (ys, name) = loops.scan(step, 0.0, xs)
    assert (ys.tolist(), name) == ([0, 1, 2], "n")


def written(write, start, buffers=lambda c: c[1], **options):
    """The final carry, without the step counter, after two steps of a loop that writes."""
    body, options = lambda c: (c[0] + 1, write(*c)), {"max_steps": 3, **options}
    return loops.while_loop(lambda c: c[0] < 2, body, (0, start), buffers=buffers, **options)[1]


def test_buffers_are_arrays_of_the_carry_that_the_body_sets_and_returns():
    for kind in KINDS:
        with pytest.raises(ValueError, match="must return a buffer in the place of each"):
            written(lambda number, buffer: jnp.zeros(3), jnp.zeros(3), kind=kind)
    with pytest.raises(TypeError, match="buffers must return arrays of the carry"):
        written(lambda number, name: name, "name")
    with pytest.raises(TypeError, match="buffers must return arrays of the carry"):
        written(lambda number, x: x, jnp.zeros(3), lambda c: jnp.zeros(3))
    message = r"has no `\.at\[index\]\.add`: .* with `\.at\[index\]\.set"
    with pytest.raises(AttributeError, match=message):
        written(lambda number, buffer: buffer.at[0].add(1.0), jnp.zeros(2))


def test_index_may_be_negative_and_is_ignored_outside():
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


def test_entries_of_a_buffer_that_are_not_written_have_gradients():
    for kind in ("checkpointed", "bounded"):
        write = lambda number, buffer: buffer.at[number].set(2.0)
        total = lambda start: jnp.sum(written(write, start, kind=kind) ** 2)  # noqa: B023
        assert jax.jit(jax.grad(total))(np.arange(4, dtype=np.float32)).tolist() == [0, 0, 4, 6]


def test_buffer_at_set_writes_one_entry_unless_pred_is_false():
    buffer = jnp.zeros(4)
    assert loops.buffer_at_set(buffer, 1, 2.0).tolist() == [0, 2, 0, 0]
    assert loops.buffer_at_set(buffer, 1, 2.0, pred=False).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(("kind", "is_named_inside"), [("checkpointed", True), ("bounded", False)])
def test_buffer_of_a_loop_may_be_a_buffer_of_an_inner_loop(kind, is_named_inside):
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


def test_gradient_of_an_array_that_devices_share_is_shared():
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
