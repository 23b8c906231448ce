"""Laws of `tree_at`, on any tree."""

import equinox
import jax.tree_util as jtu
from hypothesis import assume, given
from hypothesis import strategies as st

import eqxlike
from eqxlike import tree_at
from tests.pytree.trees import follow, trees_of

TREES = trees_of(st.integers() | st.text(max_size=2), max_leaves=10, max_size=2)


@st.composite
def trees_with_paths(draw, num_paths=1):
    """A tree, and paths to nodes of it, none of which lies inside another."""
    tree = draw(TREES)
    paths = [path for path, _ in jtu.tree_leaves_with_path(tree)]
    assume(len(paths) >= num_paths)
    chosen = draw(
        st.lists(st.sampled_from(paths), min_size=num_paths, max_size=num_paths, unique=True)
    )
    if num_paths == 1:
        chosen = [chosen[0][: draw(st.integers(0, len(chosen[0])))]]
    return tree, chosen


@given(trees_with_paths())
def test_what_was_put_is_found(tree_and_path):
    tree, (path,) = tree_and_path
    value = object()
    assert follow(tree_at(lambda tree: follow(tree, path), tree, value), path) is value


@given(trees_with_paths())
def test_putting_what_was_there_changes_nothing(tree_and_path):
    tree, (path,) = tree_and_path
    same = tree_at(lambda tree: follow(tree, path), tree, follow(tree, path))
    assert eqxlike.tree_equal(same, tree, typematch=True)


@given(trees_with_paths())
def test_the_last_put_counts(tree_and_path):
    tree, (path,) = tree_and_path

    def put(tree, value):
        return tree_at(lambda tree: follow(tree, path), tree, value)

    assert eqxlike.tree_equal(put(put(tree, 1), 2), put(tree, 2), typematch=True)


@given(trees_with_paths(num_paths=2))
def test_two_replaced_at_once_are_two_replaced_in_turn(tree_and_paths):
    tree, (one, other) = tree_and_paths
    at_once = tree_at(lambda tree: (follow(tree, one), follow(tree, other)), tree, ("new", 7.5))
    in_turn = tree_at(lambda tree: follow(tree, one), tree, "new")
    in_turn = tree_at(lambda tree: follow(tree, other), in_turn, 7.5)
    assert eqxlike.tree_equal(at_once, in_turn, typematch=True)


@given(trees_with_paths())
def test_everything_else_is_shared(tree_and_path):
    tree, (path,) = tree_and_path
    replaced = tree_at(lambda tree: follow(tree, path), tree, None)
    others = [leaf for place, leaf in jtu.tree_leaves_with_path(tree) if place[: len(path)] != path]
    assert [id(leaf) for leaf in jtu.tree_leaves(replaced)] == [id(leaf) for leaf in others]


@given(trees_with_paths())
def test_the_argument_is_left_alone(tree_and_path):
    tree, (path,) = tree_and_path
    leaves, treedef = jtu.tree_flatten(tree)
    tree_at(lambda tree: follow(tree, path), tree, object())
    assert (jtu.tree_leaves(tree), jtu.tree_structure(tree)) == (leaves, treedef)


@given(trees_with_paths())
def test_replace_fn_gets_the_old_node(tree_and_path):
    tree, (path,) = tree_and_path
    replaced = tree_at(lambda tree: follow(tree, path), tree, replace_fn=lambda node: [node])
    (node,) = follow(replaced, path)
    assert eqxlike.tree_equal(node, follow(tree, path), typematch=True)


@given(trees_with_paths())
def test_agrees_with_equinox(tree_and_path):
    tree, (path,) = tree_and_path
    outputs = [
        eqx.tree_at(lambda tree: follow(tree, path), tree, replace_fn=lambda node: (node, "new"))
        for eqx in (eqxlike, equinox)
    ]
    assert eqxlike.tree_equal(*outputs, typematch=True)
