"""The table that maps our names to names in a file, for import and export."""

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


NAMED = [
    (None, BLOCKS),
    ({"*": "model.*"}, [f"model.{name}" for name in BLOCKS]),
    (
        {"blocks.{i}.norm.*": "h.{i}.ln.*"},
        ["h.0.ln.weight", "h.0.ln.bias", "h.1.ln.weight", "head"],
    ),
    # An exact key has precedence over patterns, and then the first pattern.
    (
        {"blocks.{i}.*": "a.{i}.*", "blocks.*": "b.*", "*": "c.*", "blocks.0.norm.bias": "d"},
        ["a.0.norm.weight", "d", "a.1.norm.weight", "c.head"],
    ),
    # `{what}` matches one part of a name, `*` matches any text.
    ({"{what}": "{what}.{what}"}, [*BLOCKS[:3], "head.head"]),
    ({"*.{i}.norm.*": "{i}/*/*"}, ["0/blocks/weight", "0/blocks/bias", "1/blocks/weight", "head"]),
    (lambda name: name.upper(), [name.upper() for name in BLOCKS]),
]


def test_names_follow_the_table_in_both_directions(path):
    model = named(*BLOCKS)
    for names, expected in NAMED:
        train.export_safetensors(model, path, names)
        found = {name: array.tolist() for name, array in load_file(path).items()}
        assert found == {name: [number] for number, name in enumerate(expected)}
        found = train.import_safetensors(jax.tree.map(np.zeros_like, model), path, names)
        assert found == model
    # The same word in braces matches the same text.
    train.export_safetensors(named("0.a.0", "0.a.1"), path, {"{i}.a.{i}": "both.{i}"})
    assert sorted(load_file(path)) == ["0.a.1", "both.0"]


def test_arrays_without_a_name_in_the_file_are_not_exported_and_unchanged_by_import(path):
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
DOUBLE = {"load": lambda array: 2 * array, "save": lambda array: array / 2}


def part(name, *numbers, **options):
    return Stored(name, part=numbers, **options)


def thirds(**options):
    return {name: part("qkv", i, 3, transpose=True, **options) for i, name in enumerate("qkv")}


FILTERS, HEADS = NUMBERS.reshape(4, 1, 2, 3), GRID.reshape(2, 2, 3, 2)
LAYOUTS = [
    ({"w": GRID, "b": NUMBERS}, {"*": Stored("*", transpose=True)}, {"w": GRID.T, "b": NUMBERS}),
    (
        {"w": FILTERS, "b": NUMBERS[:4].reshape(4, 1, 1)},
        {
            "w": Stored("w", transpose=(3, 2, 0, 1)),
            "b": Stored("b", shape=(-1,), transpose=(3, 2, 0, 1)),
        },
        {"w": FILTERS.transpose(2, 3, 1, 0), "b": NUMBERS[:4]},
    ),
    # The transposed array is split into parts.
    ({"q": GRID[:, :4], "k": GRID[:, 4:8], "v": GRID[:, 8:]}, thirds(axis=1), {"qkv": GRID.T}),
    # Two heads of keys and values, and four heads of queries.
    (
        {"q": NUMBERS[:12], "k": NUMBERS[12:18], "v": NUMBERS[18:]},
        {"v": part("qkv", 3, 4), "k": part("qkv", 2, 4), "q": part("qkv", 0, 2, 4)},
        {"qkv": NUMBERS},
    ),
    # The file has query, key and value of each head in turn: two heads with two features.
    (
        {name: HEADS[:, :, i].reshape(2, 4) for i, name in enumerate("qkv")},
        thirds(axis=-1, groups=2),
        {"qkv": GRID.T},
    ),
    # Two groups with two heads of queries and one head of keys.
    (
        {"q.b": np.r_[NUMBERS[:8], NUMBERS[12:20]], "k.b": np.r_[NUMBERS[8:12], NUMBERS[20:]]},
        {"q.*": part("qk.*", 0, 2, 3, groups=2), "k.*": part("qk.*", 2, 3, groups=2)},
        {"qk.b": NUMBERS},
    ),
    (
        {"bias": NUMBERS + 1},
        {"bias": Stored("a", "b", load=np.add, save=lambda sum: (sum - 1, np.ones_like(sum)))},
        {"a": NUMBERS, "b": np.ones_like(NUMBERS)},
    ),
    ({"w": 2 * GRID}, {"w": Stored("w", transpose=True, **DOUBLE)}, {"w": GRID.T}),
    # `load` is called with the part, and `save` returns the part.
    (
        {"k": 2 * NUMBERS[:12], "v": NUMBERS[12:]},
        {"k": part("kv", 0, 2, **DOUBLE), "v": part("kv", 1, 2)},
        {"kv": NUMBERS},
    ),
]


@pytest.mark.parametrize(("ours", "names", "stored"), LAYOUTS)
def test_layout_of_arrays_follows_the_table_in_both_directions(path, ours, names, stored):
    train.export_safetensors(ours, path, names)
    written = load_file(path)
    assert written.keys() == stored.keys()
    for name, array in stored.items():
        np.testing.assert_array_equal(written[name], array, strict=True)
    for like in (jax.tree.map(np.zeros_like, ours), jax.tree.map(jnp.zeros_like, ours)):
        found = train.import_safetensors(like, path, names)
        for name, array in ours.items():
            np.testing.assert_array_equal(found[name], array)


def test_axes_of_size_1_are_added_and_dropped_on_reading(path):
    save_file({"a": NUMBERS.reshape(24, 1), "b": NUMBERS, "c": NUMBERS[:1]}, path)
    shapes = {"a": (24,), "b": (1, 24, 1), "c": ()}
    like = {name: np.zeros(shape) for name, shape in shapes.items()}
    found = train.import_safetensors(like, path, dtype="like")
    assert {name: array.shape for name, array in found.items()} == shapes
    assert found["b"].ravel().tolist() == found["a"].tolist() == NUMBERS.tolist()


def test_keys_that_match_nothing_and_wildcards_without_text_are_refused(path):
    model = named("w", "b")
    train.export_safetensors(model, path)
    for names, message in [
        (
            {"typo": "a"},
            "`names` has typo, but no array of the model has that name; nearest: b, w.",
        ),
        ({"w.*": "a.*"}, "`names` has w.*, but no array"),
        ({"w": "a", "blocks.{i}": "{i}"}, "`names` has blocks.{i}, but no array"),
        ({"*": "a.{i}"}, "`names` maps * to a.{i}, but {i} is missing in the key."),
        ({"{i}": "*"}, "`names` maps {i} to *, but * is missing in the key."),
    ]:
        for call in (train.export_safetensors, train.import_safetensors):
            with pytest.raises(ValueError, match=re.escape(message)):
                call(model, path, names)


def test_bad_arguments_of_stored_are_refused():
    for arguments, options, message in [
        ((), {}, "expected names in the file as strings, got ()"),
        ((1,), {}, "expected names in the file as strings, got (1,)"),
        (("w",), {"part": (3, 3)}, "expected `part` to be (k, n) with 0 <= k < n"),
        (("w",), {"part": (2, 1, 3)}, "got (2, 1, 3)"),
        (("w",), {"part": (1,)}, "got (1,)"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            Stored(*arguments, **options)


NO_INVERSE = "by a function without an inverse"
DIFFER = "w, b are parts of wb, but differ in the number of parts, axis, groups or transpose"
WB = "wb is made of w, b, of shape (6,), (2,):"
DTYPES = "wi is made of w, i, which have different or unsupported dtypes: float32, int32"
WRITTEN = [
    ({"w": ("w", np.transpose)}, f"w is loaded from w {NO_INVERSE}: use"),
    ({"w": Stored("x", "y", load=np.add)}, f"w is loaded from x, y {NO_INVERSE}"),
    ({"w": part("qkv", 1, 3)}, "qkv lacks the parts [0, 2] of 3; the model has w"),
    ({"w": "b"}, "b, w have the same name in the file, b"),
    ({"w": part("wb", 0, 2), "b": part("wb", 1, 3)}, DIFFER),
    ({"w": part("wb", 0, 2), "b": part("wb", 1, 2)}, f"{WB} parts of [4, 4] numbers are expected"),
    ({"w": part("wb", 0, 2, groups=2), "b": part("wb", 1, 2)}, DIFFER),
    (
        {"w": part("wb", 0, 2, axis=1), "b": part("wb", 1, 2, axis=1)},
        f"{WB} an array of shape (6,) has no axis 1",
    ),
    ({"w": part("wi", 0, 2), "i": part("wi", 1, 2)}, DTYPES),
    ({"w": Stored("w", shape=(4, 2))}, "w is made of w, of shape (6,): cannot reshape"),
    (
        {"w": Stored("x", "y", load=np.add, save=lambda w: (w,))},
        "`save` for x, y returned 1 arrays",
    ),
    ({"*": "*", "s": "s"}, "s is a jax.ShapeDtypeStruct without values"),
]


def test_models_that_the_table_cannot_write_are_refused(path):
    for names, message in WRITTEN:
        model = {"w": NUMBERS[:6], "b": NUMBERS[:2], "i": np.arange(6, dtype=np.int32)}
        if "s" in names:
            model["s"] = jax.ShapeDtypeStruct((2,), jnp.float32)
        with pytest.raises(ValueError, match=re.escape(message)):
            train.export_safetensors(model, path, names)
        assert not path.exists()


def test_all_missing_names_of_an_array_must_be_ignored(path):
    save_file({"x": NUMBERS}, path)
    options = {"names": {"w": Stored("a", "b", load=np.add)}, "strict": False}
    like = {"w": NUMBERS + 1}
    with pytest.raises(ValueError, match=r"w \(in the file a, b\) is missing"):
        train.import_safetensors(like, path, ignore="a", **options)
    found = train.import_safetensors(like, path, ignore=["a", "b"], **options)
    np.testing.assert_array_equal(found["w"], like["w"])


def test_files_that_the_table_cannot_read_are_refused(path):
    save_file({"weight": NUMBERS[:6], "b": NUMBERS[:6]}, path)
    fifth = "w (weight in model.safetensors), of shape (6,), cannot be split into 5 equal parts"
    like = {"w": np.zeros(6, np.float32)}
    for names, message in [
        ("weigth", "w (in the file weigth) is missing, nearest: weight"),
        (Stored("weight", "b"), "w (weight, b in model.safetensors) has several names in"),
        (part("weight", 0, 5), f"{fifth} along axis 0"),
        (part("weight", 0, 2, axis=1), "equal parts along axis 1"),
        (part("weight", 0, 3, groups=4), "4 groups of 3 equal parts along axis 0"),
        (part("weight", 0, 2), "is float32 of shape (3,), but float32 of shape (6,)"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            train.import_safetensors(like, path, {"w": names})
