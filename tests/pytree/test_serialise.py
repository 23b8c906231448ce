"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

import functools
import inspect
import io
import os
import pathlib
import re
import types

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given

import eqxlike
from eqxlike import (
    default_deserialise_filter_spec,
    default_serialise_filter_spec,
    tree_deserialise_leaves,
    tree_serialise_leaves,
)
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

each_way = pytest.mark.parametrize(
    ("writer", "reader"),
    [
        pytest.param(equinox, eqxlike, id="equinox-to-eqxlike"),
        pytest.param(eqxlike, equinox, id="eqxlike-to-equinox"),
    ],
)

PAIR = jnp.array([1.5, -2.0])
TREE = {"array": PAIR, "rest": [3, (2.5, "text")]}
BLANK = {"array": jnp.zeros(2), "rest": [0, (0.0, "text")]}


def skip(file, leaf):
    return leaf


# --- laws ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tree_serialise_leaves", "tree_deserialise_leaves"])
def test_has_the_parameters_of_equinox(name):
    def parameters(library):
        signature = inspect.signature(getattr(library, name))
        return [
            (p.name, p.kind, getattr(p.default, "__name__", p.default))
            for p in signature.parameters.values()
        ]

    assert parameters(eqxlike) == parameters(equinox)


@at_most(60)
@given(trees(leaves))
def test_what_is_read_is_what_was_written_to_the_bit(tree):
    like = jtu.tree_map(blank, tree)
    assert same_bits(read(eqxlike, written(eqxlike, tree), like), tree)


@at_most(40)
@given(trees(leaves_that_equinox_knows))
def test_files_are_those_of_equinox_to_the_byte(tree):
    assert written(eqxlike, tree) == written(equinox, tree)


@at_most(40)
@given(trees(leaves_that_equinox_knows))
def test_reads_what_equinox_reads(tree):
    data, like = written(equinox, tree), jtu.tree_map(blank, tree)
    assert same_bits(read(eqxlike, data, like), read(equinox, data, like))


@each_way
@pytest.mark.parametrize("path", ["model", "model.eqx", "model.npy"])
def test_a_model_goes_from_one_library_to_the_other(writer, reader, path, tmp_path):
    def model(library, key):
        return library.nn.MLP(2, 1, 3, 2, key=key)

    writer.tree_serialise_leaves(tmp_path / path, model(writer, jax.random.key(0)))
    like = reader.filter_eval_shape(model, reader, jax.random.key(1))
    found = reader.tree_deserialise_leaves(tmp_path / path, like)
    assert same_bits(jtu.tree_leaves(found), jtu.tree_leaves(model(reader, jax.random.key(0))))


@both
def test_arrays_that_are_deleted_will_do_to_read_into(eqx):
    like = jnp.zeros(2)
    like.delete()
    assert read(eqx, written(eqx, PAIR), like).tolist() == [1.5, -2]


@both
def test_what_is_read_is_not_weakly_typed(eqx):
    assert not read(eqx, written(eqx, jnp.asarray(1.0)), jnp.asarray(0.0)).weak_type


# --- paths and files ----------------------------------------------------------------------------


@both
@pytest.mark.parametrize("kind", [str, pathlib.Path], ids=["str", "Path"])
@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("model", "model.eqx"),
        ("model.eqx", "model.eqx"),
        ("model.txt", "model.txt"),
        ("v1.2", "v1.2"),
        (".hidden", ".hidden.eqx"),
        ("v1.2/model", "v1.2/model.eqx"),
    ],
)
def test_a_path_without_suffix_gets_one(eqx, kind, asked, found, tmp_path):
    (tmp_path / found).parent.mkdir(exist_ok=True)
    path = kind(tmp_path / asked)
    assert eqx.tree_serialise_leaves(path, TREE) is None
    assert (tmp_path / found).is_file()
    assert same_bits(eqx.tree_deserialise_leaves(path, BLANK), TREE)


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


@both
def test_whatever_has_a_write_method_is_written(eqx):
    class Sink:
        def __init__(self):
            self.num_bytes = 0

        def write(self, data):
            self.num_bytes += len(data)

    sink = Sink()
    eqx.tree_serialise_leaves(sink, TREE)
    assert sink.num_bytes == len(written(eqx, TREE))


def test_whatever_has_a_read_method_is_read():
    class Stream:
        def __init__(self, data):
            self.read = io.BytesIO(data).read

    assert same_bits(tree_deserialise_leaves(Stream(written(eqxlike, TREE)), BLANK), TREE)


def test_a_path_may_be_any_path_like_object(tmp_path):
    class Path:
        def __fspath__(self):
            return str(tmp_path / "model")

    tree_serialise_leaves(Path(), TREE)
    assert same_bits(tree_deserialise_leaves(Path(), BLANK), TREE)


def test_a_file_is_replaced_only_once_all_leaves_are_written(tmp_path):
    path = tmp_path / "model.eqx"
    tree_serialise_leaves(path, TREE)
    during = []

    def write(file, leaf):
        default_serialise_filter_spec(file, leaf)
        during.append(tree_deserialise_leaves(path, BLANK))

    tree_serialise_leaves(path, 7, filter_spec=write)
    assert same_bits(during, [TREE])
    assert tree_deserialise_leaves(path, 0) == 7


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_the_file_as_it_was(error, tmp_path):
    path = tmp_path / "model.eqx"
    tree_serialise_leaves(path, TREE)

    def write(file, leaf):
        file.write(b"part")
        raise error

    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        tree_serialise_leaves(path, TREE, filter_spec=write)
    assert same_bits(tree_deserialise_leaves(path, BLANK), TREE)
    assert os.listdir(tmp_path) == ["model.eqx"]


@both
def test_a_missing_file_is_an_error_that_names_it_with_its_suffix(eqx, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing\.eqx"):
        eqx.tree_deserialise_leaves(tmp_path / "missing", BLANK)


@both
def test_a_directory_is_an_error(eqx, tmp_path):
    (tmp_path / "model.eqx").mkdir()
    with pytest.raises(IsADirectoryError, match=r"model\.eqx"):
        eqx.tree_deserialise_leaves(tmp_path / "model", BLANK)
    with pytest.raises(IsADirectoryError, match=r"model\.eqx"):
        eqx.tree_serialise_leaves(tmp_path / "model", BLANK)


@pytest.mark.parametrize("path", [b"model", 3, None], ids=repr)
def test_what_is_neither_path_nor_file_is_an_error_that_says_so(path):
    expected = f"must be a str, a pathlib.Path or a file .* it is of type {type(path).__name__}"
    with pytest.raises(TypeError, match=expected):
        tree_serialise_leaves(path, TREE)
    with pytest.raises(TypeError, match=expected):
        tree_deserialise_leaves(path, TREE)


# --- filter_spec and is_leaf --------------------------------------------------------------------


@both
def test_filter_spec_is_a_prefix_of_functions(eqx):
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
def test_filter_spec_may_be_a_module_that_is_callable(eqx):
    class Scale(eqx.Module):
        factor: jax.Array
        offset: float

        def __call__(self, x):
            return self.factor * x + self.offset

    model = Scale(PAIR, 2.0)
    write = eqx.tree_at(
        lambda model: model.offset,
        jtu.tree_map(lambda _: skip, model),
        default_serialise_filter_spec,
    )
    assert written(eqx, model, filter_spec=write) == written(eqx, 2.0)


@both
@pytest.mark.parametrize("tree", [[(1, 2), 3, None], {"a": (1,), "b": None}], ids=repr)
def test_nodes_that_is_leaf_says_are_leaves_are_given_whole(eqx, tree):
    def is_leaf(node):
        return isinstance(node, tuple) or node is None

    given = []
    options = {"filter_spec": lambda file, leaf: given.append(leaf), "is_leaf": is_leaf}
    written(eqx, tree, **options)
    assert given == jtu.tree_leaves(tree, is_leaf=is_leaf)
    filter_spec = lambda file, leaf: (leaf, "new")[:1] if isinstance(leaf, tuple) else leaf
    found = read(eqx, b"", tree, filter_spec=filter_spec, is_leaf=is_leaf)
    assert jtu.tree_leaves(found) == jtu.tree_leaves(tree)


@both
def test_filter_spec_may_look_inside_what_is_leaf_says_are_leaves(eqx):
    given = []
    spec = [(lambda file, leaf: given.append(leaf), skip), skip]
    written(eqx, [(1, 2), 3], filter_spec=spec, is_leaf=lambda node: isinstance(node, tuple))
    assert given == [1]


@both
@pytest.mark.parametrize("spec", [{"other": skip}, [skip], None], ids=["keys", "type", "None"])
def test_a_filter_spec_that_is_no_prefix_is_an_error(eqx, spec):
    with pytest.raises(ValueError, match=r"prefix|mismatch|Expected"):
        written(eqx, {"a": 1}, filter_spec=spec)
    with pytest.raises(ValueError, match=r"prefix|mismatch|Expected"):
        read(eqx, b"", {"a": 1}, filter_spec=spec)


def test_the_error_of_a_filter_spec_that_is_no_prefix_says_where():
    expected = r"filter_spec\['a'\] is a list .* and like\['a'\] is a leaf of type int"
    with pytest.raises(ValueError, match=expected):
        read(eqxlike, b"", {"a": 1}, filter_spec={"a": [skip]})


def test_a_filter_spec_of_other_things_than_functions_is_an_error_that_names_them():
    with pytest.raises(TypeError, match=r"True of type bool at filter_spec\['a'\]\[1\]"):
        written(eqxlike, {"a": [1, 2]}, filter_spec={"a": [skip, True]})


@both
def test_what_filter_spec_raises_is_a_runtime_error_caused_by_it(eqx):
    def spec(file, leaf):
        raise KeyError("mine")

    for run in (written, functools.partial(read, data=b"")):
        with pytest.raises(RuntimeError, match=r"'a'") as caught:
            run(eqx, **{"pytree" if run is written else "like": {"a": 1}}, filter_spec=spec)
        cause = caught.value
        while cause.__cause__ is not None:
            cause = cause.__cause__
        assert isinstance(cause, KeyError)


# --- files that do not fit ----------------------------------------------------------------------

WHOLE = written(eqxlike, TREE)
RECORD = len(written(eqxlike, 3))
NEXT = len(written(eqxlike, PAIR))


@both
@pytest.mark.parametrize(
    ("data", "leaf"),
    [
        (b"", "array"),
        (b"x", "array"),
        (b"not a file of NumPy's" * 20, "array"),
        (WHOLE[:50], "array"),
        (WHOLE[: NEXT - 1], "array"),
        (WHOLE[:NEXT], "rest"),
        (WHOLE[:-1], "rest"),
    ],
    ids=["empty", "short", "foreign", "header", "data", "between", "last"],
)
def test_a_file_that_is_cut_off_or_foreign_is_an_error_that_names_the_leaf(eqx, data, leaf):
    with pytest.raises(RuntimeError, match=leaf):
        read(eqx, data, BLANK)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (WHOLE[:-1], r"tree\['rest'\]\[1\]\[0\] could not be read as float: .*expected 8 .* got 7"),
        (WHOLE[:NEXT], r"tree\['rest'\]\[0\] .* as int: EOFError: the file ends before this leaf"),
        (b"x" * 99, r"as JAX array of shape \(2,\) and dtype float32: .*magic string.*got b'xxx"),
    ],
    ids=["cut", "ends", "foreign"],
)
def test_the_error_says_where_what_was_expected_and_what_came(data, reason):
    with pytest.raises(RuntimeError, match=reason):
        read(eqxlike, data, BLANK)


@pytest.mark.parametrize(
    ("value", "like", "expected", "came"),
    [
        (jnp.ones(3), jnp.ones(2), "JAX array of shape (2,)", "JAX array of shape (3,)"),
        (jnp.ones(()), jnp.ones(1), "JAX array of shape (1,)", "JAX array of shape ()"),
        (jnp.arange(2), jnp.ones(2), "and dtype float32", "and dtype int32"),
        (np.ones(3), np.ones(2), "ndarray of shape (2,)", "ndarray of shape (3,)"),
        (np.ones(2), np.ones(2, np.float16), "and dtype float16", "and dtype float64"),
        (jnp.ones(2), jax.ShapeDtypeStruct((3,), np.float32), "JAX array of shape (3,)", "(2,)"),
        (jnp.ones(2), jax.ShapeDtypeStruct((2,), np.int32), "and dtype int32", "dtype float32"),
        (
            jnp.ones(2, jnp.float16),
            jnp.ones(2, jnp.bfloat16),
            "and dtype bfloat16",
            "and dtype float16",
        ),
    ],
)
def test_another_shape_or_dtype_is_an_error_that_names_both(value, like, expected, came):
    with pytest.raises(RuntimeError) as ours:
        read(eqxlike, written(eqxlike, {"a": [value]}), {"a": [like]})
    assert "tree['a'][0] differs" in str(ours.value)
    wanted, _, found = str(ours.value).partition("reading gave")
    assert expected in wanted
    assert came in found
    with pytest.raises(RuntimeError):
        read(equinox, written(equinox, {"a": [value]}), {"a": [like]})


@both
@pytest.mark.parametrize(
    ("like", "value"),
    [
        (PAIR, "text"),
        (PAIR, np.ones(2, np.float32)),
        (PAIR, jnp.ones(3)),
        (1, True),
        ("text", 1),
        (jax.ShapeDtypeStruct((2,), np.float32), jax.ShapeDtypeStruct((2,), np.float32)),
    ],
    ids=["type", "numpy", "shape", "bool", "str", "struct"],
)
def test_what_filter_spec_returns_must_be_like_the_leaf(eqx, like, value):
    with pytest.raises(RuntimeError, match="'a'"):
        read(eqx, b"", {"a": like}, filter_spec=lambda file, leaf: value)


def test_a_number_where_like_has_an_array_one_leaf_earlier_is_found_there():
    data = written(eqxlike, [jnp.ones(2), 3])
    with pytest.raises(RuntimeError, match=r"tree\[0\] .*expected JAX array of shape \(4,\)"):
        read(eqxlike, data, [jnp.ones(4), jnp.ones(2), 3])


@pytest.mark.parametrize("more", [b"x", written(eqxlike, 3)], ids=["byte", "leaf"])
def test_a_path_to_a_file_that_goes_on_after_the_last_leaf_is_an_error(more, tmp_path):
    path = tmp_path / "model.eqx"
    path.write_bytes(WHOLE + more)
    with pytest.raises(RuntimeError, match=r"model\.eqx goes on after the last leaf of `like`"):
        tree_deserialise_leaves(path, BLANK)


def mlp(width_size, depth):
    return eqxlike.nn.MLP(2, 1, width_size, depth, key=jax.random.key(0))


OTHER = "written from a tree of another structure than `like`: "


@pytest.mark.parametrize("is_path", [True, False], ids=["path", "file"])
@pytest.mark.parametrize(
    ("tree", "like", "expected"),
    [
        (mlp(4, 2), mlp(4, 3), f"The file was {OTHER}it has 6 arrays and numbers, and `like` has"),
        (mlp(4, 2), mlp(5, 2), f"The file seems to have been {OTHER}5 of its 6 arrays and numbers"),
        ([PAIR], [PAIR] * 2, f"The file was cut off, or {OTHER}it has 1 array or number, and `l"),
    ],
    ids=["depth", "width", "end"],
)
def test_the_error_says_first_that_the_file_is_of_another_structure(
    tree, like, expected, is_path, tmp_path
):
    path = tmp_path / "model.eqx"
    tree_serialise_leaves(path, tree)
    with pytest.raises(RuntimeError) as caught:
        tree_deserialise_leaves(path if is_path else io.BytesIO(path.read_bytes()), like)
    assert str(caught.value).startswith(expected)
    assert "The leaf at tree" in str(caught.value)


@pytest.mark.parametrize("depth", [1, 2])
def test_of_a_path_the_error_counts_leaves_that_like_does_not_have(depth, tmp_path):
    path = tmp_path / "model.eqx"
    tree_serialise_leaves(path, mlp(4, 3))
    count = f"it has 8 arrays and numbers, and `like` has {2 * depth + 2}. The leaf at tree.layers"
    with pytest.raises(RuntimeError, match=re.escape(OTHER + count)):
        tree_deserialise_leaves(path, mlp(4, depth))


def test_of_an_open_file_it_does_not_since_another_tree_may_follow():
    expected = re.escape(f"seems to have been {OTHER}2 of its 6 arrays and numbers have another")
    with pytest.raises(RuntimeError, match=expected):
        read(eqxlike, written(eqxlike, mlp(4, 3)), mlp(4, 2))


def test_of_one_leaf_that_differs_nothing_is_said_of_the_structure(tmp_path):
    path = tmp_path / "model.eqx"
    tree_serialise_leaves(path, [PAIR, PAIR, jax.random.key(0)])
    for like in ([PAIR, jnp.ones(3)], [PAIR.astype(int), PAIR.astype(int)]):
        with pytest.raises(RuntimeError, match=r"^The leaf at tree\["):
            tree_deserialise_leaves(path, [*like, jax.random.key(0)])


def test_of_another_structure_nothing_is_said_if_the_file_cannot_be_read_twice():
    data = io.BytesIO(written(eqxlike, [PAIR] * 2))
    stream = types.SimpleNamespace(read=data.read)
    with pytest.raises(RuntimeError, match=r"^The leaf at tree\[2\] .*the file ends"):
        tree_deserialise_leaves(stream, [PAIR] * 3)


def test_of_a_file_that_goes_on_the_first_tree_is_read_once_it_is_open(tmp_path):
    path = tmp_path / "model.eqx"
    path.write_bytes(WHOLE + b"more")
    with open(path, "rb") as file:
        assert same_bits(tree_deserialise_leaves(file, BLANK), TREE)


def test_a_traced_array_is_an_error_that_names_the_leaf():
    with pytest.raises(RuntimeError, match=r"tree\[0\] could not be written: .*Tracer"):
        jax.make_jaxpr(lambda x: written(eqxlike, [x]))(PAIR)


def test_reading_is_the_default_of_filter_spec():
    spec = {"array": default_deserialise_filter_spec, "rest": [default_deserialise_filter_spec] * 2}
    assert same_bits(read(eqxlike, WHOLE, BLANK, filter_spec=spec), read(eqxlike, WHOLE, BLANK))
