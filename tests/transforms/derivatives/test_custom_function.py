"""What functions with a derivative of their own, forward or reverse, have in common."""

import copy
import inspect
import pickle
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

import eqxlike
from eqxlike import filter_custom_jvp, filter_custom_vjp
from tests.beside_equinox import both

each = pytest.mark.parametrize("name", ["filter_custom_jvp", "filter_custom_vjp"])
TWO, THREE = jnp.float32(2), jnp.float32(3)


def with_derivative(eqx, name, function):
    """`function(x, *args)` with seven times the tangent or cotangent as its derivative in `x`."""
    custom = getattr(eqx, name)(function)
    if name == "filter_custom_jvp":
        custom.def_jvp(lambda primals, tangents: (function(*primals), 7 * tangents[0]))
    else:
        custom.def_fwd(lambda perturbed, *args: (function(*args), None))
        custom.def_bwd(lambda residuals, cotangent, perturbed, *args: 7 * cotangent)
    return custom


@filter_custom_jvp
def of_this_module(x, y: int = 2, *, key=None):
    """Doubles."""
    return x * y


# --- one among functions ------------------------------------------------------------------------


@each
def test_shows_the_metadata_of_the_function(name):
    def loss(x, y: int = 3, *, key=None):
        """A loss."""

    custom = getattr(eqxlike, name)(loss)
    assert (custom.__name__, custom.__doc__, custom.__module__) == ("loss", "A loss.", __name__)
    assert custom.__wrapped__ is loss
    assert inspect.signature(custom) == inspect.signature(loss)


@each
def test_is_a_class_with_a_leaf_for_each_instance(name):
    custom = with_derivative(eqxlike, name, jnp.sin)
    assert isinstance(custom, getattr(eqxlike, name))
    assert jtu.tree_leaves(custom) == [custom]


@each
def test_says_what_it_wraps(name):
    assert repr(getattr(eqxlike, name)(len)) == f"{name}(<built-in function len>)"


def test_is_pickled_by_name():
    assert pickle.loads(pickle.dumps(of_this_module)) is of_this_module
    with pytest.raises(AttributeError, match="local object"):
        pickle.dumps(equinox.filter_custom_jvp(inspect.unwrap(of_this_module)))


@each
def test_one_that_has_no_name_of_its_own_is_not_pickled(name):
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(getattr(eqxlike, name)(jnp.sin))


@each
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_is_copied_as_functions_are(name, copied):
    custom = with_derivative(eqxlike, name, lambda x: x)
    assert copied(custom) is custom
    assert copied([custom]) == [custom]


@each
def test_may_wrap_a_module(name):
    class Model(eqxlike.Module):
        weight: Any

        def __call__(self, x):
            return self.weight * x

    custom = with_derivative(eqxlike, name, Model(TWO))
    assert (custom(THREE), jax.grad(custom)(THREE), copy.copy(custom)) == (6, 7, custom)


@each
def test_is_a_method_in_the_body_of_a_class(name):
    class Model(eqxlike.Module):
        weight: Any

        @getattr(eqxlike, name)
        def scale(self, x):
            """Scales."""
            return self.weight * x

        if name == "filter_custom_jvp":

            @scale.def_jvp
            def scale_jvp(primals, tangents):
                self, x = primals
                return self.weight * x, 7 * tangents[0].weight
        else:

            @scale.def_fwd
            def scale_forward(perturbed, self, x):
                return self.weight * x, None

            @scale.def_bwd
            def scale_backward(residuals, cotangent, perturbed, self, x):
                return Model(7 * cotangent)

    model = Model(TWO)
    assert (model.scale(THREE), model.scale.__name__, model.scale.__doc__) == (
        6,
        "scale",
        "Scales.",
    )
    assert eqxlike.filter_grad(lambda model: model.scale(THREE))(model).weight == 7
    assert Model.scale(model, THREE) == 6


def test_methods_of_equinox_lose_the_instance():
    class Model(equinox.Module):
        scale = equinox.filter_custom_jvp(lambda self, x: x)
        scale.def_jvp(len)

    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        Model().scale(THREE)


# --- under transformations ----------------------------------------------------------------------


@both
@each
def test_without_differentiation_the_function_is_called(eqx, name):
    seen = []
    custom = with_derivative(eqx, name, lambda x, *rest: seen.append((x, *rest)) or (x, *rest[:1]))
    assert custom(TWO, 2.5, "s", None) == (2.0, 2.5)
    assert seen == [(TWO, 2.5, "s", None)]


TRANSFORMED = {
    "grad": lambda f: jax.grad(f)(TWO),
    "jit of grad": lambda f: jax.jit(jax.grad(f))(TWO),
    "grad of jit": lambda f: jax.grad(jax.jit(f))(TWO),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f))(jnp.ones(2))[1],
    "grad of vmap": lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum())(jnp.ones(2))[1],
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f))(TWO),
    "grad of cond": lambda f: jax.grad(lambda x: jax.lax.cond(x > 0, f, lambda x: x, x))(TWO),
    "grad of scan": lambda f: jax.grad(
        lambda x: jax.lax.scan(lambda x, _: (f(x), None), x, None, length=1)[0]
    )(TWO),
}


@pytest.mark.parametrize("transformed", TRANSFORMED.values(), ids=TRANSFORMED)
@each
@both
def test_the_derivative_is_its_own_under(eqx, name, transformed):
    custom = with_derivative(eqx, name, lambda x, y, label: x * y)
    assert transformed(lambda x: custom(x, THREE, "label")) == 7


@both
@each
def test_under_filter_jit_and_filter_grad(eqx, name):
    custom = with_derivative(eqx, name, lambda x, function, label: function(x))
    assert eqx.filter_jit(eqx.filter_grad(custom))(TWO, jnp.sin, "label") == 7
    assert eqx.filter_grad(eqx.filter_jit(custom))(TWO, jnp.sin, "label") == 7


@both
@each
def test_the_derivative_may_be_differentiated(eqx, name):
    custom = getattr(eqx, name)(lambda x: x**2)
    if name == "filter_custom_jvp":
        custom.def_jvp(lambda primals, tangents: (custom(*primals), primals[0] ** 3 * tangents[0]))
    else:
        custom.def_fwd(lambda perturbed, x: (custom(x), None))
        custom.def_bwd(lambda residuals, cotangent, perturbed, x: x**3 * cotangent)
    assert jax.grad(jax.grad(custom))(TWO) == 12


@both
@each
def test_one_traced_call_may_be_differentiated_in_different_arguments(eqx, name):
    custom = with_derivative(eqx, name, lambda x: x[0] * x[1])
    if name == "filter_custom_jvp":
        custom.def_jvp(
            lambda primals, tangents: (
                primals[0][0],
                sum(10 * t if i else t for i, t in enumerate(tangents[0]) if t is not None),
            )
        )
    else:
        custom.def_bwd(
            lambda residuals, cotangent, perturbed, x: tuple(
                cotangent * (10 * i or 1) if is_perturbed else None
                for i, is_perturbed in enumerate(perturbed)
            )
        )
    jitted = jax.jit(lambda x, y: custom((x, y)))
    assert jax.grad(jitted, argnums=0)(TWO, THREE) == 1
    assert jax.grad(jitted, argnums=1)(TWO, THREE) == 10
    assert jax.grad(jitted, argnums=(0, 1))(TWO, THREE) == (1, 10)


@each
def test_the_jaxpr_has_one_call_and_nothing_else(name):
    def equations(eqx):
        custom = with_derivative(eqx, name, lambda x, y, label: x * y)
        return jax.make_jaxpr(lambda x, y: custom(x, y, "label"))(TWO, THREE).eqns

    (ours,), theirs = equations(eqxlike), equations(equinox)
    assert ours.primitive == theirs[-1].primitive
    assert len(theirs) == (1 if name == "filter_custom_jvp" else 2)


@each
def test_leaks_no_tracers(name):
    custom = with_derivative(eqxlike, name, lambda x, label: (x, label)[0])
    with jax.checking_leaks():
        assert jax.jit(jax.grad(lambda x: custom(x, "label")))(TWO) == 7


# --- errors -------------------------------------------------------------------------------------


@both
@each
def test_closing_over_what_is_differentiated_is_an_error(eqx, name):
    def loss(z):
        return with_derivative(eqx, name, lambda x: x * z)(TWO)

    with pytest.raises(jax.errors.UnexpectedTracerError):
        jax.grad(loss)(THREE)


@each
def test_the_error_of_a_closure_says_what_to_write_instead(name):
    def scale(x, function):
        return function(x)

    def loss(z):
        return with_derivative(eqxlike, name, scale)(TWO, lambda x: x * z)

    with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
        jax.grad(loss)(THREE)
    notes = "".join(caught.value.__notes__)
    assert "This was while scale was called" in notes
    assert "filter_closure_convert" in notes


@both
@each
def test_closing_over_what_is_only_jitted_is_allowed(eqx, name):
    def loss(z):
        custom = with_derivative(eqx, name, lambda x: x * z)
        return jax.grad(custom)(TWO)

    assert jax.jit(loss)(THREE) == 7


@both
@each
def test_what_the_function_raises_passes_through(eqx, name):
    def function(x):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        with_derivative(eqx, name, function)(TWO)


@each
def test_what_is_no_function_is_an_error(name):
    with pytest.raises(TypeError, match=f"3 is not a callable object: `{name}` expects"):
        getattr(eqxlike, name)(3)


@pytest.mark.parametrize(
    "define",
    [
        lambda: filter_custom_jvp(len).def_jvp(3),
        lambda: filter_custom_vjp(len).def_fwd(3),
        lambda: filter_custom_vjp(len).def_bwd(3),
    ],
    ids=["def_jvp", "def_fwd", "def_bwd"],
)
def test_derivative_that_is_no_function_is_an_error(define):
    with pytest.raises(TypeError, match=r"3 is not a callable object: `filter_custom_.*def_"):
        define()
