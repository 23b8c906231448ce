"""`filter_vmap` and `if_array`: the axes of arguments and outputs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqxlike
from eqxlike import filter_vmap, if_array
from tests.transforms.models import Scale

MATRIX = jnp.arange(6.0).reshape(2, 3)


def test_decorator_takes_arguments():
    @filter_vmap(in_axes=1, out_axes=-1, axis_name="i", axis_size=3)
    def total(x):
        return x + jax.lax.axis_index("i").astype(x.dtype)

    assert total(MATRIX).tolist() == [[0, 2, 4], [3, 5, 7]]

    class Scale(eqxlike.Module):
        weight: Any

        @filter_vmap(in_axes={"self": None})
        def shared(self, x):
            return self.weight.sum() * x

    assert Scale(jnp.arange(2.0)).shared(jnp.array([3.0, 4.0])).tolist() == [3, 4]


# --- in_axes ------------------------------------------------------------------------------------


def test_by_default_only_arrays_of_the_arguments_are_mapped():
    def function(x, number, text, none, flag, factors=MATRIX):
        assert (text, none, flag) == ("t", None, True)
        return x.sum() * number + factors.sum(), text

    total, text = filter_vmap(function)(MATRIX, 2.0, "t", None, True)
    assert (total.tolist(), text) == ([21, 39], "t")
    for x in (np.arange(3.0), jnp.arange(3.0), jax.random.split(jax.random.key(0), 3)):
        assert filter_vmap(lambda x: jnp.ones(x.shape))(x).shape == (3,)
    assert filter_vmap(lambda x: x.sum())(jnp.ones((0, 3))).shape == (0,)
    assert filter_vmap(Scale(jnp.array(5.0)))(jnp.arange(2.0)).tolist() == [0, 5]
    # If nothing is mapped, the function is called directly.
    assert filter_vmap(lambda x: x + 1, in_axes=None, out_axes=None)(jnp.array(1)) == 2
    assert filter_vmap(lambda text: text * 2)("ab") == "abab"


def test_axes_may_be_a_prefix_or_functions_of_leaves():
    tree = {"x": jnp.arange(3), "y": jnp.array(1)}
    for in_axes in (
        ({"x": 0, "y": None},),
        (lambda leaf: 0 if leaf.ndim else None),
        ({"x": lambda leaf: 0, "y": lambda leaf: None},),
    ):
        added = filter_vmap(lambda tree: tree["x"] + tree["y"], in_axes=in_axes)(tree)
        assert added.tolist() == [1, 2, 3]
    # One axis for all arguments, and axes for only the arguments of the call.
    added = filter_vmap(lambda x, y: x.sum() + y.sum(), in_axes=1)(MATRIX, MATRIX)
    assert added.tolist() == [6, 10, 14]
    assert filter_vmap(lambda x, y=2: x * y, in_axes=(0,))(jnp.arange(3)).tolist() == [0, 2, 4]


def test_if_array_maps_only_arrays_and_is_a_leaf():
    assert [if_array(2)(leaf) for leaf in (MATRIX, np.ones(2), 1.0, "a")] == [2, 2, None, None]
    assert if_array(-1)(jnp.ones(2)) == -1
    mapped = filter_vmap(lambda tree: (tree[0].sum(), tree[1]), in_axes=if_array(1))
    total, text = mapped([MATRIX, "t"])
    assert (total.tolist(), text) == ([3, 5, 7], "t")
    assert jtu.tree_leaves([if_array(0), None, 1]) == [if_array(0), 1]


def test_axes_of_variadic_arguments_are_given_by_one_name():
    x, y = jnp.arange(2), jnp.array(4)
    for axes, other, expected in [(None, jnp.array(3), [7, 8]), ((0, None), x, [4, 6])]:
        added = filter_vmap(lambda x, *others: x + sum(others), in_axes={"others": axes})
        assert added(x, other, y).tolist() == expected


def test_axes_are_given_by_parameter_names_and_default_to_the_first_axis():
    x = jnp.arange(3.0)
    mapped = filter_vmap(lambda x, y, s: (x + y, s), in_axes={"y": None})
    added, text = mapped(x, jnp.array(3.0), "s")
    assert (added.tolist(), text) == ([3, 4, 5], "s")
    partial = functools.partial(lambda x, y: x + y, jnp.array(1.0))
    assert filter_vmap(partial, in_axes={"y": 0})(x).tolist() == [1, 2, 3]
    by_prefix = filter_vmap(
        lambda tree, y: tree["a"] * tree["b"] + y.sum(), in_axes={"tree": {"a": 0, "b": None}}
    )
    assert by_prefix({"a": x, "b": jnp.array(2.0)}, MATRIX.T).tolist() == [3, 7, 11]


# --- out_axes -----------------------------------------------------------------------------------


def test_by_default_only_arrays_of_the_output_are_stacked():
    function = lambda x: (jnp.ones(1), np.ones(1, np.float32), 3, "s", None, jnp.sin)
    output = filter_vmap(function)(MATRIX)
    assert [each.tolist() for each in output[:2]] == [[[1], [1]]] * 2
    assert output[2:] == (3, "s", None, jnp.sin)
    number, once = filter_vmap(lambda x: (3, jnp.ones(1)), out_axes=(0, None))(MATRIX)
    assert (number.tolist(), once.tolist()) == ([3, 3], [1])


def test_out_axes_may_be_a_prefix_or_functions():
    function = lambda x: {"a": (x, [x]), "b": (x, jnp.ones(1))}
    for out_axes in ({"a": 1, "b": (0, None)}, {"a": lambda leaf: 1, "b": (lambda leaf: 0, None)}):
        output = filter_vmap(function, out_axes=out_axes)(MATRIX)
        shapes = jtu.tree_map(jnp.shape, output)
        assert shapes == {"a": ((3, 2), [(3, 2)]), "b": ((2, 3), (1,))}
    x = jnp.arange(24.0).reshape(2, 3, 4)
    for axis in (-3, 1, -1):
        assert eqxlike.tree_equal(filter_vmap(lambda x: x, in_axes=axis, out_axes=axis)(x), x)


# --- axis_name, axis_size -----------------------------------------------------------------------


def test_axis_size_stacks_if_nothing_is_mapped():
    for in_axes in (None, lambda leaf: None):
        stacked = filter_vmap(lambda x: x, in_axes=in_axes, axis_size=3)(jnp.array(2.0))
        assert stacked.tolist() == [2, 2, 2]
    assert filter_vmap(lambda: jnp.array(1.0), axis_size=3)().tolist() == [1, 1, 1]


# --- errors -------------------------------------------------------------------------------------


def test_exception_of_the_function_passes_through():
    def fail(x):
        raise error

    error = ValueError("axis spec None")
    with pytest.raises(ValueError, match="axis spec None") as caught:
        filter_vmap(fail, out_axes=None)(MATRIX)
    assert caught.value is error
