"""`filter_vmap` and `if_array`: the axes of arguments and outputs, and what is refused."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqxlike
from eqxlike import filter_vmap, if_array

MATRIX = jnp.arange(6.0).reshape(2, 3)


class Model(eqxlike.Module):
    weight: Any
    size: Any = 3
    name: str = eqxlike.field(static=True, default="n")

    def __call__(self, x):
        return self.weight.sum() * x


# --- what is wrapped ----------------------------------------------------------------------------


def test_is_a_decorator_with_arguments():
    @filter_vmap(in_axes=1, out_axes=-1, axis_name="i", axis_size=3)
    def total(x):
        return x + jax.lax.axis_index("i").astype(x.dtype)

    assert total(MATRIX).tolist() == [[0, 2, 4], [3, 5, 7]]


# --- in_axes ------------------------------------------------------------------------------------


def test_the_identity_from_an_axis_to_the_same_axis_is_the_identity():
    x = jnp.arange(24.0).reshape(2, 3, 4)
    for axis in (-3, -1, 1, 2):
        same = filter_vmap(lambda x: x, in_axes=axis, out_axes=axis)(x)
        assert eqxlike.tree_equal(same, x)


def test_by_default_arrays_are_mapped_and_all_else_is_not():
    def function(x, number, text, none, flag, factors=MATRIX):
        assert (text, none, flag) == ("t", None, True)
        return x.sum() * number + factors.sum(), text

    total, text = filter_vmap(function)(MATRIX, 2.0, "t", None, True)
    assert (total.tolist(), text) == ([21, 39], "t")
    for x in (np.arange(3.0), jnp.arange(3.0), jax.random.split(jax.random.key(0), 3)):
        assert filter_vmap(lambda x: jnp.ones(x.shape))(x).shape == (3,)
    assert filter_vmap(lambda x: x.sum())(jnp.ones((0, 3))).shape == (0,)


def test_axes_may_be_a_prefix_or_functions_of_leaves():
    tree = {"x": jnp.arange(3), "y": jnp.array(1)}
    for in_axes in (
        ({"x": 0, "y": None},),
        (lambda leaf: 0 if leaf.ndim else None),
        ({"x": lambda leaf: 0, "y": lambda leaf: None},),
    ):
        added = filter_vmap(lambda tree: tree["x"] + tree["y"], in_axes=in_axes)(tree)
        assert added.tolist() == [1, 2, 3]
    # One axis for all arguments, and those of the arguments given alone.
    added = filter_vmap(lambda x, y: x.sum() + y.sum(), in_axes=1)(MATRIX, MATRIX)
    assert added.tolist() == [6, 10, 14]
    assert filter_vmap(lambda x, y=2: x * y, in_axes=(0,))(jnp.arange(3)).tolist() == [0, 2, 4]


def test_if_array_maps_arrays_alone():
    assert [if_array(2)(leaf) for leaf in (MATRIX, np.ones(2), 1.0, "a")] == [2, 2, None, None]
    assert if_array(-1)(jnp.ones(2)) == -1
    mapped = filter_vmap(lambda tree: (tree[0].sum(), tree[1]), in_axes=if_array(1))
    total, text = mapped([MATRIX, "t"])
    assert (total.tolist(), text) == ([3, 5, 7], "t")


def test_if_array_is_a_leaf_so_that_a_tree_of_axes_may_be_mapped():
    assert jtu.tree_leaves([if_array(0), None, 1]) == [if_array(0), 1]


def test_the_arrays_of_the_function_itself_are_not_mapped():
    assert filter_vmap(Model(jnp.ones(5)))(jnp.arange(2.0)).tolist() == [0, 5]


def test_the_axes_of_variadic_arguments_are_given_by_one_name():
    x, y = jnp.arange(2), jnp.array(4)
    for axes, other, expected in [(None, jnp.array(3), [7, 8]), ((0, None), x, [4, 6])]:
        added = filter_vmap(lambda x, *others: x + sum(others), in_axes={"others": axes})
        assert added(x, other, y).tolist() == expected


def test_axes_are_given_by_the_names_of_parameters_and_the_others_are_the_first():
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


def test_is_a_method_in_the_body_of_a_class():
    class Scale(eqxlike.Module):
        weight: Any

        @filter_vmap(in_axes={"self": None})
        def shared(self, x):
            return self.weight.sum() * x

    scale, x = Scale(jnp.arange(2.0)), jnp.array([3.0, 4.0])
    assert scale.shared(x).tolist() == [3, 4]


# --- out_axes -----------------------------------------------------------------------------------


def test_by_default_arrays_are_stacked_and_all_else_is_returned_as_it_is():
    output = filter_vmap(lambda x: (jnp.ones(1), np.ones(1, np.float32), 3, "s", None, jnp.sin))(
        MATRIX
    )
    assert [each.tolist() for each in output[:2]] == [[[1], [1]]] * 2
    assert output[2:] == (3, "s", None, jnp.sin)


def test_a_number_with_an_axis_is_stacked_and_an_array_without_is_returned_once():
    number, once = filter_vmap(lambda x: (3, jnp.ones(1)), out_axes=(0, None))(MATRIX)
    assert (number.tolist(), once.tolist()) == ([3, 3], [1])


def test_out_axes_may_be_a_prefix_or_functions():
    for out_axes in (
        {"a": 1, "b": (0, None)},
        {"a": lambda leaf: 1, "b": (lambda leaf: 0, None)},
    ):
        output = filter_vmap(lambda x: {"a": (x, [x]), "b": (x, jnp.ones(1))}, out_axes=out_axes)(
            MATRIX
        )
        shapes = jtu.tree_map(jnp.shape, output)
        assert shapes == {"a": ((3, 2), [(3, 2)]), "b": ((2, 3), (1,))}


# --- axis_name, axis_size -----------------------------------------------------------------------


def test_axis_size_stacks_where_nothing_is_mapped():
    for in_axes in (None, lambda leaf: None):
        stacked = filter_vmap(lambda x: x, in_axes=in_axes, axis_size=3)(jnp.array(2.0))
        assert stacked.tolist() == [2, 2, 2]
    assert filter_vmap(lambda: jnp.array(1.0), axis_size=3)().tolist() == [1, 1, 1]


def test_where_nothing_is_mapped_and_nothing_stacked_the_function_is_called():
    assert filter_vmap(lambda x: x + 1, in_axes=None, out_axes=None)(jnp.array(1)) == 2
    assert filter_vmap(lambda text: text * 2)("ab") == "abab"


def test_other_options_are_passed_on():
    assert filter_vmap(lambda x: x, spmd_axis_name="b")(jnp.arange(2)).tolist() == [0, 1]
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
        filter_vmap(lambda x: x, foo=True)(MATRIX)


# --- errors -------------------------------------------------------------------------------------


def test_calls_that_are_refused():
    with pytest.raises(TypeError, match="3 is not a callable object"):
        filter_vmap(3)
    with pytest.raises(RuntimeError, match="keyword arguments cannot be used"):
        filter_vmap(lambda x, y: x)(MATRIX, y=MATRIX)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'"):
        filter_vmap(lambda x, y: x)(MATRIX)
    with pytest.raises(ValueError, match="Cannot resolve batch dimension"):
        filter_vmap(lambda x: x, in_axes=None)(MATRIX)


def test_the_error_of_a_wrong_axis_names_the_argument_and_what_came():
    for axis, shown in [
        (True, "True of type bool"),
        ("a", "'a' of type str"),
        (lambda leaf: "a", "'a' of type str"),
        (np.int64(0), "of type int64"),
        (0.0, "0.0 of type float"),
    ]:
        for name in ("in_axes", "out_axes"):
            with pytest.raises(ValueError, match=f"None, ints, and callables only; `{name}` has"):
                filter_vmap(lambda x: x, **{name: axis})(MATRIX)
        with pytest.raises(ValueError, match=shown):
            filter_vmap(lambda x: x, in_axes=axis)(MATRIX)


def test_axes_that_are_no_prefix_are_an_error():
    for name, whole in [("in_axes", "the tuple of arguments"), ("out_axes", "what the function")]:
        expected = f"`{name}` is not a prefix of {whole}.*: it has 1 entries in place of 2"
        with pytest.raises(ValueError, match=expected):
            filter_vmap(lambda x, y: (x, y), **{name: (0,)})(MATRIX, MATRIX)


def test_error_of_different_sizes_names_the_paths_of_the_arguments():
    tree = {"a": [jnp.ones(2), jnp.ones((2, 3))], "b": "text"}
    with pytest.raises(ValueError, match="`filter_vmap` got inconsistent sizes") as caught:
        filter_vmap(lambda tree, x: x, in_axes=({"a": 0, "b": None}, 1))(tree, MATRIX)
    lines = str(caught.value).splitlines()[1:3]
    assert lines == [
        "  * size 2: axis 0 of args[0]['a'][0], f32[2]; axis 0 of args[0]['a'][1], f32[2,3].",
        "  * size 3: axis 1 of args[1], f32[2,3].",
    ]


def test_error_of_different_sizes_is_short_for_many_arrays():
    for number, shown in [(8, r"f32\[2\]; 5 more\.\n"), (3, r"f32\[2\]\.\n")]:
        with pytest.raises(ValueError, match=rf"args\[0\]\[2\], {shown}"):
            filter_vmap(lambda xs, y: y)([jnp.ones(2)] * number, jnp.ones(3))


def test_an_axis_size_that_differs_from_the_arrays_is_an_error():
    with pytest.raises(ValueError, match=r"(?s)  \* the `axis_size` argument was 5;\n  \* size 2"):
        filter_vmap(lambda x: x, axis_size=5)(jnp.ones(2))


def test_error_of_an_axis_that_an_array_lacks_names_the_path():
    for x, axis, rank in [(MATRIX, 2, 3), (MATRIX, -3, 3), (MATRIX, 5, 6), (jnp.ones(()), 0, 1)]:
        message = (
            rf"args\[0\]\['a'\] along axis {axis}, which implies that its rank should be at least "
            rf"{rank}, but is only {x.ndim} "
        )
        with pytest.raises(ValueError, match=message):
            filter_vmap(lambda tree: tree, in_axes=axis)({"a": x})


def test_an_out_axis_out_of_bounds_is_an_error():
    for axis in (2, -3):
        with pytest.raises(ValueError, match=f"output along axis {axis}: axis {axis} is out of bo"):
            filter_vmap(lambda x: x, out_axes=axis)(MATRIX)


def test_error_of_a_mapped_array_without_out_axis_names_its_path():
    def function(x):
        return {"a": jnp.ones(1), "b": [jnp.ones(2), x, x]}

    for out_axes in ({"a": 0, "b": None}, None):
        with pytest.raises(
            ValueError, match=r"^output\['b'\]\[1\] has no axis in `out_axes` \(axis spec .*pmean"
        ):
            filter_vmap(function, out_axes=out_axes)(MATRIX)


def test_what_the_function_raises_passes_through_as_it_is():
    def fail(x):
        raise error

    error = ValueError("axis spec None")
    with pytest.raises(ValueError, match="axis spec None") as caught:
        filter_vmap(fail, out_axes=None)(MATRIX)
    assert caught.value is error


def test_error_of_mapping_or_stacking_what_is_no_array_names_its_path():
    with pytest.raises(TypeError, match=r"args\[0\]\[1\] = 's' of type <class 'str'>.*axis 0"):
        filter_vmap(lambda tree: tree[0], in_axes=0)([jnp.ones(2), "s"])
    with pytest.raises(TypeError, match=r"output\['a'\] = 's' of type <class 'str'>.*axis 1"):
        filter_vmap(lambda x: {"a": "s"}, out_axes=1)(jnp.ones(2))


def test_error_of_a_name_without_argument_lists_the_arguments():
    def function(x, *others, y=1):
        return x

    for name in ("z", "y"):
        message = rf"correspond to any argument: \('{name}',\).* are 'x', 'others'\."
        with pytest.raises(ValueError, match=message):
            filter_vmap(function, in_axes={name: None})(MATRIX, MATRIX)
    with pytest.raises(ValueError, match="given by this call are none"):
        filter_vmap(lambda: 1, in_axes={"x": None})()
