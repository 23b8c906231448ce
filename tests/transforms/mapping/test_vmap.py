"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

import inspect

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eqxlike
from eqxlike import filter_vmap, if_array
from tests.beside_equinox import both
from tests.examples import at_most

MATRIX = jnp.arange(6.0).reshape(2, 3)


# --- signatures and what is wrapped -------------------------------------------------------------


def test_has_the_parameters_of_equinox():
    def parameters(library):
        signature = inspect.signature(library.filter_vmap)
        return [
            (p.name, p.kind, repr(p.default))
            for p in signature.parameters.values()
            if p.name != "fun"
        ]

    assert parameters(eqxlike) == parameters(equinox)


def test_if_array_has_the_parameters_of_equinox():
    one, other = (list(inspect.signature(eqx.if_array).parameters) for eqx in (eqxlike, equinox))
    assert one == other


@pytest.mark.parametrize("attribute", ["__name__", "__doc__", "__qualname__", "__module__"])
@both
def test_shows_the_metadata_of_the_function(eqx, attribute):
    def function(x):
        """Does."""

    assert getattr(eqx.filter_vmap(function), attribute) == getattr(function, attribute)


@both
def test_shows_the_signature_of_the_function(eqx):
    def function(x, y: int = 3):
        return x

    assert inspect.signature(eqx.filter_vmap(function)) == inspect.signature(function)


@both
def test_keeps_the_function(eqx):
    def function(x):
        return x

    assert eqx.filter_vmap(function).__wrapped__ is function


@both
def test_is_a_decorator_with_arguments(eqx):
    @eqx.filter_vmap(in_axes=1)
    def total(x):
        return x.sum()

    assert total(MATRIX).tolist() == [3, 5, 7]


# --- laws ---------------------------------------------------------------------------------------


@st.composite
def arrays_and_axes(draw):
    """Two arrays, the second mapped or not, and the axes; few shapes, since each is compiled."""
    size = draw(st.sampled_from([1, 3]))
    arrays, axes = [], []
    for _ in range(2):
        shape = draw(st.sampled_from([(), (2,)]))
        axis = draw(st.integers(0, len(shape))) if not arrays or draw(st.booleans()) else None
        if axis is not None:
            shape = (*shape[:axis], size, *shape[axis:])
            axis -= draw(st.sampled_from([0, len(shape)]))
        offset = draw(st.integers(-2, 2))
        arrays.append(offset + jnp.arange(float(np.prod(shape))).reshape(shape))
        axes.append(axis)
    return size, tuple(arrays), tuple(axes)


def totals(x, y):
    return {"x": x.sum(), "both": [x.sum() * y, y]}


@at_most(30)
@given(arrays_and_axes())
def test_is_a_loop_over_the_axis(case):
    size, arrays, axes = case
    mapped = filter_vmap(totals, in_axes=axes)(*arrays)
    slices = [
        totals(
            *(
                x if axis is None else np.take(x, index, axis)
                for x, axis in zip(map(np.asarray, arrays), axes, strict=True)
            )
        )
        for index in range(size)
    ]
    stacked = jtu.tree_map(lambda *xs: np.stack(xs), *slices)
    jtu.tree_map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), mapped, stacked)


@at_most(30)
@given(arrays_and_axes(), st.sampled_from([0, -1]), st.sampled_from([0, -1]))
def test_agrees_with_jax_vmap_on_arrays(case, x_axis, y_axis):
    _, arrays, in_axes = case
    axes = {"in_axes": in_axes, "out_axes": {"x": x_axis, "both": y_axis}}
    outputs = [vmap(totals, **axes)(*arrays) for vmap in (filter_vmap, jax.vmap)]
    assert eqxlike.tree_equal(*outputs)


@given(st.integers(-3, 2))
def test_an_out_axis_is_where_the_axis_of_jax_vmap_is(axis):
    x = jnp.arange(24.0).reshape(2, 3, 4)
    one = filter_vmap(lambda x: x, out_axes=axis)(x)
    assert eqxlike.tree_equal(one, jax.vmap(lambda x: x, out_axes=axis)(x))


@given(st.integers(-3, 2))
def test_the_identity_from_an_axis_to_the_same_axis_is_the_identity(axis):
    x = jnp.arange(24.0).reshape(2, 3, 4)
    assert eqxlike.tree_equal(filter_vmap(lambda x: x, in_axes=axis, out_axes=axis)(x), x)


# --- composition --------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [jax.jit, eqxlike.filter_jit], ids=["jax", "filter_jit"])
def test_under_jit_the_output_is_the_same(transform):
    function = filter_vmap(lambda x, y: (x * y, jnp.sin(x)), in_axes=(0, None), out_axes=(0, 1))
    arguments = (MATRIX, jnp.ones(3))
    assert eqxlike.tree_equal(transform(function)(*arguments), function(*arguments), rtol=1e-6)


@both
def test_static_arguments_stay_static_under_filter_jit(eqx):
    output = eqx.filter_jit(lambda x, s: eqx.filter_vmap(lambda x, s: (x, s))(x, s))(MATRIX, "s")
    assert (output[0].shape, output[1]) == ((2, 3), "s")


@both
def test_a_gradient_flows_through(eqx):
    gradient = jax.grad(lambda x: eqx.filter_vmap(lambda x: x**2)(x).sum())(jnp.arange(3.0))
    assert gradient.tolist() == [0, 2, 4]


@both
def test_may_be_nested(eqx):
    outer = eqx.filter_vmap(
        eqx.filter_vmap(lambda x, y: x * y, in_axes=(None, 0)), in_axes=(0, None)
    )
    assert outer(jnp.arange(2), jnp.arange(3)).tolist() == [[0, 0, 0], [0, 1, 2]]


@both
@pytest.mark.parametrize("under", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_leaks_no_tracers(eqx, under):
    with jax.checking_leaks():
        doubled = under(lambda x: eqx.filter_vmap(lambda x: (2 * x, "s"))(x)[0])(jnp.arange(3))
    assert doubled.tolist() == [0, 2, 4]


# --- errors -------------------------------------------------------------------------------------


@both
def test_keyword_arguments_are_refused(eqx):
    with pytest.raises(RuntimeError, match="keyword arguments cannot be used"):
        eqx.filter_vmap(lambda x, y: x)(MATRIX, y=MATRIX)


@both
@pytest.mark.parametrize("axis", ["a", 0.0, np.int64(0)], ids=repr)
def test_an_axis_of_another_kind_is_an_error(eqx, axis):
    with pytest.raises(ValueError, match="must consist of None, ints, and callables only"):
        eqx.filter_vmap(lambda x: x, in_axes=axis)(MATRIX)


@pytest.mark.parametrize("axis", [True, lambda leaf: "a", "a"], ids=["bool", "function", "str"])
@pytest.mark.parametrize("name", ["in_axes", "out_axes"])
def test_the_error_of_a_wrong_axis_names_the_argument_and_what_came(name, axis):
    expected = f"`{name}` has (True of type bool|'a' of type str)"
    with pytest.raises(ValueError, match=expected):
        filter_vmap(lambda x: x, **{name: axis})(MATRIX)


@both
@pytest.mark.parametrize("name", ["in_axes", "out_axes"])
def test_axes_that_are_no_prefix_are_an_error(eqx, name):
    with pytest.raises(ValueError, match="structure error"):
        eqx.filter_vmap(lambda x, y: (x, y), **{name: (0,)})(MATRIX, MATRIX)


@both
def test_different_sizes_are_an_error_that_names_both(eqx):
    with pytest.raises(ValueError, match=r"(?s)inconsistent sizes.*size 2.*size 3"):
        eqx.filter_vmap(lambda x, y: x)(jnp.ones(2), jnp.ones(3))


def test_error_of_different_sizes_names_the_paths_of_the_arguments():
    tree = {"a": [jnp.ones(2), jnp.ones((2, 3))], "b": "text"}
    with pytest.raises(ValueError, match="inconsistent sizes") as caught:
        filter_vmap(lambda tree, x: x, in_axes=({"a": 0, "b": None}, 1))(tree, MATRIX)
    lines = str(caught.value).splitlines()[1:3]
    assert lines == [
        "  * size 2: axis 0 of args[0]['a'][0], f32[2]; axis 0 of args[0]['a'][1], f32[2,3].",
        "  * size 3: axis 1 of args[1], f32[2,3].",
    ]


def test_error_of_different_sizes_is_short_for_many_arrays():
    with pytest.raises(ValueError, match=r"args\[0\]\[2\], f32\[2\]; 5 more\.\n"):
        filter_vmap(lambda xs, y: y)([jnp.ones(2)] * 8, jnp.ones(3))


@both
def test_an_axis_size_that_differs_from_the_arrays_is_an_error(eqx):
    with pytest.raises(ValueError, match=r"(?s)`axis_size` argument was 5.*size 2"):
        eqx.filter_vmap(lambda x: x, axis_size=5)(jnp.ones(2))


@both
@pytest.mark.parametrize(("x", "axis"), [(jnp.ones(()), 0), (MATRIX, 2)], ids=["scalar", "matrix"])
def test_mapping_an_axis_that_an_array_lacks_is_an_error(eqx, x, axis):
    with pytest.raises(ValueError, match=f"along axis {axis}, which implies that its rank"):
        eqx.filter_vmap(lambda x: x, in_axes=axis)(x)


@pytest.mark.parametrize(("axis", "rank"), [(2, 3), (-3, 3), (5, 6)])
def test_error_of_an_axis_that_an_array_lacks_names_the_path(axis, rank):
    message = rf"args\[0\]\['a'\] along axis {axis}, which implies .* at least {rank}, .* only 2"
    with pytest.raises(ValueError, match=message):
        filter_vmap(lambda tree: tree, in_axes=axis)({"a": MATRIX})


@both
@pytest.mark.parametrize("axis", [2, -3])
def test_an_out_axis_out_of_bounds_is_an_error(eqx, axis):
    with pytest.raises(ValueError, match=f"axis {axis} is out of bounds"):
        eqx.filter_vmap(lambda x: x, out_axes=axis)(MATRIX)


@both
def test_a_mapped_array_without_out_axis_is_an_error(eqx):
    with pytest.raises(ValueError, match="axis spec None but output was batched"):
        eqx.filter_vmap(lambda x: x, out_axes=None)(MATRIX)


@pytest.mark.parametrize("out_axes", [{"a": 0, "b": None}, None], ids=["some", "all"])
def test_error_of_a_mapped_array_without_out_axis_names_its_path(out_axes):
    def function(x):
        return {"a": jnp.ones(1), "b": [jnp.ones(2), x, x]}

    with pytest.raises(ValueError, match=r"^output\['b'\]\[1\] has no axis in `out_axes`.*pmean"):
        filter_vmap(function, out_axes=out_axes)(MATRIX)


def test_what_the_function_raises_passes_through_as_it_is():
    def fail(x):
        raise error

    error = ValueError("axis spec None")
    with pytest.raises(ValueError, match="axis spec None") as caught:
        filter_vmap(fail, out_axes=None)(MATRIX)
    assert caught.value is error


@both
def test_stacking_without_any_size_is_an_error(eqx):
    with pytest.raises(ValueError, match="Cannot resolve batch dimension"):
        eqx.filter_vmap(lambda x: x, in_axes=None)(MATRIX)


@both
def test_mapping_what_is_no_array_is_an_error(eqx):
    with pytest.raises(TypeError, match="'s' of type <class 'str'> is not a valid JAX type"):
        eqx.filter_vmap(lambda tree: tree[0], in_axes=0)([jnp.ones(2), "s"])


@both
def test_stacking_what_is_no_array_is_an_error(eqx):
    with pytest.raises(TypeError, match="<class 'str'> is not a valid JAX type"):
        eqx.filter_vmap(lambda x: "s", out_axes=0)(jnp.ones(2))


def test_error_of_mapping_what_is_no_array_names_its_path():
    with pytest.raises(TypeError, match=r"args\[0\]\[1\] = 's' of type <class 'str'>.*axis 0"):
        filter_vmap(lambda tree: tree[0], in_axes=0)([jnp.ones(2), "s"])


def test_error_of_stacking_what_is_no_array_names_its_path():
    with pytest.raises(TypeError, match=r"output\['a'\] = 's' of type <class 'str'>.*axis 1"):
        filter_vmap(lambda x: {"a": "s"}, out_axes=1)(jnp.ones(2))


@pytest.mark.parametrize(
    ("name", "message"),
    [("z", r"\('z',\).* are 'x', 'others'\."), ("y", r"\('y',\).* are 'x', 'others'\.")],
    ids=["unknown", "left out"],
)
def test_error_of_a_name_without_argument_lists_the_arguments(name, message):
    def function(x, *others, y=1):
        return x

    with pytest.raises(ValueError, match=f"did not correspond to any argument: {message}"):
        filter_vmap(function, in_axes={name: None})(MATRIX, MATRIX)


@both
def test_a_missing_argument_is_an_error_that_names_it(eqx):
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'"):
        eqx.filter_vmap(lambda x, y: x)(MATRIX)


@both
def test_an_unknown_option_is_an_error_that_names_it(eqx):
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
        eqx.filter_vmap(lambda x: x, foo=True)(MATRIX)


def test_what_is_no_function_is_an_error():
    with pytest.raises(TypeError, match="3 is not a callable object"):
        filter_vmap(3)


def test_if_array_takes_any_axis():
    assert if_array(-1)(jnp.ones(2)) == -1
