"""The table from our names to those in a file, for both directions."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from eqxlike import train
from eqxlike.train import Stored


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def named(*names):
    return {name: np.full(1, number, np.float32) for number, name in enumerate(names)}


BLOCKS = ["blocks.0.norm.weight", "blocks.0.norm.bias", "blocks.1.norm.weight", "head"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (None, BLOCKS),
        ({"*": "model.*"}, [f"model.{name}" for name in BLOCKS]),
        (
            {"blocks.{i}.norm.*": "h.{i}.ln.*"},
            ["h.0.ln.weight", "h.0.ln.bias", "h.1.ln.weight", "head"],
        ),
        # The exact key first, wherever it stands, and then the first pattern.
        (
            {"blocks.{i}.*": "a.{i}.*", "blocks.*": "b.*", "*": "c.*", "blocks.0.norm.bias": "d"},
            ["a.0.norm.weight", "d", "a.1.norm.weight", "c.head"],
        ),
        # `{what}` stands for one part of a name, `*` for any text.
        ({"{what}": "{what}.{what}"}, [*BLOCKS[:3], "head.head"]),
        (
            {"*.{i}.norm.*": "{i}/*/*"},
            ["0/blocks/weight", "0/blocks/bias", "1/blocks/weight", "head"],
        ),
        (lambda name: name.upper(), [name.upper() for name in BLOCKS]),
    ],
)
def test_names_are_those_of_the_table_in_both_directions(path, names, expected):
    model = named(*BLOCKS)
    train.export_safetensors(model, path, names)
    assert {name: float(array[0]) for name, array in load_file(path).items()} == {
        name: number for number, name in enumerate(expected)
    }
    found = train.import_safetensors(jax.tree.map(np.zeros_like, model), path, names)
    assert found == model


def test_same_word_in_braces_stands_for_the_same_text(path):
    model = named("0.a.0", "0.a.1")
    train.export_safetensors(model, path, {"{i}.a.{i}": "both.{i}"})
    assert sorted(load_file(path)) == ["0.a.1", "both.0"]


def test_arrays_without_a_name_in_the_file_are_left_out_and_stay(path):
    model = named("w", "own", "other")
    for names in ({"o*": None}, lambda name: None if name[0] == "o" else name):
        train.export_safetensors(model, path, names)
        assert list(load_file(path)) == ["w"]
        like = {**model, "w": np.ones(1, np.float32)}
        assert train.import_safetensors(like, path, names) == model
    like["own"] = jax.ShapeDtypeStruct((1,), np.float32)
    with pytest.raises(ValueError, match="own has no name in `names` and no values in `model_like"):
        train.import_safetensors(like, path, names)


NUMBERS = np.arange(24, dtype=np.float32)
GRID = NUMBERS.reshape(2, 12)


@pytest.mark.parametrize(
    ("ours", "names", "stored"),
    [
        (
            {"w": GRID, "b": NUMBERS},
            {"*": Stored("*", transpose=True)},
            {"w": GRID.T, "b": NUMBERS},
        ),
        (
            {"w": NUMBERS.reshape(4, 1, 2, 3), "b": NUMBERS[:4].reshape(4, 1, 1)},
            {
                "w": Stored("w", transpose=(3, 2, 0, 1)),
                "b": Stored("b", shape=(-1,), transpose=(3, 2, 0, 1)),
            },
            {"w": NUMBERS.reshape(4, 1, 2, 3).transpose(2, 3, 1, 0), "b": NUMBERS[:4]},
        ),
        # Parts are those of the transposed array.
        (
            {"q": GRID[:, :4], "k": GRID[:, 4:8], "v": GRID[:, 8:]},
            {
                name: Stored("qkv", transpose=True, part=(index, 3), axis=1)
                for index, name in enumerate("qkv")
            },
            {"qkv": GRID.T},
        ),
        # Two heads of keys and values, and four of queries.
        (
            {"q": NUMBERS[:12], "k": NUMBERS[12:18], "v": NUMBERS[18:]},
            {
                "v": Stored("qkv", part=(3, 4)),
                "k": Stored("qkv", part=(2, 4)),
                "q": Stored("qkv", part=(0, 2, 4)),
            },
            {"qkv": NUMBERS},
        ),
        # Query, key and value of one head after another: here two heads of two features.
        (
            {name: GRID.reshape(2, 2, 3, 2)[:, :, i].reshape(2, 4) for i, name in enumerate("qkv")},
            {
                name: Stored("qkv", transpose=True, part=(index, 3), axis=-1, groups=2)
                for index, name in enumerate("qkv")
            },
            {"qkv": GRID.T},
        ),
        # Two groups of two heads of queries, and one of keys.
        (
            {
                "q.b": np.concatenate([NUMBERS[:8], NUMBERS[12:20]]),
                "k.b": np.concatenate([NUMBERS[8:12], NUMBERS[20:]]),
            },
            {
                "q.*": Stored("qk.*", part=(0, 2, 3), groups=2),
                "k.*": Stored("qk.*", part=(2, 3), groups=2),
            },
            {"qk.b": NUMBERS},
        ),
        (
            {"bias": NUMBERS + 1},
            {"bias": Stored("a", "b", load=np.add, save=lambda sum: (sum - 1, np.ones_like(sum)))},
            {"a": NUMBERS, "b": np.ones_like(NUMBERS)},
        ),
        (
            {"w": 2 * GRID},
            {"w": Stored("w", transpose=True, load=lambda w: 2 * w, save=lambda w: w / 2)},
            {"w": GRID.T},
        ),
        # `load` gets the part, and `save` gives it.
        (
            {"k": 2 * NUMBERS[:12], "v": NUMBERS[12:]},
            {
                "k": Stored("kv", part=(0, 2), load=lambda k: 2 * k, save=lambda k: k / 2),
                "v": Stored("kv", part=(1, 2)),
            },
            {"kv": NUMBERS},
        ),
    ],
)
def test_layout_of_arrays_is_that_of_the_table_in_both_directions(path, ours, names, stored):
    train.export_safetensors(ours, path, names)
    written = load_file(path)
    assert {name: array.shape for name, array in written.items()} == {
        name: array.shape for name, array in stored.items()
    }
    for name, array in stored.items():
        np.testing.assert_array_equal(written[name], array)
    for like in (jax.tree.map(np.zeros_like, ours), jax.tree.map(jnp.zeros_like, ours)):
        found = train.import_safetensors(like, path, names)
        for name, array in ours.items():
            np.testing.assert_array_equal(found[name], array)


def test_axes_of_size_1_are_added_and_dropped_on_reading(path):
    save_file({"a": NUMBERS.reshape(24, 1), "b": NUMBERS, "c": NUMBERS[:1]}, path)
    shapes = {"a": (24,), "b": (1, 24, 1), "c": ()}
    found = train.import_safetensors(
        jax.tree.map(np.zeros, shapes, is_leaf=is_shape), path, dtype="like"
    )
    assert {name: array.shape for name, array in found.items()} == shapes
    assert found["b"].ravel().tolist() == found["a"].tolist() == NUMBERS.tolist()


def is_shape(node):
    return isinstance(node, tuple)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            {"typo": "a"},
            "`names` has typo, but no array of the model has that name; nearest: b, w.",
        ),
        ({"w.*": "a.*"}, "`names` has w.*, but no array"),
        ({"w": "a", "blocks.{i}": "{i}"}, "`names` has blocks.{i}, but no array"),
        ({"*": "a.{i}"}, "`names` maps * to a.{i}, but {i} is missing in the key."),
        ({"{i}": "*"}, "`names` maps {i} to *, but * is missing in the key."),
    ],
)
def test_keys_that_match_nothing_and_wildcards_without_text_are_refused(path, names, message):
    model = named("w", "b")
    train.export_safetensors(model, path)
    for call in (train.export_safetensors, train.import_safetensors):
        with pytest.raises(ValueError, match=re.escape(message)):
            call(model, path, names)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((), {}, "expected names in the file as strings, got ()"),
        ((1,), {}, "expected names in the file as strings, got (1,)"),
        (("w",), {"part": (3, 3)}, "expected `part` to be (k, n) with 0 <= k < n"),
        (("w",), {"part": (2, 1, 3)}, "got (2, 1, 3)"),
        (("w",), {"part": (1,)}, "got (1,)"),
    ],
)
def test_stored_refuses_what_cannot_be(arguments, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Stored(*arguments, **options)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"w": ("w", np.transpose)}, "w is loaded from w by a function without an inverse: use"),
        (
            {"w": Stored("x", "y", load=np.add)},
            "w is loaded from x, y by a function without an inverse",
        ),
        ({"w": Stored("qkv", part=(1, 3))}, "qkv lacks the parts [0, 2] of 3; the model has w"),
        ({"w": "b"}, "b, w have the same name in the file, b"),
        (
            {"w": Stored("wb", part=(0, 2)), "b": Stored("wb", part=(1, 3))},
            "w, b are parts of wb, but differ in the number of parts, axis, groups or transpose",
        ),
        (
            {"w": Stored("wb", part=(0, 2)), "b": Stored("wb", part=(1, 2))},
            "wb is made of w, b, of shape (6,), (2,): parts of [4, 4] numbers are expected",
        ),
        (
            {"w": Stored("wb", part=(0, 2), groups=2), "b": Stored("wb", part=(1, 2))},
            "w, b are parts of wb, but differ in the number of parts, axis, groups or transpose",
        ),
        (
            {"w": Stored("wb", part=(0, 2), axis=1), "b": Stored("wb", part=(1, 2), axis=1)},
            "wb is made of w, b, of shape (6,), (2,): an array of shape (6,) has no axis 1",
        ),
        (
            {"w": Stored("wi", part=(0, 2)), "i": Stored("wi", part=(1, 2))},
            "wi is made of w, i, which have different or unsupported dtypes: float32, int32",
        ),
        ({"w": Stored("w", shape=(4, 2))}, "w is made of w, of shape (6,): cannot reshape"),
        (
            {"w": Stored("x", "y", load=np.add, save=lambda w: (w,))},
            "`save` for x, y returned 1 arrays",
        ),
        ({"*": "*", "s": "s"}, "s is a jax.ShapeDtypeStruct without values"),
    ],
)
def test_what_cannot_be_written_with_a_table_is_named(path, names, message):
    model = {"w": NUMBERS[:6], "b": NUMBERS[:2], "i": np.arange(6, dtype=np.int32)}
    if "s" in names:
        model["s"] = jax.ShapeDtypeStruct((2,), jnp.float32)
    with pytest.raises(ValueError, match=re.escape(message)):
        train.export_safetensors(model, path, names)
    assert not path.exists()


def test_all_missing_names_of_an_array_have_to_be_ignored(path):
    save_file({"x": NUMBERS}, path)
    names = {"w": Stored("a", "b", load=np.add)}
    like = {"w": NUMBERS + 1}
    options = {"names": names, "strict": False}
    with pytest.raises(ValueError, match=r"w \(in the file a, b\) is missing"):
        train.import_safetensors(like, path, ignore="a", **options)
    found = train.import_safetensors(like, path, ignore=["a", "b"], **options)
    np.testing.assert_array_equal(found["w"], like["w"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"w": "weigth"}, "w (in the file weigth) is missing, nearest: weight"),
        ({"w": Stored("weight", "b")}, "w (weight, b in model.safetensors) has several names in"),
        (
            {"w": Stored("weight", part=(0, 5))},
            "w (weight in model.safetensors), of shape (6,), cannot be split into 5 equal parts "
            "along axis 0",
        ),
        ({"w": Stored("weight", part=(0, 2), axis=1)}, "equal parts along axis 1"),
        ({"w": Stored("weight", part=(0, 3), groups=4)}, "4 groups of 3 equal parts along axis 0"),
        (
            {"w": Stored("weight", part=(0, 2))},
            "is float32 of shape (3,), but float32 of shape (6,)",
        ),
    ],
)
def test_what_cannot_be_read_with_a_table_is_named(path, names, message):
    save_file({"weight": NUMBERS[:6], "b": NUMBERS[:6]}, path)
    like = {"w": np.zeros(6, np.float32)}
    with pytest.raises(ValueError, match=re.escape(message)):
        train.import_safetensors(like, path, names)
