"""Flattening and unflattening Modules: laws of pytrees, on random trees."""

import functools
from typing import Any

import equinox
import jax.tree_util as jtu
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import eqxlike


@functools.cache
def classes(eqx):
    """The same classes on either library, with dynamic, static, mixed and no fields."""

    class Pair(eqx.Module):
        first: Any
        second: Any

    class Label(eqx.Module):
        name: str = eqx.field(static=True)
        size: int = eqx.field(static=True)

    class Mixed(Pair):
        name: str = eqx.field(static=True)
        third: Any

    class Empty(eqx.Module):
        pass

    return Pair, Label, Mixed, Empty


NUMBERS = st.integers(-5, 5) | st.floats(-5, 5) | st.booleans()
LEAVES = (
    NUMBERS
    | st.text("ab", max_size=2)
    | st.lists(st.floats(-5, 5, width=32), max_size=3).map(lambda x: np.array(x, np.float32))
)
# Nested tuples describe a tree, so that both libraries can build it.
PLANS = st.recursive(
    st.tuples(st.just("leaf"), LEAVES)
    | st.just(("none",))
    | st.just(("empty",))
    | st.tuples(st.just("label"), st.sampled_from("ab"), st.integers(0, 2)),
    lambda plans: (
        st.tuples(st.just("pair"), plans, plans)
        | st.tuples(st.just("mixed"), plans, plans, st.sampled_from("ab"), plans)
        | st.tuples(st.just("list"), st.lists(plans, max_size=3))
        | st.tuples(st.just("dict"), st.dictionaries(st.sampled_from("abc"), plans))
    ),
    max_leaves=8,
)


def build(plan, eqx=eqxlike):
    Pair, Label, Mixed, Empty = classes(eqx)
    match plan:
        case ("leaf", value):
            return value
        case ("none",):
            return None
        case ("empty",):
            return Empty()
        case ("label", name, size):
            return Label(name, size)
        case ("pair", first, second):
            return Pair(build(first, eqx), build(second, eqx))
        case ("mixed", first, second, name, third):
            return Mixed(build(first, eqx), build(second, eqx), name, build(third, eqx))
        case ("list", items):
            return [build(item, eqx) for item in items]
        case ("dict", items):
            return {key: build(item, eqx) for key, item in items.items()}


def identical(leaves, others):
    return len(leaves) == len(others) and all(map(lambda x, y: x is y, leaves, others))


@given(PLANS)
def test_unflatten_is_the_inverse_of_flatten(plan):
    tree = build(plan)
    leaves, treedef = jtu.tree_flatten(tree)
    rebuilt = treedef.unflatten(leaves)
    assert jtu.tree_structure(rebuilt) == treedef
    assert identical(jtu.tree_leaves(rebuilt), leaves)
    assert eqxlike.tree_equal(rebuilt, tree, typematch=True)
    anything = [object() for _ in leaves]
    assert identical(jtu.tree_leaves(treedef.unflatten(anything)), anything)
    assert hash(jtu.tree_structure(build(plan))) == hash(treedef)
    with_path, same = jtu.tree_flatten_with_path(tree)
    assert same == treedef
    assert identical([leaf for _, leaf in with_path], leaves)
    assert len({path for path, _ in with_path}) == len(leaves)


@given(PLANS.map(lambda plan: (plan, plan)) | st.tuples(PLANS, PLANS))
def test_leaves_paths_and_equality_of_structures_match_equinox(plans):
    def found(eqx):
        one, other = (build(plan, eqx) for plan in plans)
        named = [
            (jtu.keystr(path), type(leaf), str(leaf))
            for path, leaf in jtu.tree_leaves_with_path(one)
        ]
        return named, jtu.tree_structure(one) == jtu.tree_structure(other)

    assert found(eqxlike) == found(equinox)


def test_file_name_of_generated_code_names_the_class():
    Pair, *_ = classes(eqxlike)
    assert Pair.__qualname__ in Pair._eqxlike_class.codec.flatten.__code__.co_filename
