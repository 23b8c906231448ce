"""Values and types that other libraries use in trees and annotations."""

import itertools
import pickle

import equinox.internal
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import wadler_lindig as wl
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Array, Float, PyTree

import eqxlike
from eqxlike import internal, loops


def test_static_has_no_leaves_is_compared_by_value_and_refuses_arrays():
    for value in (3, "text", (1, 2), [1, {"a": 2}], jnp.dtype("float32"), None):
        static = internal.Static(value)
        assert jax.tree.leaves(static) == []
        assert jax.eval_shape(lambda x, static=static: (x, static), 1.0)[1].value == value
    structures = [jax.tree.structure(internal.Static(value)) for value in ([1, 2], [1, 2], [1, 3])]
    assert structures[0] == structures[1] != structures[2]
    assert internal.Static[int](3).value == 3
    with pytest.raises(TypeError, match=r"Static\.value is a static field and was given an array"):
        internal.Static(jnp.ones(2))
    assert pickle.loads(pickle.dumps(internal.Static([1, 2]))) == internal.Static([1, 2])


def test_str2jax_makes_a_static_value_and_doc_functions_change_nothing():
    word = internal.str2jax("word")
    assert jax.tree.leaves(word) == []
    assert str(jax.jit(lambda x: (x, word))(1.0)[1]) == "word"
    assert word != internal.str2jax("word")
    assert internal.doc_repr(word, "value") is word
    assert internal.doc_remove_args("x")(max) is max


def test_maybe_buffer_matches_arrays_and_buffers_of_them():
    kind = internal.MaybeBuffer[Float[Array, " n"]]
    assert isinstance(jnp.ones(2), kind)
    assert isinstance(loops.Buffer(jnp.ones(2), True), kind)
    assert not isinstance(jnp.ones((2, 2)), kind)
    assert isinstance([jnp.ones(2)], PyTree[kind])


def test_attributes_of_a_container_are_indices():
    class Words(metaclass=internal.ContainerMeta):
        first = "one"
        second = "two"

    assert (Words.first, Words.second, Words[0], Words[1], len(Words)) == (0, 1, "one", "two", 2)
    assert list(Words) == ["one", "two"]
    assert Words.reverse_lookup == ["one", "two"]
    assert isinstance(1, Words)


def test_get_key_gives_new_keys_and_the_keys_of_equinox_for_a_seed(monkeypatch):
    theirs, ours = equinox.internal.GetKey(3), internal.GetKey(3)
    found = [ours().tolist() for _ in range(3)]
    assert found == [theirs().tolist() for _ in range(3)]
    assert len(set(map(tuple, found))) == 3
    assert len({ours, theirs, internal.GetKey(3)}) == 3
    monkeypatch.setenv("EQX_GETKEY_SEED", "5")
    assert internal.GetKey().seed == 5


def test_left_broadcast_adds_axes_at_the_end():
    array = jnp.arange(2).reshape(2, 1)
    assert internal.left_broadcast_to(array, (2, 1)).tolist() == [[0], [1]]
    expected = np.broadcast_to(np.arange(2).reshape(2, 1, 1, 1), (2, 1, 3, 4))
    assert np.array_equal(internal.left_broadcast_to(array, (2, 1, 3, 4)), expected)
    with pytest.raises(ValueError, match=r"shape with fewer dimensions: arr_shape=\(2, 3\)"):
        internal.left_broadcast_to(jnp.ones((2, 3)), (2,))


def test_hashable_combine_undoes_hashable_partition():
    tree = {"a": jnp.ones(2), "b": [1, "text", None]}
    dynamic, static = internal.hashable_partition(tree, eqxlike.is_array)
    assert dynamic[1:] == (None, None)
    assert eqxlike.tree_equal(internal.hashable_combine(dynamic, static), tree)
    parts = [internal.hashable_partition(tree, eqxlike.is_array)[1] for tree in ([1], [1], [2])]
    assert len(set(parts)) == 2


SHOWN = [
    *(jnp.ones((2, 3)), jnp.asarray(1.0), jax.random.key(0), np.ones(2), 1.5, [1, 2]),
    jax.ShapeDtypeStruct((2,), "bfloat16"),
]


def test_text_matches_equinox():
    def shown(library, value, options):
        custom = library.TreeWLCustom(lambda node: isinstance(node, list), *options)
        return wl.pformat({"a": value}, custom=custom)

    for options in itertools.product((True, False), repeat=2):
        for value in SHOWN:
            assert shown(internal, value, options) == shown(equinox.internal, value, options)


def test_unvmap_max_has_no_derivative():
    batch = jnp.arange(6).reshape(2, 3)
    largest = jax.vmap(jax.vmap(internal.unvmap_max, out_axes=None), out_axes=None)
    assert largest(batch) == 5
    assert jax.grad(lambda x: x.sum() * internal.unvmap_max(x))(jnp.ones(2)).tolist() == [1, 1]


# Excludes zero, the largest numbers, and subnormal numbers.
NORMAL = st.floats(2.0**-125, 2.0**127, width=32).flatmap(lambda x: st.sampled_from((x, -x)))


@given(st.lists(NORMAL, min_size=8, max_size=8))
def test_next_and_previous_numbers_match_numpy(numbers):
    x = np.array(numbers, np.float32)
    assert np.array_equal(internal.nextafter(jnp.array(x)), np.nextafter(x, np.float32(np.inf)))
    assert np.array_equal(internal.prevbefore(jnp.array(x)), np.nextafter(x, np.float32(-np.inf)))


def test_number_next_to_zero_is_the_smallest_normal_number():
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
        tiny, zero = jnp.finfo(dtype).tiny, jnp.zeros((), dtype)
        assert (internal.nextafter(zero), internal.prevbefore(zero)) == (tiny, -tiny)
        assert internal.nextafter(zero).dtype == internal.prevbefore(zero).dtype == dtype


def test_next_number_has_the_derivative_of_the_identity_also_in_a_batch():
    for function in (internal.nextafter, internal.prevbefore):
        square, x = lambda x: function(x) ** 2, jnp.array([0.0, 1.0, -2.0])  # noqa: B023
        found = jax.jit(lambda x: (square(x), jax.grad(square)(x), jax.hessian(square)(x)))(1.0)  # noqa: B023
        assert jnp.allclose(jnp.stack(found), jnp.array([1.0, 2.0, 2.0]))
        assert jnp.array_equal(jax.jit(jax.vmap(function))(x), jnp.stack([function(y) for y in x]))
