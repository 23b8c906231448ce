"""Values and types that libraries put into trees and annotations."""

import pickle

import equinox.internal
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import wadler_lindig as wl
from jaxtyping import Array, Float, PyTree

import eqxlike
from eqxlike import internal, loops
from tests.internal.beside_equinox_internal import both


@both
@pytest.mark.parametrize("value", [3, "text", (1, 2), [1, {"a": 2}], jnp.dtype("float32"), None])
def test_a_static_value_has_no_leaves_and_comes_back(eqxi, value):
    static = eqxi.Static(value)
    assert jax.tree.leaves(static) == []
    assert jax.jit(lambda x: (x, static))(1.0)[1].value == value


@both
def test_static_values_are_compared_by_value(eqxi):
    structures = [jax.tree.structure(eqxi.Static(value)) for value in ([1, 2], [1, 2], [1, 3])]
    assert structures[0] == structures[1] != structures[2]


def test_static_refuses_arrays():
    with pytest.raises(TypeError, match=r"Static\.value is a static field and was given an array"):
        internal.Static(jnp.ones(2))


@both
def test_static_may_be_annotated_with_a_type(eqxi):
    assert eqxi.Static[int](3).value == 3


@both
def test_a_word_stands_in_a_tree_of_arrays(eqxi):
    word = eqxi.str2jax("word")
    assert jax.tree.leaves(word) == []
    assert str(jax.jit(lambda x: (x, word))(1.0)[1]) == "word"


@both
def test_words_are_told_apart(eqxi):
    assert eqxi.str2jax("word") != eqxi.str2jax("word")


@both
def test_documentation_changes_nothing(eqxi):
    def function(x):
        return x

    value = object()
    assert eqxi.doc_repr(value, "value") is value
    assert eqxi.doc_remove_args("x")(function) is function


def test_a_maybe_buffer_is_a_buffer_or_what_it_is_of():
    kind = internal.MaybeBuffer[Float[Array, " n"]]
    assert isinstance(jnp.ones(2), kind)
    assert isinstance(loops.Buffer(jnp.ones(2), True), kind)
    assert not isinstance(jnp.ones((2, 2)), kind)


def test_a_maybe_buffer_stands_in_an_annotation_of_a_tree():
    assert isinstance([jnp.ones(2)], PyTree[internal.MaybeBuffer[Float[Array, " n"]]])


@both
def test_attributes_of_a_container_are_numbers(eqxi):
    class Words(metaclass=eqxi.ContainerMeta):
        first = "one"
        second = "two"

    assert (Words.first, Words.second, Words[0], Words[1], len(Words)) == (0, 1, "one", "two", 2)
    assert list(Words) == ["one", "two"]
    assert Words.reverse_lookup == ["one", "two"]
    assert isinstance(1, Words)


@both
def test_keys_for_tests_are_new_ones(eqxi):
    getkey = eqxi.GetKey()
    assert len({tuple(getkey().tolist()) for _ in range(5)}) == 5


def test_keys_are_those_of_equinox_for_a_seed():
    theirs, ours = equinox.internal.GetKey(3), internal.GetKey(3)
    assert [ours().tolist() for _ in range(3)] == [theirs().tolist() for _ in range(3)]


def test_a_seed_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("EQX_GETKEY_SEED", "5")
    assert internal.GetKey().seed == 5


@both
@pytest.mark.parametrize("shape", [(2, 1), (2, 1, 3, 4)])
def test_arrays_are_broadcast_behind_their_axes(eqxi, shape):
    array = jnp.arange(2).reshape(2, 1)
    expected = np.broadcast_to(
        np.arange(2).reshape(2, 1, 1, 1)[(..., *[0] * (4 - len(shape)))], shape
    )
    assert np.array_equal(eqxi.left_broadcast_to(array, shape), expected)


def test_too_few_axes_are_refused():
    message = r"expected at least the 2 axes of an array of shape \(2, 3\); got shape \(2,\)\."
    with pytest.raises(ValueError, match=message):
        internal.left_broadcast_to(jnp.ones((2, 3)), (2,))


@both
def test_a_tree_comes_back_from_its_two_parts(eqxi):
    tree = {"a": jnp.ones(2), "b": [1, "text", None]}
    dynamic, static = eqxi.hashable_partition(tree, eqxlike.is_array)
    assert dynamic[1:] == (None, None)
    assert eqxlike.tree_equal(eqxi.hashable_combine(dynamic, static), tree)


@both
def test_the_static_part_is_a_key(eqxi):
    parts = [eqxi.hashable_partition(tree, eqxlike.is_array)[1] for tree in ([1], [1], [2])]
    assert len(set(parts)) == 2


SHOWN = {
    "array": jnp.ones((2, 3)),
    "weak": jnp.asarray(1.0),
    "key": jax.random.key(0),
    "struct": jax.ShapeDtypeStruct((2,), "bfloat16"),
    "NumPy": np.ones(2),
    "number": 1.5,
    "list": [1, 2],
}


@pytest.mark.parametrize("options", [(True, False), (True, True), (False, True), (False, False)])
@pytest.mark.parametrize("name", SHOWN)
def test_text_is_that_of_equinox(name, options):
    def shown(library):
        custom = library.TreeWLCustom(lambda node: isinstance(node, list), *options)
        return wl.pformat({"a": SHOWN[name]}, custom=custom)

    assert shown(internal) == shown(equinox.internal)


@both
def test_largest_of_all_batches(eqxi):
    batch = jnp.arange(6).reshape(2, 3)
    assert jax.vmap(jax.vmap(eqxi.unvmap_max, out_axes=None), out_axes=None)(batch) == 5


def test_largest_of_all_has_no_derivative():
    assert jax.grad(lambda x: x.sum() * internal.unvmap_max(x))(jnp.ones(2)).tolist() == [1, 1]


def test_static_values_are_pickled():
    assert pickle.loads(pickle.dumps(internal.Static([1, 2]))) == internal.Static([1, 2])
