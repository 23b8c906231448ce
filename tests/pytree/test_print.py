"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

import collections
import dataclasses
import functools
import math
import re
from typing import Any, NamedTuple

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eqxlike
from eqxlike import tree_pformat
from tests.beside_equinox import both


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Plain:
    x: Any
    y: int = 3


def list_in_itself():
    node = [1]
    node.append(node)
    return node


@dataclasses.dataclass
class Secretive:
    x: Any
    hidden: int = dataclasses.field(default=1, repr=False)


@dataclasses.dataclass
class Described:
    x: Any

    def __repr__(self):
        return "two\nlines"

    def method(self):
        return self.x


SAMPLES = {
    "int": 1,
    "float": 1.5,
    "str": "a",
    "None": None,
    "list": [1, 2],
    "dict": {"a": 1, 2: [3]},
    "named tuple": Point(1, jnp.ones(2)),
    "dataclass": Plain(jnp.ones(2), 4),
    "dataclass with a hidden field": Secretive(1, 2),
    "dataclass with a text of its own": [Described(1)],
    "ordered dict": collections.OrderedDict(b=1, a=jnp.ones(2)),
    "dict with mixed keys": {1: 2, "a": 3, None: 4, (1,): 5},
    "list in itself": list_in_itself(),
    "long list": list(range(100)),
    "numbers that are none": [math.inf, math.nan, -0.0],
    "float32": jnp.ones((2, 3)),
    "bfloat16": jnp.ones(2, jnp.bfloat16),
    "complex64": jnp.ones(2, jnp.complex64),
    "bool": jnp.ones(2, bool),
    "weak scalar": jnp.array(1.0),
    "key": jax.random.key(0),
    "numpy": np.ones(2),
    "numpy scalar": np.float32(1),
    "struct": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16),
    "weak struct": jax.eval_shape(lambda: 1.0),
    "key struct": jax.eval_shape(lambda: jax.random.key(0)),
    "function": np.sum,
    "custom jvp": jax.nn.relu,
    "jax ufunc": jnp.add,
    "bound method": Described(1).method,
    "partial": functools.partial(max, 1),
    "jax partial": jtu.Partial(max, 1),
}


def without_addresses(text):
    return re.sub(r"0x[0-9a-f]+", "0x", text)


OPTIONS = [
    {},
    {"short_arrays": False},
    {"struct_as_array": True},
    {"short_arrays": False, "struct_as_array": True},
    {"width": 1},
    {"width": 20, "indent": 4},
    {"truncate_leaf": lambda node: isinstance(node, list | jax.Array | Plain)},
    {"truncate_leaf": dataclasses.is_dataclass},
]


@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
def test_prints_as_equinox_does(options):
    # Where Equinox indents by two spaces, whatever `indent` says: see below.
    samples = {**SAMPLES, "jax partial": None} if "indent" in options else SAMPLES
    ours, theirs = (
        {
            name: without_addresses(eqx.tree_pformat(sample, **options))
            for name, sample in samples.items()
        }
        for eqx in (eqxlike, equinox)
    )
    assert ours == theirs


def make_tree_of_modules(eqx):
    class Inner(eqx.Module):
        x: Any
        hidden: Any = eqx.field(default=1, repr=False)
        name: str = eqx.field(static=True, default="inner")

        def method(self):
            return self.x

    class Own(eqx.Module):
        x: Any

        def __repr__(self):
            return "own"

    class Empty(eqx.Module):
        pass

    class Outer(Inner):
        others: Any = None

    inner = Inner(jnp.ones((2, 3)))
    return {
        "outer": Outer([inner, np.ones(2)], others=(Own(1), Empty(), Point(inner, None))),
        "methods": [inner.method, Inner.method],
        "classes": [Inner, Empty],
        "layers": eqx.nn.Sequential([eqx.nn.Linear(2, 2, key=jax.random.key(0))]),
    }


def test_prints_modules_as_equinox_does():
    def texts(eqx):
        tree = make_tree_of_modules(eqx)
        texts = [eqx.tree_pformat(part, **options) for part in tree.values() for options in OPTIONS]
        return [
            without_addresses(text)
            .replace(eqx.__name__, "library")
            .replace("_ModuleMeta", "ModuleMeta")
            for text in texts
        ]

    assert texts(eqxlike) == texts(equinox)
    outer = make_tree_of_modules(eqxlike)["outer"]
    assert tree_pformat(outer) == repr(outer)


def test_pprint_prints_what_pformat_says(capsys):
    for options in OPTIONS:
        assert eqxlike.tree_pprint(SAMPLES, **options) is None
        assert capsys.readouterr().out == tree_pformat(SAMPLES, **options) + "\n"


@both
def test_a_tracer_prints_as_its_array(eqx):
    texts = []

    def function(x):
        texts.append(eqx.tree_pformat([x]))
        return x

    jax.eval_shape(function, jnp.ones(3))
    jax.vmap(function)(jnp.ones((3, 2)))
    jax.linearize(function, jnp.ones(3, jnp.bfloat16))
    assert texts == ["[f32[3]]", "[f32[2]]", "[bf16[3]]"]


# In Equinox it is two spaces for these, whatever `indent` says.
def test_a_jax_partial_is_indented_like_all_else():
    text = tree_pformat(jtu.Partial(max, 1), width=1, indent=4)
    assert text.splitlines()[1:3] == ["    func=<built-in function max>,", "    args=("]
    assert "\n  func" in equinox.tree_pformat(jtu.Partial(max, 1), width=1, indent=4)


@given(st.lists(st.lists(st.integers(0, 99), max_size=6), max_size=6), st.integers(30, 60))
def test_lines_keep_within_the_width(tree, width):
    assert max(map(len, tree_pformat(tree, width=width).splitlines())) <= width


@given(
    st.recursive(
        st.sampled_from([0, -17, 10**9, "", "ab"]), lambda trees: st.lists(trees) | st.tuples(trees)
    )
)
def test_plain_trees_print_as_python_reads_them(tree):
    assert eval(tree_pformat(tree)) == tree
