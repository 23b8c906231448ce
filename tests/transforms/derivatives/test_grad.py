"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

import inspect
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eqxlike
from eqxlike import filter_grad, filter_value_and_grad
from tests.beside_equinox import both

both_names = pytest.mark.parametrize("name", ["filter_grad", "filter_value_and_grad"])


class Polynomial(eqxlike.Module):
    coefficients: list
    activation: Any = jnp.tanh
    power: int = eqxlike.field(static=True, default=2)

    def __call__(self, x):
        return self.activation(sum(c * x for c in self.coefficients)) ** self.power


# --- signatures and what is wrapped -------------------------------------------------------------


@both_names
def test_has_the_parameters_of_equinox(name):
    def parameters(library):
        signature = inspect.signature(getattr(library, name))
        return [
            (p.name, p.kind, p.default) for p in signature.parameters.values() if p.name != "fun"
        ]

    ours = [each for each in parameters(eqxlike) if each[0] != "mode"]
    assert ours == parameters(equinox)
    assert ("mode", inspect.Parameter.KEYWORD_ONLY, None) in parameters(eqxlike)


@both_names
@pytest.mark.parametrize("attribute", ["__name__", "__doc__", "__qualname__", "__module__"])
@both
def test_shows_the_metadata_of_the_function(eqx, name, attribute):
    def loss(x):
        """A loss."""

    assert getattr(getattr(eqx, name)(loss), attribute) == getattr(loss, attribute)


@both_names
@both
def test_shows_the_signature_of_the_function(eqx, name):
    def loss(x, y: int = 3, *, key=None):
        return x

    assert inspect.signature(getattr(eqx, name)(loss)) == inspect.signature(loss)


@both_names
@both
def test_keeps_the_function(eqx, name):
    def loss(x):
        return x

    assert getattr(eqx, name)(loss).__wrapped__ is loss


@both_names
@both
def test_is_a_decorator_with_arguments(eqx, name):
    @getattr(eqx, name)(has_aux=True)
    def loss(x):
        return x**2, "aux"

    assert "aux" in jtu.tree_leaves(loss(jnp.array(3.0)))


@both_names
@both
def test_is_a_pytree_of_what_it_wraps(eqx, name):
    class Model(eqx.Module):
        weight: Any

        def __call__(self, x):
            return self.weight * x

    wrapped = getattr(eqx, name)(Model(jnp.array(2.0)))
    assert [leaf for leaf in jtu.tree_leaves(wrapped) if eqx.is_array(leaf)] == [2.0]


# --- what is differentiated ---------------------------------------------------------------------


@st.composite
def mixed_trees(draw):
    leaves = (
        st.floats(-2, 2, width=32).map(jnp.float32)
        | st.floats(-2, 2, width=32).map(np.float32)
        | st.integers(-2, 2).map(jnp.int32)
        | st.sampled_from(["a", 1.5, 2, True, jnp.sin])
    )
    return draw(
        st.recursive(
            leaves,
            lambda trees: (
                st.lists(trees, max_size=3)
                | st.dictionaries(st.sampled_from("ab"), trees)
                | st.builds(lambda items: Polynomial(items), st.lists(trees, max_size=2))
            ),
            max_leaves=6,
        )
    )


def sum_of_cubes(tree):
    floats = [leaf for leaf in jtu.tree_leaves(tree) if eqxlike.is_inexact_array(leaf)]
    return sum((leaf * leaf * leaf for leaf in floats), start=jnp.float32(0))


@given(mixed_trees())
def test_the_gradient_is_the_tree_with_none_for_all_but_inexact_arrays(tree):
    gradient = filter_grad(sum_of_cubes)(tree)
    expected = jtu.tree_map(lambda leaf: 3 * leaf**2 if eqxlike.is_inexact_array(leaf) else 0, tree)
    mask = jtu.tree_map(eqxlike.is_inexact_array, tree)
    assert eqxlike.tree_equal(gradient, eqxlike.filter(expected, mask), rtol=1e-6)


@given(mixed_trees())
def test_the_value_is_that_of_the_function(tree):
    value, gradient = filter_value_and_grad(sum_of_cubes)(tree)
    np.testing.assert_allclose(value, sum_of_cubes(tree), rtol=1e-6)
    assert eqxlike.tree_equal(gradient, filter_grad(sum_of_cubes)(tree))


@given(st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=4))
def test_agrees_with_jax_on_arrays(values):
    arrays = [jnp.float32(value) for value in values]

    def loss(arrays):
        return jnp.sin(sum(x**2 for x in arrays))

    assert eqxlike.tree_equal(filter_grad(loss)(arrays), jax.grad(loss)(arrays))


@both
@pytest.mark.parametrize(
    ("leaf", "is_differentiated"),
    [
        (jnp.array(2.0), True),
        (np.array(2.0, np.float32), True),
        (np.float32(2.0), True),
        (jnp.array(2.0, jnp.bfloat16), True),
        (jnp.array(2), False),
        (jnp.array(True), False),
        (jax.random.key(0), False),
        (2.0, False),
        (2, False),
        ("text", False),
        (None, False),
        (len, False),
    ],
    ids=repr,
)
def test_only_inexact_arrays_are_differentiated(eqx, leaf, is_differentiated):
    gradient = eqx.filter_grad(lambda tree: tree[1] ** 2)([leaf, jnp.array(3.0)])
    assert (gradient[0] is not None) is is_differentiated


@both
def test_the_gradient_of_a_module_is_a_module_of_its_class(eqx):
    class Model(eqx.Module):
        weight: Any
        function: Any
        size: int
        power: int = eqx.field(static=True, default=2)

        def __call__(self, x):
            return self.function(self.weight * x) * self.size

    model = Model(jnp.array(1.0), lambda x: x**2, 3)
    gradient = eqx.filter_grad(lambda model, x: model(x))(model, 2.0)
    assert type(gradient) is Model
    fields = (float(gradient.weight), gradient.function, gradient.size, gradient.power)
    assert fields == (24.0, None, None, 2)


@both
def test_only_the_first_argument_is_differentiated(eqx):
    gradient = eqx.filter_grad(lambda x, y, *, z: x * y * z)
    assert gradient(jnp.array(2.0), jnp.array(3.0), z=jnp.array(4.0)) == 12


@both
def test_a_tree_without_inexact_arrays_has_a_gradient_of_nones(eqx):
    assert eqx.filter_value_and_grad(lambda tree: 1.0)({"a": 1, "b": "c"}) == (
        1.0,
        {"a": None, "b": None},
    )


@both
def test_other_arguments_may_be_anything(eqx):
    gradient = eqx.filter_grad(lambda x, function, name: function(x) * len(name))
    assert gradient(jnp.array(0.0), jnp.sin, "abc") == 3


@both
def test_a_real_function_of_a_complex_array_has_the_gradient_of_jax(eqx):
    z = jnp.array(1 + 2j)

    def loss(z):
        return jnp.abs(z) ** 2

    assert eqx.filter_grad(loss)(z) == jax.grad(loss)(z)


@both
def test_holomorphic_is_passed_on(eqx):
    assert eqx.filter_grad(lambda z: z**2, holomorphic=True)(jnp.array(1 + 1j)) == 2 + 2j


# --- auxiliary output ---------------------------------------------------------------------------


@both
def test_filter_grad_with_aux_returns_gradient_and_aux(eqx):
    output = eqx.filter_grad(lambda x: (x**2, "aux"), has_aux=True)(jnp.array(3.0))
    assert output == (6.0, "aux")


@both
def test_filter_value_and_grad_with_aux_returns_value_and_aux_first(eqx):
    output = eqx.filter_value_and_grad(lambda x: (x**2, "aux"), has_aux=True)(jnp.array(3.0))
    assert output == ((9.0, "aux"), 6.0)


@both
def test_aux_may_be_any_tree(eqx):
    class Model(eqx.Module):
        weight: Any
        name: str

    def loss(model):
        return model.weight**2, {"model": model, "items": (1, 2.5, None, jnp.sin, jnp.arange(2))}

    model = Model(jnp.array(3.0), "n")
    _, aux = eqx.filter_grad(loss, has_aux=True)(model)
    assert eqx.tree_equal(aux, loss(model)[1])


@both
@pytest.mark.parametrize("output", [lambda x: x, lambda x: (x, 1, 2)], ids=["one", "three"])
def test_aux_needs_a_pair(eqx, output):
    with pytest.raises(TypeError):
        eqx.filter_grad(output, has_aux=True)(jnp.array(2.0))


@both
def test_aux_in_a_list_of_two_is_accepted(eqx):
    assert eqx.filter_grad(lambda x: [x**2, "aux"], has_aux=True)(jnp.array(3.0)) == (6.0, "aux")


def test_the_error_without_a_pair_names_the_function_and_what_came():
    def loss(x):
        return {"loss": x}

    with pytest.raises(TypeError, match=r"loss must return a pair \(value, aux\); .* type dict"):
        filter_grad(loss, has_aux=True)(jnp.array(2.0))


# --- composition --------------------------------------------------------------------------------


@both_names
@pytest.mark.parametrize("jit", ["filter_jit", "jax"])
def test_under_jit_the_output_is_the_same(name, jit):
    model = Polynomial([jnp.array(1.0), jnp.array(2.0)], None)

    def loss(model, x):
        return sum(c**2 * x for c in model.coefficients)

    function = getattr(eqxlike, name)(loss)
    transform = eqxlike.filter_jit if jit == "filter_jit" else jax.jit
    x = jnp.array(3.0)
    assert eqxlike.tree_equal(transform(function)(model, x), function(model, x), rtol=1e-6)


@both
def test_the_gradient_of_a_gradient_is_the_second_derivative(eqx):
    assert eqx.filter_grad(eqx.filter_grad(lambda x: x**3))(jnp.array(2.0)) == 12


@both
def test_a_gradient_inside_a_gradient_of_a_tree(eqx):
    def inner(tree):
        return eqx.filter_grad(lambda tree: tree[0] ** 3 * tree[1])(tree)[0]

    assert eqx.filter_grad(inner)([jnp.array(2.0), jnp.array(5.0), "s"])[:2] == [60.0, 12.0]


@both
def test_an_outer_gradient_reaches_a_closed_over_array(eqx):
    def outer(weight):
        return eqx.filter_grad(lambda x: weight * x**2)(jnp.array(3.0))

    assert jax.grad(outer)(jnp.array(2.0)) == 6


@both
def test_may_be_vmapped(eqx):
    gradients = eqx.filter_vmap(eqx.filter_grad(lambda x: x**3))(jnp.arange(3.0))
    assert gradients.tolist() == [0, 3, 12]


@both
def test_may_differentiate_a_method(eqx):
    class Model(eqx.Module):
        weight: Any

        def loss(self, x):
            return self.weight * x**2

    assert eqx.filter_grad(Model(jnp.array(2.0)).loss)(jnp.array(3.0)) == 12


@both
def test_leaks_no_tracers(eqx):
    with jax.checking_leaks():
        gradient, aux = eqx.filter_grad(lambda t: (t["a"] ** 2, (t, "s")), has_aux=True)(
            {"a": jnp.array(2.0)}
        )
    assert (gradient, aux) == ({"a": 4.0}, ({"a": 2.0}, "s"))


@pytest.mark.parametrize("index", [0, 1])
def test_finite_differences_agree(index):
    model = Polynomial([np.float64(0.3), np.float64(-0.7)], np.tanh)

    def moved(step):
        return eqxlike.tree_at(
            lambda model: model.coefficients[index], model, replace_fn=lambda c: c + step
        )

    slope = (moved(1e-6)(0.5) - moved(-1e-6)(0.5)) / 2e-6
    traced = Polynomial([jnp.float32(0.3), jnp.float32(-0.7)])
    gradient = filter_grad(lambda model: model(0.5))(traced)
    np.testing.assert_allclose(gradient.coefficients[index], slope, rtol=1e-5)


# --- errors -------------------------------------------------------------------------------------


@both_names
@both
def test_argnums_is_refused(eqx, name):
    with pytest.raises(ValueError, match=r"`argnums` should not be passed.*tuple"):
        getattr(eqx, name)(lambda x: x, argnums=1)


@both_names
@both
def test_the_first_argument_by_keyword_is_an_error(eqx, name):
    with pytest.raises(TypeError, match="first argument passed by position, not keyword"):
        getattr(eqx, name)(lambda x: x)(x=jnp.array(1.0))


@both_names
@both
def test_no_arguments_are_an_error(eqx, name):
    with pytest.raises(TypeError, match="argument that is differentiated"):
        getattr(eqx, name)(lambda: 1.0)()


@both_names
@both
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda x: x, r"scalar-output functions. Output had shape: \(2,\)"),
        (lambda x: (x[0], x[1]), "scalar-output functions. Output was"),
        (lambda x: None, "scalar-output functions. Output was None"),
        (lambda x: 1, "real-valued outputs"),
        (lambda x: "text", "text"),
    ],
    ids=["array", "pair", "None", "int", "str"],
)
def test_a_value_that_is_no_real_scalar_is_an_error(eqx, name, loss, message):
    with pytest.raises(TypeError, match=message):
        getattr(eqx, name)(loss)(jnp.ones(2))


@both_names
@both
def test_an_unknown_option_is_an_error_that_names_it(eqx, name):
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
        getattr(eqx, name)(lambda x: x, foo=True)(jnp.array(1.0))


@both_names
@both
def test_what_the_function_raises_passes_through(eqx, name):
    def loss(x):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        getattr(eqx, name)(loss)(jnp.array(1.0))


@both_names
def test_what_is_no_function_is_an_error(name):
    with pytest.raises(TypeError, match="3 is not a callable object"):
        getattr(eqxlike, name)(3)
