"""Rows of many leaves or nodes are flattened together, with the same result as one by one."""

import collections
import itertools
import math
import sys

import hypothesis
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eqxlike import filter_jit, is_array
from eqxlike._partition import Row, concrete_array_types, flatten
from tests.examples import at_most
from tests.partition.models import Pair, arrays_of, structure_of
from tests.partition.statics import Colour


class Foreign:
    def __init__(self, children):
        self.children = (*children,)


jtu.register_pytree_node(Foreign, lambda it: (it.children, None), lambda _, ch: Foreign(ch))

CONTAINERS = {
    "list": list,
    "tuple": tuple,
    "dict": lambda leaves: {f"{i:02}": leaf for i, leaf in enumerate(leaves)},
    "dict-of-numbers": lambda leaves: dict(enumerate(leaves)),
    "ordered-dict": lambda leaves: collections.OrderedDict(enumerate(leaves)),
    "foreign": Foreign,
}
containers = st.sampled_from([*CONTAINERS.values()])

ARRAYS = [
    *(jnp.ones(2), jnp.arange(3), jax.random.key(0)),
    *(np.ones(2), np.float32(1), np.int64(1), np.bool_(True)),
]
NUMBERS = [0, 1, True, False, 0.0, -0.0, 1.0, math.nan, -math.nan, math.inf]
KNOWN = [*ARRAYS, *NUMBERS, "a", "", b"a", None]
# If a row contains one of these leaves, its leaves are flattened one by one.
UNKNOWN = [Colour.RED, 1j, len, (), [1], Pair(1)]
known = st.sampled_from(KNOWN)
leaves = st.one_of(known, st.sampled_from(UNKNOWN))
NODES = {
    "module": Pair,
    "module-with-list": lambda leaf: Pair([leaf], mode=1),
    "tuple": lambda leaf: (leaf, 1),
    "list": lambda leaf: [leaf],
    "dict": lambda leaf: {"a": leaf},
    "foreign": lambda leaf: Foreign([leaf, 1]),
    "in-module": lambda leaf: Pair(Pair(Foreign([leaf]))),
}


rows = st.lists(known, min_size=63, max_size=70) | st.lists(leaves, min_size=63, max_size=70)
changes = leaves | st.builds(lambda leaf: (leaf, 1), known)
few = at_most(40, suppress_health_check=[hypothesis.HealthCheck.too_slow])


def describe_leaf(leaf):
    sign = math.copysign(1, leaf) if isinstance(leaf, float) else None
    return "array" if is_array(leaf) else (type(leaf), repr(leaf), sign)


def describe(tree):
    """The structure and the leaves of a tree, without the values of arrays."""
    return jtu.tree_structure(tree), [*map(describe_leaf, jtu.tree_leaves(tree))]


def replaced(leaves, place, leaf):
    place %= len(leaves)
    return [*leaves[:place], leaf, *leaves[place + 1 :]]


@few
@given(rows, st.integers(0, 62), changes, containers)
def test_rows_share_a_structure_exactly_if_types_and_values_are_equal(row, place, leaf, put):
    first, second = put(row), put(replaced(row, place, leaf))
    is_same = describe(first) == describe(second)
    assert (structure_of(first) is structure_of(second)) == is_same


@few
@given(rows, st.integers(0, 62), changes, containers)
def test_calls_match_the_plain_function_when_a_leaf_changes(row, place, leaf, put):
    first, second = put(row), put(replaced(row, place, leaf))
    jitted = filter_jit(lambda tree: (str(describe(tree)), tree))
    with jax.disable_jit():
        for tree in [first, first, second, second, first, second]:
            shown, returned = jitted(tree)
            assert shown == str(describe(tree))
            assert describe(returned) == describe(tree)
            assert arrays_of(returned) == arrays_of(tree)


def test_64_leaves_of_known_types_are_one_row():
    leaves = [KNOWN[index % len(KNOWN)] for index in range(64)]
    for put in CONTAINERS.values():
        [row] = structure_of(put(leaves)).children
        assert isinstance(row, Row)
    assert len(structure_of([1.0] * 63).children) == 63
    for leaf in UNKNOWN:
        assert len(structure_of([*[1.0] * 63, leaf]).children) == 64


def test_16_nodes_of_one_structure_are_one_run():
    for make in NODES.values():
        nodes = [make(jnp.ones(2)) for _ in range(16)]
        assert structure_of(nodes).has_run
        assert not structure_of(nodes[:-1]).has_run
        assert not structure_of([*nodes[:-1], make("a")]).has_run


@pytest.fixture
def no_types_met():
    """Simulates a process that has not flattened an array yet."""
    known = {*concrete_array_types}
    concrete_array_types.intersection_update({np.ndarray})
    yield
    concrete_array_types.update(known)


MET_FIRST = {
    "jax": lambda i: jnp.full(2, i, jnp.float32),
    "numpy": lambda i: np.full(2, i, np.float32),
    "numpy-scalars": np.float32,
    "in-turn": lambda i: [jnp.float32, np.float32, np.array][i % 3](float(i)),
}


@pytest.mark.parametrize("name", MET_FIRST)
def test_warm_call_needs_no_walk_for_array_types_first_met_in_a_row(
    name, no_types_met, monkeypatch
):
    monkeypatch.setattr("eqxlike._partition._flatten._depth", 0)
    arrays = [MET_FIRST[name](index) for index in range(70)]
    # Rows with 0, 1, 35 and 69 numbers, and otherwise arrays.
    tree = [[*[1.0] * count, *arrays[count:]] for count in (0, 1, 35, 69)]
    jitted = filter_jit(lambda tree: None)
    for _ in range(3):
        jitted(tree)
    called = []
    sys.setprofile(lambda frame, event, _: event == "call" and called.append(frame.f_code.co_name))
    try:
        jitted(tree)
    finally:
        sys.setprofile(None)
    assert "flatten" not in called


@pytest.mark.parametrize("num_statics", [0, 1, 69, 70])
def test_row_of_shape_structs_has_the_structure_of_arrays(num_statics):
    statics = [index % 2 == 0 for index in range(num_statics)]
    arrays = [jnp.ones(2)] * (70 - num_statics)
    structs = [jax.ShapeDtypeStruct((2,), jnp.float32)] * (70 - num_statics)
    found, structure = flatten([*statics, *structs], with_abstract=True)
    assert structure is structure_of([*statics, *arrays])
    assert found == structs
    # Without the option, structs are static.
    assert flatten([*statics, *structs])[0] == []


def test_number_of_traces_matches_jax(no_types_met):
    def count(jit):
        traces = 0

        def function(tree):
            nonlocal traces
            traces += 1
            return jtu.tree_leaves(tree)[-1] + 1

        jitted = jit(function)
        for kind in ("numpy-scalars", "in-turn", "numpy", "jax"):
            tree = CONTAINERS["dict"](map(MET_FIRST[kind], range(64)))
            for _ in range(2):
                jitted(tree)
            jax.jit(lambda tree: jitted(tree))(tree)
            jax.vmap(lambda _, tree=tree: jitted(tree))(jnp.ones(2))
        return traces

    assert count(filter_jit) == count(jax.jit)


# --- runs: many nodes of one Structure -----------------------------------------------------------


# A node that contains a run, and a node without arrays.
MORE_NODES = [
    lambda number: [(np.array(number), i, "x") for i in [0] * 17],
    lambda number: ("only", ("static", 1)),
]


def test_calls_return_their_runs_unchanged():
    containers = [*CONTAINERS.values(), lambda them: Pair([*them]), lambda them: Pair((*them,))]
    # Each kind of node and each container is used at least once.
    for make, put in zip([*NODES.values(), *MORE_NODES], itertools.cycle(containers), strict=False):
        jitted = filter_jit(lambda tree: tree)
        with jax.disable_jit(make is not Pair):
            for shift in range(3):
                tree = put([make(jnp.float32(number + shift)) for number in range(20)])
                (leaves, treedef), (others, same) = map(jtu.tree_flatten, (jitted(tree), tree))
                assert treedef == same
                assert jax.device_get(leaves) == jax.device_get(others)


@pytest.mark.parametrize(("element", "place"), [("module", 0), ("dict", 19)])
def test_different_element_of_a_run_is_traced_again(element, place):
    count = 0

    @filter_jit
    def structure(tree):
        nonlocal count
        count += 1
        return str(jtu.tree_structure(tree))

    elements = [NODES[element](jnp.float32(number)) for number in range(20)]
    changed = replaced(elements, place, (jnp.zeros(()), "other"))
    for tree in (elements, changed, elements, changed, elements[:-1], [*elements, elements[0]]):
        assert structure(tree) == str(jtu.tree_structure(tree))
    assert count == 4
