"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike
from eqxlike import filter_checkpoint
from tests.beside_equinox import both

TWO, THREE = jnp.float32(2), jnp.float32(3)


def primitives(function, *args):
    """The names of all primitives in the jaxpr of `function`, those of inner jaxprs included."""

    def inside(jaxpr):
        for equation in jaxpr.eqns:
            yield equation.primitive.name
            for inner in jax.tree_util.tree_leaves(
                list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")
            ):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from inside(inner)

    return list(inside(jax.make_jaxpr(function)(*args).jaxpr))


def sine(x, label="s"):
    return jnp.sin(jnp.sin(x)), label


# --- output ------------------------------------------------------------------------------------


@both
def test_arguments_and_output_may_be_anything(eqx):
    def function(x, activation, *, power, names):
        return activation(x) ** power, {"names": names, "x": x, "function": activation}

    arguments = (TWO, jnp.abs), {"power": 2, "names": ("a", None)}
    output = eqx.filter_checkpoint(function)(*arguments[0], **arguments[1])
    assert output == function(*arguments[0], **arguments[1])


@both
def test_gradients_are_those_of_the_function(eqx):
    class Model(eqx.Module):
        weight: Any
        activation: Any

        def __call__(self, x):
            return self.activation(self.weight * x)

    model = Model(TWO, jnp.sin)
    gradient = eqx.filter_grad(lambda model: eqx.filter_checkpoint(model)(THREE))(model)
    np.testing.assert_allclose(gradient.weight, 3 * np.cos(6.0), rtol=1e-5)
    assert gradient.activation is None


@both
def test_gradient_reaches_a_closed_over_array(eqx):
    assert jax.grad(lambda w: eqx.filter_checkpoint(lambda x: w * x)(TWO))(THREE) == 2


@both
@pytest.mark.parametrize("leaf", [2.5, 2, True, "s", None, len])
def test_what_is_no_array_is_passed_as_it_is(eqx, leaf):
    seen = []
    eqx.filter_checkpoint(lambda leaf: seen.append(leaf))(leaf)
    assert seen[0] is leaf


@both
@pytest.mark.parametrize("leaf", [TWO, np.float32(2), jnp.int32(2)], ids=repr)
def test_arrays_are_traced(eqx, leaf):
    seen = []
    eqx.filter_checkpoint(lambda leaf: seen.append(leaf))(leaf)
    assert isinstance(seen[0], jax.core.Tracer)


# --- what is kept -------------------------------------------------------------------------------


@both
def test_the_backward_pass_calculates_anew(eqx):
    def loss(x):
        return eqx.filter_checkpoint(sine)(x)[0]

    def count(function):
        return primitives(jax.grad(function), TWO).count("sin")

    assert (count(loss), count(lambda x: sine(x)[0])) == (3, 2)


@both
def test_the_policy_says_what_is_kept(eqx):
    def loss(x):
        keep = jax.checkpoint_policies.everything_saveable
        return eqx.filter_checkpoint(sine, policy=keep)(x)[0]

    assert primitives(jax.grad(loss), TWO).count("sin") == 2


@both
@pytest.mark.parametrize("prevent_cse", [True, False])
def test_options_are_passed_on(eqx, prevent_cse):
    policy = jax.checkpoint_policies.dots_saveable
    function = eqx.filter_checkpoint(sine, prevent_cse=prevent_cse, policy=policy)
    (equation,) = jax.make_jaxpr(lambda x: function(x)[0])(TWO).eqns
    assert (equation.params["prevent_cse"], equation.params["policy"]) == (prevent_cse, policy)


def test_the_function_runs_once_more_for_a_gradient():
    runs = []

    @filter_checkpoint
    def function(x):
        jax.debug.callback(lambda: runs.append(1))
        return jnp.sin(x)

    function(TWO)
    jax.effects_barrier()
    once = len(runs)
    eqxlike.filter_grad(function)(TWO)
    jax.effects_barrier()
    assert (once, len(runs) - once) == (1, 2)


# --- composition --------------------------------------------------------------------------------


@both
def test_is_a_decorator_with_arguments(eqx):
    @eqx.filter_checkpoint(prevent_cse=False)
    def function(x, label):
        return x**2, label

    assert function(TWO, "s") == (4.0, "s")


@both
def test_under_filter_jit_and_filter_vmap(eqx):
    function = eqx.filter_checkpoint(lambda x, label: (x**2, label))
    assert eqx.filter_jit(function)(TWO, "s") == (4.0, "s")
    assert eqx.filter_vmap(lambda x: function(x, "s")[0])(jnp.arange(3.0)).tolist() == [0, 1, 4]


@both
def test_inside_scan(eqx):
    function = eqx.filter_checkpoint(lambda x, label: x * x, prevent_cse=False)

    def loss(x):
        return jax.lax.scan(lambda x, _: (function(x, "s"), None), x, None, length=2)[0]

    assert jax.grad(loss)(TWO) == 32


def test_is_a_pytree_of_what_it_wraps():
    assert jax.tree_util.tree_leaves(filter_checkpoint(eqxlike.Partial(sine, TWO))) == [sine, TWO]


def test_leaks_no_tracers():
    with jax.checking_leaks():
        assert filter_checkpoint(lambda x: (x, "s"))(TWO) == (2.0, "s")


# --- errors -------------------------------------------------------------------------------------


@both
def test_what_the_function_raises_passes_through(eqx):
    def function(x):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        eqx.filter_checkpoint(function)(TWO)


@both
def test_an_unknown_option_is_an_error_that_names_it(eqx):
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
        eqx.filter_checkpoint(sine, foo=True)


@pytest.mark.parametrize("what", [3, None])
def test_what_is_no_function_is_an_error(what):
    with pytest.raises(TypeError, match="is not a callable object: `filter_checkpoint` expects"):
        filter_checkpoint(what)
