"""Descriptions of trees are written to a file, read back and compared."""

import collections
import json
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

import eqxlike as eqx
from eqxlike._partition import described, differing, from_plain, key_of, to_plain

Pair = collections.namedtuple("Pair", "left right")


class Model(eqx.Module):
    weight: jax.Array
    inner: Any
    depth: int = eqx.field(static=True, default=1)


def read_back(tree):
    return from_plain(json.loads(json.dumps(to_plain(described(tree)))))


def model(size=2, inner=None, depth=1):
    return Model(jnp.ones(size), inner, depth)


TREES = {
    "Model(weight=float32[2], inner={'a': (float32[], 3, None), 'b': []})": model(
        inner={"b": [], "a": (jnp.ones(()), 3, None)}
    ),
    "(Pair(left=key<fry>[], right=<tanh>),)": (Pair(jax.random.key(0), jax.nn.tanh),),
    "{-1: {'x': 'text'}, 0.5: int32[3]}": {
        0.5: jax.ShapeDtypeStruct((3,), jnp.int32),
        -1: collections.OrderedDict(x="text"),
    },
    "Model of 5 arrays": model(inner=[jnp.ones(3)] * 4),
}


def test_description_is_read_back_from_json():
    for text, tree in TREES.items():
        found = read_back(tree)
        assert str(found) == text
        assert to_plain(found) == to_plain(described(tree))
        assert not list(differing(found, read_back(tree)))
        # Leaves have the same paths as in JAX, which skips `None`.
        paths = {jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path(tree)}
        assert paths <= {path for path, _ in found.leaves()}


def test_differences_between_descriptions_are_found():
    before = {"a": model(inner=[1, jnp.ones(3)]), "b": 1}
    shown = "Model(weight=float32[2], inner=[1, float32[3]])"
    for changes, expected in [
        ({}, []),
        ({"a": model(3, [1, jnp.ones(3)])}, [("['a'].weight", "float32[2]", "float32[3]")]),
        (
            {"a": model(2, [True, jnp.ones(3)], 2)},
            [("['a'].inner[0]", "1", "True"), ("['a'].depth", "1", "2")],
        ),
        ({"a": model(2, [1])}, [("['a'].inner", "[1, float32[3]]", "[1]")]),
        ({"a": None, "c": ()}, [("['a']", shown, "None"), ("['c']", "None", "()")]),
    ]:
        found = differing(read_back(before), read_back(before | changes))
        assert [tuple(map(str, each)) for each in found] == expected


def test_key_is_read_from_its_text_in_a_path():
    names = [".weight", "['a.b']", "[0]", "[(1, 'a')]", "[<object>]"]
    assert [*map(key_of, names)] == ["weight", "a.b", 0, (1, "a"), None]


def test_other_data_are_refused():
    plain = to_plain(described((jnp.ones(2), 3)))
    wrong = [("node", None), ("node", ["array"]), ("arrays", []), ("arrays", [[2, "float32"]])]
    for name, value in wrong:
        with pytest.raises((TypeError, ValueError)):
            from_plain({**plain, name: value})
