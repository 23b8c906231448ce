"""One registry of short programs with `tree_at`, run on Equinox and on eqxlike: the same outputs.

`AGREE` holds those that return the same, or raise an error of the same type; `DIFFER` those where
eqxlike departs from Equinox on purpose, with what it does instead.
"""

import collections
from typing import Any

import equinox
import jax.tree_util as jtu
import numpy as np
import pytest

import eqxlike
from tests.beside_equinox import output


def make_modules(eqx):
    class Model(eqx.Module):
        a: Any
        b: Any = None

        def get(self):
            return self.a

    class Static(eqx.Module):
        s: Any = eqx.field(static=True)
        w: Any = 1

    return Model, Static


def model(eqx, *values):
    return make_modules(eqx)[0](*values)


def static(eqx, *values):
    return make_modules(eqx)[1](*values)


def is_none(node):
    return node is None


def is_tuple(node):
    return isinstance(node, tuple)


def double(node):
    return jtu.tree_map(lambda leaf: 2 * leaf, node)


def pair(tree):
    return tree[0], tree[1]


def first(tree):
    return tree[0]


AGREE = {
    "two nodes as a list": lambda e: e.tree_at(lambda t: [t[0], t[1]], [1, 2, 3], [5, 6]),
    "all leaves": lambda e: e.tree_at(jtu.tree_leaves, [1, [2]], replace_fn=double),
    "values as an array": lambda e: e.tree_at(pair, [1, 2], np.arange(2)),
    "one leaf twice": lambda e: e.tree_at(lambda t: (t[0], t[0]), [1, 2], (5, 6)),
    "one Module at both places": lambda e: e.tree_at(pair, [model(e, 1)] * 2, (5, 6)),
    "no nodes": lambda e: e.tree_at(lambda t: (), [1, 2], ()),
    "no nodes and a value": lambda e: e.tree_at(lambda t: (), [1, 2], (1,)),
    "an empty tuple": lambda e: e.tree_at(lambda t: t[1], [1, ()], 5),
    "the None that is the tree": lambda e: e.tree_at(lambda t: t, None, 5),
    "the only None": lambda e: e.tree_at(lambda t: t.b, model(e, 1), 5),
    "a None and a leaf": lambda e: e.tree_at(pair, [None, 1], (5, 6)),
    "both of two None as leaves": lambda e: e.tree_at(pair, [None, None], (5, 6), is_leaf=is_none),
    "a None that is not in the tree": lambda e: e.tree_at(lambda t: None, [1], 5),
    "a number": lambda e: e.tree_at(lambda t: 3, [3], 5),
    "bound methods": lambda e: e.tree_at(lambda t: [t.get], model(e, 1), [5]),
    "a copy of the tree": lambda e: e.tree_at(
        lambda t: jtu.tree_map(lambda x: x, t), [1, [2]], replace_fn=double
    ),
    "a static None": lambda e: e.tree_at(lambda t: t.s, static(e, None), 5),
    "a leaf below a bound method": lambda e: e.tree_at(
        lambda f: f.__self__.a, model(e, 1).get, 5
    )(),
    "one empty tuple of two": lambda e: e.tree_at(lambda t: t[1], [(), ()], 3),
    "below a tuple that is a leaf": lambda e: e.tree_at(
        lambda t: t[0][0], [(1, 2), 3], 5, is_leaf=is_tuple
    ),
    "a leaf that is a function": lambda e: e.tree_at(first, [len, 2], replace_fn=repr),
    "a choice by a static field": lambda e: e.tree_at(
        lambda t: t.w if t.s == 3 else t, static(e, 3), 5
    ),
}


def end_of(program, library):
    """The text of what a program returns, or the type of what it raises.

    Its warnings do not count: Equinox lets JAX warn of iterators that are taken for leaves.
    """
    found = output(lambda eqx: repr(program(eqx)), library)
    return found.raised or found.returned


def test_ends_as_on_equinox():
    ours, theirs = (
        {name: end_of(program, library) for name, program in AGREE.items()}
        for library in (eqxlike, equinox)
    )
    assert ours == theirs


# --- what eqxlike does otherwise ------------------------------------------------------------------


def put(tree):
    tree[0] = 5
    return tree[1]


# Each as (program, on Equinox, on eqxlike).
DIFFER = {
    "where puts something into the tree": (
        lambda e: e.tree_at(put, [1, 2], 7),
        TypeError,
        ValueError,
    ),
    "where asks a defaultdict for a key that it lacks": (
        lambda e: dict(e.tree_at(lambda t: t["z"], collections.defaultdict(list, a=2), 5)),
        "{'a': 2, 'z': 5}",
        ValueError,
    ),
    "a static None beside None as leaves": (
        lambda e: e.tree_at(lambda t: t.s, static(e, None), 5, is_leaf=is_none),
        ValueError,
        TypeError,
    ),
    "a bound method": (
        lambda e: e.tree_at(lambda t: t.get, model(e, 1), 5),
        TypeError,
        ValueError,
    ),
    "values from a generator": (
        lambda e: e.tree_at(pair, [1, 2], (value for value in (5, 6))),
        TypeError,
        "[5, 6]",
    ),
}


@pytest.mark.parametrize("program", DIFFER)
def test_ends_otherwise_than_on_equinox(program):
    function, theirs, ours = DIFFER[program]
    assert (end_of(function, equinox), end_of(function, eqxlike)) == (theirs, ours)
