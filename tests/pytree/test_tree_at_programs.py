"""One registry of short programs with `tree_at`, run on Equinox and on eqxlike: the same outputs.

`AGREE` holds those that return the same, or raise an error of the same type; `DIFFER` those where
eqxlike departs from Equinox on purpose, with what it does instead.
"""

import collections
from typing import Any, NamedTuple

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqxlike
from tests.beside_equinox import output

X = jnp.ones(2)


class Point(NamedTuple):
    x: Any
    y: Any = 0


def make_modules(eqx):
    class Model(eqx.Module):
        a: Any
        b: Any = None

        def get(self):
            return self.a

        @property
        def first(self):
            return self.b[0]

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


def pop(tree):
    return tree.pop()


def leaves_of_type(kind):
    return lambda tree: [leaf for leaf in jtu.tree_leaves(tree) if isinstance(leaf, kind)]


def pair(tree):
    return tree[0], tree[1]


def first(tree):
    return tree[0]


AGREE = {
    # One node.
    "a leaf": lambda e: e.tree_at(first, [1, 2], 5),
    "a leaf that is the tree": lambda e: e.tree_at(lambda t: t, 1, 5),
    "a leaf of a Module in a Module": lambda e: e.tree_at(
        lambda t: t.a.a, model(e, model(e, 1)), 5
    ),
    "a subtree": lambda e: e.tree_at(first, [[1, 2], 3], 5),
    "a subtree by a subtree": lambda e: e.tree_at(first, [1, 2], {"k": [1, 2]}),
    "a subtree by nothing": lambda e: e.tree_at(lambda t: t.a, model(e, [1, 2]), None),
    "a leaf by a tuple": lambda e: e.tree_at(first, [1, 2], (5, 6)),
    "through a property": lambda e: e.tree_at(lambda t: t.first, model(e, 1, [2]), 5),
    "through a method": lambda e: e.tree_at(lambda t: t.get(), model(e, 1), 5),
    "by a negative index": lambda e: e.tree_at(lambda t: t[-1], [1, 2], 5),
    "by the length": lambda e: e.tree_at(lambda t: t[len(t) - 1], [1, 2], 5),
    "in a dict with integer keys": lambda e: e.tree_at(lambda t: t[1], {0: 1, 1: 2}, 5),
    "in an OrderedDict": lambda e: e.tree_at(
        lambda t: t["a"], collections.OrderedDict(b=1, a=2), 5
    ),
    "in a defaultdict": lambda e: e.tree_at(
        lambda t: t["a"], collections.defaultdict(list, b=1, a=2), 5
    ),
    "in a namedtuple": lambda e: e.tree_at(lambda t: t.y, Point(1, 2), 5),
    "in a Partial": lambda e: e.tree_at(lambda t: t.args[0], jtu.Partial(max, 1), 5).args,
    "by keyword arguments": lambda e: e.tree_at(where=first, pytree=[1], replace=3),
    # Several nodes.
    "two nodes as a tuple": lambda e: e.tree_at(pair, [1, 2, 3], (5, 6)),
    "two nodes as a list": lambda e: e.tree_at(lambda t: [t[0], t[1]], [1, 2, 3], [5, 6]),
    "two nodes as a namedtuple": lambda e: e.tree_at(lambda t: Point(t[0], t[1]), [1, 2], (5, 6)),
    "two nodes in the other order": lambda e: e.tree_at(lambda t: (t[1], t[0]), [1, 2], (5, 6)),
    "two nodes of a dict": lambda e: e.tree_at(
        lambda t: list(t.values()), {0: 1, 1: 2}, replace=(5, 6)
    ),
    "a slice": lambda e: e.tree_at(lambda t: t[:2], [1, 2, 3], (5, 6)),
    "a slice that is a copy": lambda e: e.tree_at(lambda t: t[:], [1, 2, 3], (5, 6, 7)),
    "a slice that is the tuple itself": lambda e: e.tree_at(lambda t: t[:], (1, 2), (5, 6)),
    "the tree in a list": lambda e: e.tree_at(lambda t: [t], [1, 2], [5]),
    "all leaves": lambda e: e.tree_at(jtu.tree_leaves, [1, [2]], replace_fn=double),
    "values as an array": lambda e: e.tree_at(pair, [1, 2], np.arange(2)),
    "values as a range": lambda e: e.tree_at(pair, [1, 2], range(2)),
    "values as text": lambda e: e.tree_at(pair, [1, 2], "ab"),
    "values as a dict": lambda e: e.tree_at(pair, [1, 2], {"a": 1, "b": 2}),
    "one leaf twice": lambda e: e.tree_at(lambda t: (t[0], t[0]), [1, 2], (5, 6)),
    "one array twice": lambda e: e.tree_at(lambda t: (t[0], t[0]), [X, 2], (5, 6)),
    "one subtree twice": lambda e: e.tree_at(lambda t: (t[0], t[0]), [[1], 2], (5, 6)),
    "one Module twice": lambda e: e.tree_at(lambda t: (t[0], t[0]), [model(e, 1)], (5, 6)),
    "one array at two places": lambda e: e.tree_at(first, [X, X], 5)[0],
    "one array at both places": lambda e: e.tree_at(pair, [X, X], (5, 6)),
    "one Module at both places": lambda e: e.tree_at(pair, [model(e, 1)] * 2, (5, 6)),
    "nodes of one type": lambda e: e.tree_at(
        lambda t: [n for n in jtu.tree_leaves(t, is_leaf=is_tuple) if is_tuple(n)],
        [(1, 2), 3, (4,)],
        replace_fn=len,
    ),
    # Nothing.
    "no nodes": lambda e: e.tree_at(lambda t: (), [1, 2], ()),
    "no nodes and a function": lambda e: e.tree_at(lambda t: [], [1, 2], replace_fn=double),
    "no nodes beside an empty tuple": lambda e: e.tree_at(lambda t: (), [1, ()], ()),
    "no nodes and a value": lambda e: e.tree_at(lambda t: (), [1, 2], (1,)),
    "no nodes and no sequence": lambda e: e.tree_at(lambda t: (), [1, 2], 5),
    "an empty tuple": lambda e: e.tree_at(lambda t: t[1], [1, ()], 5),
    "two empty tuples": lambda e: e.tree_at(pair, [(), ()], (5, 6)),
    "the empty tuple": lambda e: e.tree_at(lambda t: t, (), 5),
    "the None that is the tree": lambda e: e.tree_at(lambda t: t, None, 5),
    "a None by its value": lambda e: e.tree_at(lambda t: None, [1, None], 5),
    "the only None": lambda e: e.tree_at(lambda t: t.b, model(e, 1), 5),
    "a None and a leaf": lambda e: e.tree_at(pair, [None, 1], (5, 6)),
    "one None of two": lambda e: e.tree_at(first, [None, None], 5),
    "both of two None": lambda e: e.tree_at(pair, [None, None], (5, 6)),
    "one None of two as a leaf": lambda e: e.tree_at(first, [None, None], 5, is_leaf=is_none),
    "both of two None as leaves": lambda e: e.tree_at(pair, [None, None], (5, 6), is_leaf=is_none),
    "a None that is not in the tree": lambda e: e.tree_at(lambda t: None, [1], 5),
    # What the replacement is made of.
    "a function of a leaf": lambda e: e.tree_at(first, [1, 2], replace_fn=double),
    "a function of a list": lambda e: e.tree_at(first, [[1, 2], 3], replace_fn=double),
    "a function of a Module": lambda e: e.tree_at(
        first, [model(e, 1, 2)], replace_fn=lambda m: m.a + m.b
    ),
    "a function of two nodes": lambda e: e.tree_at(pair, [1, [2]], replace_fn=repr),
    "a function of the tree": lambda e: e.tree_at(lambda t: t, [1, [2]], replace_fn=repr),
    "a function of a None": lambda e: e.tree_at(
        first, [None, 1], replace_fn=is_none, is_leaf=is_none
    ),
    "a function that raises": lambda e: e.tree_at(first, [1], replace_fn=lambda x: x.foo),
    "a function that is none": lambda e: e.tree_at(first, [1], replace_fn=None),
    "a value and a function": lambda e: e.tree_at(first, [1], 1, double),
    "a None and a function": lambda e: e.tree_at(first, [1], None, double),
    "neither value nor function": lambda e: e.tree_at(first, [1]),
    "a tracer": lambda e: jax.jit(lambda x: e.tree_at(first, [x, x], x + 1))(1.0),
    # Lengths.
    "too few values": lambda e: e.tree_at(pair, [1, 2], (5,)),
    "too many values": lambda e: e.tree_at(pair, [1, 2], (5, 6, 7)),
    "one number for two nodes": lambda e: e.tree_at(pair, [1, 2], 5),
    "None for two nodes": lambda e: e.tree_at(pair, [1, 2], None),
    "a Module for two nodes": lambda e: e.tree_at(pair, [1, 2], model(e, 1)),
    # `where` asks too much.
    "where raises IndexError": lambda e: e.tree_at(lambda t: t[9], [1], 1),
    "where raises KeyError": lambda e: e.tree_at(lambda t: t["z"], {"a": 1}, 1),
    "where raises AttributeError": lambda e: e.tree_at(lambda t: t.zz, model(e, 1), 1),
    "where is no function": lambda e: e.tree_at("a", {"a": 1}, 1),
    "where calculates": lambda e: e.tree_at(lambda t: t[0] + 1, [1, 2], 5),
    "where compares": lambda e: e.tree_at(lambda t: t[0] if t[0] > 1 else t[1], [1, 2], 5),
    "where asks if equal": lambda e: e.tree_at(lambda t: t[t[0] == 1], [1, 2], 5),
    "where asks for truth": lambda e: e.tree_at(lambda t: t[0] if t[0] else t[1], [0, 2], 5),
    "where asks for an array's truth": lambda e: e.tree_at(lambda t: t[0] if t[0] else 1, [X], 5),
    "where asks for text": lambda e: e.tree_at(lambda t: t[str(t[0]) == "1"], [1, 2], 5),
    "where asks for a type": lambda e: e.tree_at(leaves_of_type(int), [1, 2.0], (7,)),
    "where asks for None": lambda e: e.tree_at(
        lambda t: t[t[1] is None], [1, None], 5, is_leaf=is_none
    ),
    "where asks for a shape": lambda e: e.tree_at(lambda t: t[0].shape, [X], 5),
    "where indexes a leaf": lambda e: e.tree_at(lambda t: t[0][0], [X], 5),
    "where calls a leaf": lambda e: e.tree_at(lambda t: t[0](), [len], 5),
    "where updates an array": lambda e: e.tree_at(lambda t: t[0].at[0].set(1), [X], 5),
    "where pops": lambda e: e.tree_at(pop, [1, 2], 7),
    # `where` returns what is no node.
    "a number": lambda e: e.tree_at(lambda t: 3, [3], 5),
    "a leaf and a number": lambda e: e.tree_at(lambda t: (t[0], 3), [3], (5, 6)),
    "an array": lambda e: e.tree_at(lambda t: jnp.ones(3), [X], 5),
    "an array of the tree by its value": lambda e: e.tree_at(lambda t: X, [X], 5),
    "a list that it made": lambda e: e.tree_at(lambda t: [[1]], [X], 5),
    "a comparison": lambda e: e.tree_at(lambda t: t[0] == t[1], [X, X], 5),
    "bound methods": lambda e: e.tree_at(lambda t: [t.get], model(e, 1), [5]),
    "a deque of nodes": lambda e: e.tree_at(lambda t: collections.deque(t), [1, 2], (5, 6)),
    "a set of nodes": lambda e: e.tree_at(lambda t: set(t), [1, 2], (5, 6)),
    "a dict of nodes": lambda e: e.tree_at(lambda t: {"a": t[0]}, [1, 2], {"a": 5}),
    "a Module of nodes": lambda e: e.tree_at(lambda t: model(e, t[0], t[1]), [1, 2], (5, 6)),
    "an array of nodes": lambda e: e.tree_at(lambda t: np.array(t), [1, 2], (5, 6)),
    "a copy of the tree": lambda e: e.tree_at(
        lambda t: jtu.tree_map(lambda x: x, t), [1, [2]], replace_fn=double
    ),
    "a tuple in a tuple": lambda e: e.tree_at(lambda t: (pair(t), t[2]), [1, 2, 3], ((5, 6), 7)),
    "a node and its child": lambda e: e.tree_at(lambda t: (t[0], t[0][0]), [[1], 2], (5, 6)),
    "a child and its node": lambda e: e.tree_at(lambda t: (t[0][0], t[0]), [[1], 2], (5, 6)),
    # Static parts.
    "a static number": lambda e: e.tree_at(lambda t: t.s, static(e, 3), 5),
    "a static text": lambda e: e.tree_at(lambda t: (t.w, t.s), static(e, "s"), (5, 6)),
    "a static None": lambda e: e.tree_at(lambda t: t.s, static(e, None), 5),
    "a static tuple": lambda e: e.tree_at(lambda t: t.s, static(e, (1, 2)), (5, 6)),
    "a static empty tuple": lambda e: repr(e.tree_at(lambda t: t.s, static(e, ()), ())),
    "a static function": lambda e: e.tree_at(lambda t: t.s, static(e, jnp.sin), 5),
    "a static Module": lambda e: e.tree_at(lambda t: t.s, static(e, model(e, 1)), 5),
    "a leaf of a static Module": lambda e: e.tree_at(lambda t: t.s.a, static(e, model(e, 1)), 5),
    "the function of a Partial": lambda e: e.tree_at(lambda t: t.func, jtu.Partial(max, 1), min),
    # Bound methods.
    "a leaf below a bound method": lambda e: e.tree_at(
        lambda f: f.__self__.a, model(e, 1).get, 5
    )(),
    "the instance of a bound method": lambda e: e.tree_at(
        lambda f: f.__self__, model(e, 1).get, model(e, 2)
    )(),
    "a leaf through a bound method": lambda e: e.tree_at(
        lambda t: t.get.__self__.a, model(e, 1), 5
    ),
    # `is_leaf`.
    "a tuple that is a leaf": lambda e: e.tree_at(
        first, [(1, 2)], replace_fn=len, is_leaf=is_tuple
    ),
    "below a tuple that is a leaf": lambda e: e.tree_at(
        lambda t: t[0][0], [(1, 2), 3], 5, is_leaf=is_tuple
    ),
    "the tree as a leaf": lambda e: e.tree_at(lambda t: t, [1, 2], 5, is_leaf=lambda node: True),
    "beside a None that is a leaf": lambda e: e.tree_at(
        lambda t: t[1], [None, 1], 5, is_leaf=is_none
    ),
}


def end_of(program, library):
    """The text of what a program returns, or the type of what it raises.

    Its warnings do not count: Equinox lets JAX warn of iterators that are taken for leaves.
    """
    found = output(lambda eqx: repr(program(eqx)), library)
    return found.raised or found.returned


@pytest.mark.parametrize("program", AGREE)
def test_ends_as_on_equinox(program):
    assert end_of(AGREE[program], eqxlike) == end_of(AGREE[program], equinox)


# --- what eqxlike does otherwise ------------------------------------------------------------------


def put(tree):
    tree[0] = 5
    return tree[1]


def append(tree):
    tree.append(5)
    return tree[0]


def add_key(tree):
    tree["c"] = 5
    return tree["a"]


# Each as (program, on Equinox, on eqxlike).
DIFFER = {
    "where puts something into the tree": (
        lambda e: e.tree_at(put, [1, 2], 7),
        TypeError,
        ValueError,
    ),
    "where appends to the tree": (
        lambda e: e.tree_at(append, [1, 2], 7),
        TypeError,
        ValueError,
    ),
    "where adds a key to the tree": (
        lambda e: e.tree_at(add_key, {"a": 1}, 7),
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
