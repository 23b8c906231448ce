"""Trees in files. A test with the parameter `eqx` runs on Equinox and eqxlike, which must agree."""

import functools
import io
import os
import types
from unittest import mock

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given

import eqxlike
from eqxlike import tree_deserialise_leaves, tree_serialise_leaves
from tests.beside_equinox import both
from tests.examples import at_most
from tests.pytree.serialised import (
    blank,
    leaves,
    leaves_that_equinox_knows,
    read,
    same_bits,
    trees,
    written,
)

PAIR = jnp.array([1.5, -2.0])
TREE = {"array": PAIR, "rest": [3, (2.5, "text")]}
BLANK = {"array": jnp.zeros(2), "rest": [0, (0.0, "text")]}


def skip(file, leaf):
    return leaf


@at_most(60)
@given(trees(leaves))
def test_tree_is_read_back_bit_by_bit(tree):
    like = jtu.tree_map(blank, tree)
    assert same_bits(read(eqxlike, written(eqxlike, tree), like), tree)


@at_most(40)
@given(trees(leaves_that_equinox_knows))
def test_files_agree_with_equinox_byte_by_byte(tree):
    data, like = written(equinox, tree), jtu.tree_map(blank, tree)
    assert written(eqxlike, tree) == data
    assert same_bits(read(eqxlike, data, like), read(equinox, data, like))


@both
def test_like_may_be_a_deleted_or_weakly_typed_array(eqx):
    like = jnp.zeros(2)
    like.delete()
    assert read(eqx, written(eqx, PAIR), like).tolist() == [1.5, -2]
    assert not read(eqx, written(eqx, jnp.asarray(1.0)), jnp.asarray(0.0)).weak_type


# --- paths and files ----------------------------------------------------------------------------


@both
def test_path_without_suffix_gets_one(eqx, tmp_path):
    for asked, found in [
        ("model", "model.eqx"),
        ("model.txt", "model.txt"),
        ("v1.2", "v1.2"),
        (".hidden", ".hidden.eqx"),
        ("v1.2/model", "v1.2/model.eqx"),
    ]:
        file = tmp_path / found
        file.parent.mkdir(exist_ok=True)
        for path in (tmp_path / asked, str(tmp_path / asked)):
            assert eqx.tree_serialise_leaves(path, TREE) is None
            assert same_bits(eqx.tree_deserialise_leaves(path, BLANK), TREE)
            file.unlink()


@both
def test_trees_in_one_open_file_are_read_one_after_another(eqx, tmp_path):
    with open(tmp_path / "trees", "wb") as file:
        file.write(b"head")
        for tree in (TREE, {"x": 2.5}):
            eqx.tree_serialise_leaves(file, tree)
        assert not file.closed
    with open(tmp_path / "trees", "rb") as file:
        assert file.read(4) == b"head"
        assert same_bits(eqx.tree_deserialise_leaves(file, BLANK), TREE)
        assert eqx.tree_deserialise_leaves(file, {"x": 0.0}) == {"x": 2.5}
        assert not file.read()


def test_any_object_with_the_method_is_a_file_and_path_like_objects_are_paths(tmp_path):
    class Path:
        def __fspath__(self):
            return str(tmp_path / "model")

    file = io.BytesIO()
    tree_serialise_leaves(types.SimpleNamespace(write=file.write), TREE)
    assert file.getvalue() == written(eqxlike, TREE)
    file.seek(0)
    assert same_bits(tree_deserialise_leaves(types.SimpleNamespace(read=file.read), BLANK), TREE)
    tree_serialise_leaves(Path(), TREE)
    assert same_bits(tree_deserialise_leaves(Path(), BLANK), TREE)


def test_failed_save_leaves_the_file_unchanged(tmp_path):
    path = tmp_path / "model.eqx"
    tree_serialise_leaves(path, TREE)

    write = mock.Mock(side_effect=[None, KeyboardInterrupt])
    with pytest.raises(KeyboardInterrupt):
        tree_serialise_leaves(path, TREE, filter_spec=write)
    assert same_bits(tree_deserialise_leaves(path, BLANK), TREE)
    assert os.listdir(tmp_path) == ["model.eqx"]


@both
def test_error_of_a_missing_file_or_a_directory_names_it_with_the_suffix(eqx, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing\.eqx"):
        eqx.tree_deserialise_leaves(tmp_path / "missing", BLANK)
    (tmp_path / "model.eqx").mkdir()
    with pytest.raises(IsADirectoryError, match=r"model\.eqx"):
        eqx.tree_deserialise_leaves(tmp_path / "model", BLANK)
    with pytest.raises(IsADirectoryError, match=r"model\.eqx"):
        eqx.tree_serialise_leaves(tmp_path / "model", BLANK)


def test_error_names_the_type_of_an_object_that_is_neither_path_nor_file():
    for path in (b"model", None):
        name = type(path).__name__
        expected = f"must be a str, a pathlib.Path or a file .* it is of type {name}"
        with pytest.raises(TypeError, match=expected):
            tree_serialise_leaves(path, TREE)
        with pytest.raises(TypeError, match=expected):
            tree_deserialise_leaves(path, TREE)


# --- filter_spec and is_leaf --------------------------------------------------------------------


@both
def test_filter_spec_may_be_a_prefix_of_functions(eqx):
    write = {"array": eqx.default_serialise_filter_spec, "rest": skip}
    data = written(eqx, TREE, filter_spec=write)
    assert data == written(eqx, PAIR)
    found = read(
        eqx,
        data,
        {"array": jnp.zeros(2), "rest": "kept"},
        filter_spec={"array": eqx.default_deserialise_filter_spec, "rest": skip},
    )
    assert same_bits(found, {"array": PAIR, "rest": "kept"})


@both
def test_filter_spec_gets_nodes_that_is_leaf_chooses(eqx):
    def is_leaf(node):
        return isinstance(node, tuple) or node is None

    given = []
    tree = [(1, 2), 3, None]
    options = {"filter_spec": lambda file, leaf: given.append(leaf), "is_leaf": is_leaf}
    written(eqx, tree, **options)
    assert given == tree
    filter_spec = lambda file, leaf: (leaf, "new")[:1] if isinstance(leaf, tuple) else leaf
    found = read(eqx, b"", tree, filter_spec=filter_spec, is_leaf=is_leaf)
    assert jtu.tree_leaves(found) == jtu.tree_leaves(tree)
    # A prefix may contain functions for the children of such nodes.
    given.clear()
    written(eqx, tree, **{**options, "filter_spec": [(options["filter_spec"], skip), skip, skip]})
    assert given == [1]


def test_error_of_a_wrong_filter_spec_names_the_path():
    place = r"filter_spec\['a'\] is a list .* and {}\['a'\] is a leaf of type int"
    with pytest.raises(ValueError, match=place.format("pytree")):
        written(eqxlike, {"a": 1}, filter_spec={"a": [skip]})
    with pytest.raises(ValueError, match=place.format("like")):
        read(eqxlike, b"", {"a": 1}, filter_spec={"a": [skip]})
    with pytest.raises(TypeError, match=r"True of type bool at filter_spec\['a'\]\[1\]"):
        written(eqxlike, {"a": [1, 2]}, filter_spec={"a": [skip, True]})


@both
def test_error_in_filter_spec_is_the_cause_of_a_runtime_error(eqx):
    def spec(file, leaf):
        raise KeyError("mine")

    for run in (written, functools.partial(read, data=b"")):
        with pytest.raises(RuntimeError, match=r"'a'") as caught:
            run(eqx, **{"pytree" if run is written else "like": {"a": 1}}, filter_spec=spec)
        cause = caught.value
        while cause.__cause__ is not None:
            cause = cause.__cause__
        assert isinstance(cause, KeyError)


# --- mismatched files ---------------------------------------------------------------------------

WHOLE = written(eqxlike, TREE)
NEXT = len(written(eqxlike, PAIR))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (WHOLE[:-1], r"tree\['rest'\]\[1\]\[0\] could not be read as float: .*expected 8 .* got 7"),
        (WHOLE[:NEXT], r"tree\['rest'\]\[0\] .* as int: EOFError: the file ends before this leaf"),
        (b"x" * 99, r"as JAX array of shape \(2,\) and dtype float32: .*magic string.*got b'xxx"),
    ],
    ids=["cut", "ends", "foreign"],
)
def test_error_names_path_expected_leaf_and_found_data(data, reason):
    with pytest.raises(RuntimeError, match=reason):
        read(eqxlike, data, BLANK)


def test_error_names_both_shapes_or_dtypes():
    for value, like, expected, came in [
        (jnp.ones(3), jnp.ones(2), "JAX array of shape (2,)", "JAX array of shape (3,)"),
        (jnp.arange(2), jnp.ones(2), "and dtype float32", "and dtype int32"),
        (np.ones(3), np.ones(2), "ndarray of shape (2,)", "ndarray of shape (3,)"),
        (jnp.ones(2), jax.ShapeDtypeStruct((3,), np.float32), "JAX array of shape (3,)", "(2,)"),
    ]:
        # The error names only the first leaf that differs.
        data = written(eqxlike, {"a": [value, 3]})
        with pytest.raises(RuntimeError) as caught:
            read(eqxlike, data, {"a": [like, 3]})
        wanted, _, found = str(caught.value).partition("but read")
        assert "tree['a'][0] differs" in wanted
        assert expected in wanted
        assert came in found


@both
def test_filter_spec_must_return_a_value_like_the_leaf(eqx):
    struct = jax.ShapeDtypeStruct((2,), np.float32)
    arrays = [(PAIR, np.ones(2, np.float32)), (PAIR, jnp.ones(3)), (struct, struct)]
    for like, value in [*arrays, (1, True), ("text", 1)]:
        with pytest.raises(RuntimeError, match="'a'"):
            read(eqx, b"", {"a": like}, filter_spec=lambda file, leaf, value=value: value)


def test_path_to_a_file_that_continues_after_the_last_leaf_is_an_error(tmp_path):
    path = tmp_path / "model.eqx"
    for more in (b"x", written(eqxlike, 3)):
        path.write_bytes(WHOLE + more)
        with pytest.raises(RuntimeError, match=r"model\.eqx continues after the last leaf of `li"):
            tree_deserialise_leaves(path, BLANK)
        with open(path, "rb") as file:
            assert same_bits(tree_deserialise_leaves(file, BLANK), TREE)


def test_error_of_a_traced_array_names_the_leaf():
    with pytest.raises(RuntimeError, match=r"tree\[0\] could not be written: .*Tracer"):
        jax.make_jaxpr(lambda x: written(eqxlike, [x]))(PAIR)
