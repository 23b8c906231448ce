"""What may stand beside a tree as its tangent, and what the messages say of anything else."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eqxlike
from eqxlike._transforms._derivatives._tangents import check_structure, leaves_beside, tangents_of

F32 = jnp.float32(1)
Pair = collections.namedtuple("Pair", ["first", "second"])


class Model(eqxlike.Module):
    weight: Any
    others: Any = ()
    size: int = eqxlike.field(static=True, default=1)


def beside(tree, tangents):
    return leaves_beside(jtu.tree_structure(tree), tangents, "tangents", "primals")


def checked(leaf, tangent):
    treedef = jtu.tree_structure({"a": 0})
    return tangents_of([leaf], treedef, {"a": tangent}, "tangents", "primals")[0]


trees = st.recursive(
    st.integers(),
    lambda trees: (
        st.lists(trees, max_size=3)
        | st.dictionaries(st.sampled_from("ab"), trees)
        | st.builds(Pair, trees, trees)
        | st.builds(Model, trees, trees)
    ),
    max_leaves=8,
)


@given(trees, st.data())
def test_none_stands_for_all_that_is_below(tree, data):
    paths = [path for path, _ in jtu.tree_leaves_with_path(tree)]
    cut = data.draw(st.sampled_from([(), *(path[: len(path) // 2] for path in paths)]))
    expected = [
        None if path[: len(cut)] == cut else leaf for path, leaf in jtu.tree_leaves_with_path(tree)
    ]
    assert beside(tree, _cut(tree, cut)) == expected


def _cut(tree, path):
    """`tree` with `None` at `path`."""
    if not path:
        return None
    pairs, treedef = jtu.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    return treedef.unflatten(
        [_cut(child, path[1:]) if key == path[:1] else child for key, child in pairs]
    )


@pytest.mark.parametrize(
    ("tree", "tangents", "message"),
    [
        (
            [1, (2, 3)],
            [1, (2,)],
            r"primals\[1\] is a tuple of length 2, and tangents\[1\] is a tuple of length 1",
        ),
        (
            {"a": [1]},
            {"a": (1,)},
            r"primals\['a'\] is a list of length 1, and tangents\['a'\] is a tuple of length 1",
        ),
        (
            [{"a": 1, "b": 2}],
            [{"a": 1}],
            r"primals\[0\] is a dict with the keys \['a', 'b'\], and tangents\[0\] is a dict with "
            r"the keys \['a'\]",
        ),
        (
            Model(1, (2,)),
            Model(1, 2),
            r"primals.others is a tuple of length 1, and tangents.others is a leaf of type int",
        ),
        (
            (Model(1),),
            (Model(1, size=2),),
            r"primals\[0\] is a node of type Model with size=1, and tangents\[0\] is a node of "
            "type Model with size=2",
        ),
        (
            (Model(1),),
            (F32,),
            r"primals\[0\] is a node of type Model, and tangents\[0\] is an array of shape \(\) "
            "and dtype float32",
        ),
        ((1, None), (1, 2), r"primals\[1\] is None, and tangents\[1\] is a leaf of type int"),
    ],
    ids=["length", "sequence", "keys", "leaf", "static field", "array", "None"],
)
def test_another_structure_is_an_error_that_names_the_path(tree, tangents, message):
    with pytest.raises(
        ValueError, match=f"^tangents must have the structure of primals: {message}"
    ):
        beside(tree, tangents)


def test_a_tangent_that_contains_itself_is_an_error():
    loop = []
    loop.append(loop)
    with pytest.raises(ValueError, match=r"tangents\[0\]"):
        beside([(1, 2)], loop)


def test_structure_without_none_is_required_where_it_is_checked():
    treedef = jtu.tree_structure([1, (2, 3)])
    check_structure(treedef, [1, (2, 3)], "new", "old")
    with pytest.raises(ValueError, match="new must have the structure of old, and has None in it"):
        check_structure(treedef, [1, None], "new", "old")


@pytest.mark.parametrize(
    ("leaf", "tangent"),
    [
        (F32, jnp.float32(2)),
        (F32, np.float32(2)),
        (np.float64(1), jnp.float32(2)),
        (1.0, jnp.float32(2)),
        (1j, jnp.complex64(2)),
        (jax.ShapeDtypeStruct((2,), jnp.float32), jnp.ones(2)),
    ],
    ids=repr,
)
def test_tangent_like_its_primal_is_kept(leaf, tangent):
    assert checked(leaf, tangent) is tangent


@pytest.mark.parametrize(
    ("leaf", "tangent"),
    [(jnp.bfloat16(1), 2.0), (jnp.complex64(1), 2.0), (jnp.complex64(1), 2j)],
    ids=repr,
)
def test_python_number_takes_the_dtype_of_its_primal(leaf, tangent):
    output = checked(leaf, tangent)
    assert (output.dtype, output) == (leaf.dtype, tangent)


def test_zero_of_jax_for_what_is_not_differentiable_is_none():
    assert checked(None, np.zeros(3, jax.dtypes.float0)) is None


@pytest.mark.parametrize(
    ("leaf", "tangent", "error", "message"),
    [
        (None, 2, TypeError, "must be None, since primals['a'] is not differentiable; it is a "),
        (F32, jnp.ones(2), ValueError, "must have the shape of primals['a'], which is (); it has "),
        (F32, 2, TypeError, "must have the dtype of primals['a'], which is float32; it has dtype "),
        (
            F32,
            2j,
            TypeError,
            "must have the dtype of primals['a'], which is float32; it has dtype ",
        ),
        (F32, jnp.bfloat16(1), TypeError, "which is float32; it has dtype bfloat16"),
        (F32, "b", TypeError, "must be an array like primals['a'], or None; it is a leaf of "),
        (F32, (F32,), TypeError, "must be an array like primals['a'], or None; it is a tuple of "),
    ],
    ids=["static", "shape", "int", "complex", "bfloat16", "str", "tuple"],
)
def test_tangent_unlike_its_primal_is_an_error_that_names_the_path(leaf, tangent, error, message):
    with pytest.raises(error) as caught:
        checked(leaf, tangent)
    assert str(caught.value).startswith("tangents['a'] must ")
    assert message in str(caught.value)
