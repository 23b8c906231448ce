"""The reference gradient: errors of other gradients, and the uncertainty of the reference."""

import types

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxlike import ad
from eqxlike.ad._reference import Reference, checked_problem, default_tolerance
from tests.ad.broken_modes import MODES, PARAMETERS, Broken, compare, loss, row_of

# The reference


def test_error_is_the_largest_of_all_leaves(comparison):
    assert row_of(comparison, "off").max_relative_error == pytest.approx(0.253, rel=1e-4)
    assert row_of(comparison, "right").max_relative_error < 1e-6


@pytest.mark.parametrize("dtype", ["complex64"])
def test_gradient_in_any_dtype_is_compared_in_double_precision(dtype):
    def energy(x):
        return jnp.sum(jnp.abs(jnp.sin(x)) ** 2)

    x = jnp.array([0.3, 0.7, 1.1]).astype(dtype)
    (row,) = compare(energy, x, modes=[ad.Reverse()]).rows
    assert row.verdict == "ok"
    assert 0 < row.max_relative_error < 4 * float(jnp.finfo(dtype).eps)
    assert jnp.ones(2).dtype == jnp.float32  # Double precision is disabled again.


def test_gradient_in_float64_must_agree_to_five_digits():
    with jax.enable_x64(True):
        modes = {"right": ad.Reverse(), "off": Broken(lambda found: [found[0] * (1 + 1e-4)])}
        comparison = compare(lambda x: jnp.sum(jnp.sin(x)), jnp.array([0.3, 0.7]), modes=modes)
    assert [row.verdict for row in comparison.rows] == ["ok", "wrong"]


def test_function_without_a_derivative_in_float64_is_an_error_that_says_so():
    def stuck(x):
        return jax.lax.scan(lambda carry, _: (carry * x, None), jnp.float32(1), None, 2)[0]

    with pytest.raises(
        ValueError, match=r"has no gradient in float64: TypePromotionError: "
    ) as caught:
        compare(stuck, jnp.array(2.0))
    assert "arrays that a plain function closes over are not.) Pass another `ref" in str(
        caught.value
    )
    (row,) = compare(stuck, jnp.array(2.0), modes=[ad.Reverse()], reference=None).rows
    assert (row.verdict, row.max_relative_error) == ("ok", None)


def test_reference_that_is_not_finite_is_an_error_that_names_the_leaf():
    def barrier(x):
        return jnp.sum(jnp.log(x["a"][0])) + jnp.sum(x["b"])

    x = {"a": [jnp.array([1.0, 0.0])], "b": jnp.ones(2)}
    with pytest.raises(ValueError, match="is not finite in float64") as caught:
        compare(barrier, x)
    assert "FiniteDifference(order=4)" in str(caught.value)
    assert "2 of the 2 derivatives with respect to args[0]['a'][0]" in str(caught.value)
    assert "`reference=None`" in str(caught.value)


def test_without_a_reference_a_gradient_must_be_finite():
    modes = {"off": MODES["off"], "nan": MODES["nan"]}
    rows = compare(loss, PARAMETERS, 2, modes=modes, reference=None).rows
    assert [(row.verdict, row.max_relative_error) for row in rows] == [("ok", None), ("nan", None)]


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: jnp.sum(jax.nn.relu(x) * 2), jnp.array([0.0, 1.0, -1.0])),
        (lambda x: jnp.sum((x.astype(jnp.bfloat16) ** 2).astype(x.dtype)), jnp.arange(1.0, 4)),
        (lambda x: jnp.sum((jnp.exp(x) - 2) ** 2), jnp.log(jnp.array([2.0, 2.0]))),
    ],
    ids=["kink", "rounds inside", "minimum"],
)
def test_mode_is_not_wrong_where_the_reference_is_uncertain(function, x):
    modes = [ad.Reverse()]
    if x[0] == 0:
        modes.append(Broken(lambda found: [found[0] * 2]))
    row, *wrong = compare(function, x, modes=modes).rows
    assert row.verdict == "ok"
    # The reference is certain about the derivatives away from the kink.
    assert all(each.verdict == "wrong" for each in wrong)
    assert row.max_relative_error > default_tolerance(jnp.float32)
    assert "uncertainty of the reference" in row.explanation


def test_reference_that_fails_has_infinite_uncertainty():
    problem = checked_problem(jnp.sum, (jnp.ones(2),))
    reference = Reference([np.ones(2)], Broken(lambda found: 1 / 0), problem, problem)
    np.testing.assert_array_equal(reference.uncertainties, [[np.inf, np.inf]])


def test_another_mode_may_be_the_reference():
    def through(x):
        return jnp.sum(x**2 * jax.lax.stop_gradient(x))

    x = jnp.arange(1.0, 4)
    by_reverse = compare(through, x, modes=[ad.Forward()], reference=ad.Reverse())
    assert (by_reverse.reference, by_reverse.rows[0].verdict) == ("Reverse()", "ok")


# Errors of leaves

numbers = st.floats(-10, 10, allow_subnormal=False).filter(lambda number: abs(number) > 1e-3)
leaves = st.lists(numbers, min_size=1, max_size=3).map(np.array)


def errors_of(gradients, expected):
    dtype = jnp.dtype("float32")
    arrays = [jax.ShapeDtypeStruct(each.shape, dtype) for each in expected]
    problem = types.SimpleNamespace(arrays=arrays, value_dtype=dtype)
    reference = Reference(expected, ad.Reverse(), problem, problem)
    return [each.error for each in reference.errors(gradients)]


@hypothesis.given(leaf=leaves, off=st.floats(1e-6, 10))
def test_error_of_a_leaf_is_relative_to_its_largest_derivative(leaf, off):
    leaf = np.append(leaf, 0.0)
    found = leaf.copy()
    found[-1] += off * np.max(np.abs(leaf))
    assert errors_of([found], [leaf]) == pytest.approx([off])


def test_rounding_error_of_a_zero_is_ok():
    gradients = [np.array([1e-7, -1e-7]), np.array([1.0])]
    (error, _) = errors_of(gradients, [np.zeros(2), np.array([1.0])])
    assert error < default_tolerance(jnp.float32)


def test_error_is_absolute_if_the_expected_gradient_is_zero():
    assert errors_of([np.array([0.5])], [np.zeros(1)]) == [0.5]
