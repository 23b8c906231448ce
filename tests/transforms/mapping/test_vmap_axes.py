"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqxlike
from tests.beside_equinox import both

MATRIX = jnp.arange(6.0).reshape(2, 3)


# --- in_axes ------------------------------------------------------------------------------------


@both
def test_by_default_arrays_are_mapped_and_all_else_is_not(eqx):
    total, text = eqx.filter_vmap(lambda x, number, text: (x.sum() * number, text))(
        MATRIX, 2.0, "t"
    )
    assert (total.tolist(), text) == ([6, 24], "t")


@both
@pytest.mark.parametrize(
    "x", [np.arange(3.0), jnp.arange(3.0), jax.random.split(jax.random.key(0), 3)], ids=type
)
def test_every_kind_of_array_is_mapped(eqx, x):
    assert eqx.filter_vmap(lambda x: jnp.ones(x.shape))(x).shape == (3,)


@both
@pytest.mark.parametrize(
    "in_axes",
    [
        ({"x": 0, "y": None},),
        (lambda leaf: 0 if leaf.ndim else None),
        ({"x": lambda leaf: 0, "y": lambda leaf: None},),
    ],
    ids=["prefix", "function", "prefix of functions"],
)
def test_axes_may_be(eqx, in_axes):
    added = eqx.filter_vmap(lambda tree: tree["x"] + tree["y"], in_axes=in_axes)(
        {"x": jnp.arange(3), "y": jnp.array(1)}
    )
    assert added.tolist() == [1, 2, 3]


@both
def test_one_axis_serves_all_arguments(eqx):
    added = eqx.filter_vmap(lambda x, y: x.sum() + y.sum(), in_axes=1)(MATRIX, MATRIX)
    assert added.tolist() == [6, 10, 14]


@both
def test_an_axis_may_count_from_the_end(eqx):
    assert eqx.filter_vmap(lambda x: x.sum(), in_axes=-1)(MATRIX).tolist() == [3, 5, 7]


@both
def test_if_array_maps_arrays_alone(eqx):
    total, text = eqx.filter_vmap(lambda tree: (tree[0].sum(), tree[1]), in_axes=eqx.if_array(1))(
        [MATRIX, "t"]
    )
    assert (total.tolist(), text) == ([3, 5, 7], "t")


@both
def test_if_array_is_a_function_of_a_leaf(eqx):
    assert [eqx.if_array(2)(leaf) for leaf in (MATRIX, np.ones(2), 1.0, "a")] == [2, 2, None, None]


@both
def test_a_module_may_be_mapped(eqx):
    class Model(eqx.Module):
        weight: Any
        name: str = eqx.field(static=True)

        def __call__(self, x):
            return self.weight * x

    models = Model(jnp.arange(3.0), "m")
    scaled = eqx.filter_vmap(lambda model, x: model(x), in_axes=(eqx.if_array(0), None))(
        models, jnp.array(2.0)
    )
    assert scaled.tolist() == [0, 2, 4]


@both
def test_the_arrays_of_the_function_itself_are_not_mapped(eqx):
    class Model(eqx.Module):
        weight: Any

        def __call__(self, x):
            return self.weight.sum() * x

    assert eqx.filter_vmap(Model(jnp.ones(5)))(jnp.arange(2.0)).tolist() == [0, 5]


@both
def test_a_default_argument_is_not_mapped(eqx):
    factors = jnp.array([2, 3])
    scaled = eqx.filter_vmap(lambda x, factors=factors: x * factors.sum())(jnp.arange(3))
    assert scaled.tolist() == [0, 5, 10]


@both
def test_axes_may_name_the_given_arguments_alone(eqx):
    scaled = eqx.filter_vmap(lambda x, factor=2: x * factor, in_axes=(0,))(jnp.arange(3))
    assert scaled.tolist() == [0, 2, 4]


@both
def test_a_none_argument_is_passed_on(eqx):
    assert eqx.filter_vmap(lambda x, y: x if y is None else 0)(jnp.arange(2), None).tolist() == [
        0,
        1,
    ]


@both
def test_a_boolean_argument_stays_a_boolean(eqx):
    kept = eqx.filter_vmap(lambda x, flag: x if flag else -x)(jnp.arange(2), True)
    assert kept.tolist() == [0, 1]


@both
def test_an_axis_of_size_zero_is_mapped(eqx):
    assert eqx.filter_vmap(lambda x: x.sum())(jnp.ones((0, 3))).shape == (0,)


@pytest.mark.parametrize(
    ("axes", "expected"), [(None, [7, 8]), ((0, None), [4, 6])], ids=["one", "each"]
)
def test_the_axes_of_variadic_arguments_are_given_by_one_name(axes, expected):
    added = eqxlike.filter_vmap(lambda x, *others: x + sum(others), in_axes={"others": axes})
    x, y = jnp.arange(2), jnp.array(3) if axes is None else jnp.arange(2)
    assert added(x, y, jnp.array(4)).tolist() == expected


# --- out_axes -----------------------------------------------------------------------------------


@both
def test_by_default_what_is_no_array_is_returned_as_it_is(eqx):
    output = eqx.filter_vmap(lambda x: (3, "s", None, 2.5, True, jnp.sin))(MATRIX)
    assert output == (3, "s", None, 2.5, True, jnp.sin)


@both
def test_a_number_with_an_axis_is_stacked(eqx):
    assert eqx.filter_vmap(lambda x: 3, out_axes=0)(MATRIX).tolist() == [3, 3]


@both
def test_an_array_that_does_not_depend_on_the_axis_is_stacked(eqx):
    assert eqx.filter_vmap(lambda x: jnp.ones(1))(MATRIX).tolist() == [[1], [1]]


@both
def test_an_array_without_axis_is_returned_once(eqx):
    assert eqx.filter_vmap(lambda x: jnp.ones(1), out_axes=None)(MATRIX).tolist() == [1]


@both
def test_a_numpy_array_is_stacked_too(eqx):
    assert eqx.filter_vmap(lambda x: np.ones(1, np.float32))(MATRIX).tolist() == [[1], [1]]


@both
@pytest.mark.parametrize(
    "out_axes",
    [{"a": 1, "b": (0, None)}, {"a": lambda leaf: 1, "b": (lambda leaf: 0, None)}],
    ids=["axes", "functions"],
)
def test_out_axes_may_be_a_prefix(eqx, out_axes):
    output = eqx.filter_vmap(lambda x: {"a": (x, [x]), "b": (x, jnp.ones(1))}, out_axes=out_axes)(
        MATRIX
    )
    shapes = jtu.tree_map(jnp.shape, output)
    assert shapes == {"a": ((3, 2), [(3, 2)]), "b": ((2, 3), (1,))}


@both
def test_making_modules_gives_an_ensemble(eqx):
    class Model(eqx.Module):
        weight: Any
        size: int
        name: str = eqx.field(static=True)

        def __init__(self, key):
            self.weight = jax.random.normal(key, (2,))
            self.size = 3
            self.name = "n"

    keys = jax.random.split(jax.random.key(0), 4)
    models = eqx.filter_vmap(Model)(jax.random.clone(keys))
    assert (type(models), models.weight.shape, models.size, models.name) == (Model, (4, 2), 3, "n")
    assert models.weight[2].tolist() == Model(keys[2]).weight.tolist()


# --- axis_name, axis_size -----------------------------------------------------------------------


@both
def test_collectives_run_over_the_named_axis(eqx):
    output = eqx.filter_vmap(
        lambda x: (jax.lax.psum(x, "i"), jax.lax.axis_index("i")), axis_name="i"
    )(jnp.arange(3))
    assert [x.tolist() for x in output] == [[3, 3, 3], [0, 1, 2]]


@both
def test_a_mean_over_the_named_axis_needs_no_out_axis(eqx):
    mean = eqx.filter_vmap(lambda x: jax.lax.pmean(x, "i"), axis_name="i", out_axes=None)
    assert mean(jnp.arange(3.0)) == 1


@both
@pytest.mark.parametrize("in_axes", [None, lambda leaf: None], ids=["None", "function"])
def test_axis_size_stacks_where_nothing_is_mapped(eqx, in_axes):
    stacked = eqx.filter_vmap(lambda x: x, in_axes=in_axes, axis_size=3)(jnp.array(2.0))
    assert stacked.tolist() == [2, 2, 2]


@both
def test_axis_size_serves_a_function_of_no_arguments(eqx):
    assert eqx.filter_vmap(lambda: jnp.array(1.0), axis_size=3)().tolist() == [1, 1, 1]


@both
def test_where_nothing_is_mapped_and_nothing_stacked_the_function_is_called(eqx):
    assert eqx.filter_vmap(lambda x: x + 1, in_axes=None, out_axes=None)(jnp.array(1)) == 2


@both
def test_where_nothing_is_mapped_and_nothing_is_an_array_the_function_is_called(eqx):
    assert eqx.filter_vmap(lambda text: text * 2)("ab") == "abab"


@both
def test_other_options_are_passed_on(eqx):
    assert eqx.filter_vmap(lambda x: x, spmd_axis_name="b")(jnp.arange(2)).tolist() == [0, 1]
