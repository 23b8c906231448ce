"""What `filter_jit` returns: a pytree with the metadata of the function."""

import copy
import functools
import inspect
import pickle
import types

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

from eqxlike import filter_grad, filter_jit, is_array
from tests.transforms.jit.models import Affine, X, double, equal, scaled

# The wrapper is a pytree.


def test_wrapper_of_a_module_has_its_arrays_as_leaves():
    model = Affine(jnp.ones(2), jnp.zeros(2))
    leaves = jtu.tree_leaves(filter_jit(model))
    assert [*map(id, leaves)] == [id(model.scale), id(model.shift)]


def test_wrapper_of_a_method_has_the_arrays_of_its_instance_as_leaves():
    model = Affine(jnp.ones(2), jnp.zeros(2))
    leaves = [leaf for leaf in jtu.tree_leaves(filter_jit(model.apply)) if is_array(leaf)]
    assert [*map(id, leaves)] == [id(model.scale), id(model.shift)]


def test_wrapper_of_a_partial_has_the_arrays_bound_to_it_as_leaves():
    x, y = jnp.ones(2), jnp.zeros(2)
    wrapper = filter_jit(functools.partial(scaled, x, scale=y))
    assert {id(leaf) for leaf in jtu.tree_leaves(wrapper) if is_array(leaf)} == {id(x), id(y)}


def test_wrapper_with_other_leaves_computes_with_them():
    wrapper = filter_jit(Affine(jnp.ones(3), 0.0))
    wrapper(X)
    doubled = jtu.tree_map(lambda leaf: 2 * leaf if is_array(leaf) else leaf, wrapper)
    assert equal(doubled(X), 2 * X)
    assert equal(wrapper(X), X)


def test_wrapper_passes_through_jax_jit():
    wrapper = filter_jit(Affine(jnp.ones(3), jnp.zeros(3)))
    assert equal(jax.jit(lambda wrapper, x: wrapper(x))(wrapper, X), X)


def test_wrapper_passes_through_filter_jit():
    wrapper = filter_jit(Affine(jnp.ones(3)))
    assert equal(filter_jit(lambda wrapper, x: wrapper(x))(wrapper, X), X)


def test_wrapper_is_returned_from_filter_jit():
    wrapper = filter_jit(lambda x: filter_jit(Affine(x)))(X)
    assert equal(wrapper(X), X * X)


def test_gradient_in_a_wrapper_is_that_in_its_module():
    wrapper = filter_jit(Affine(jnp.ones(3), jnp.zeros(3)))
    gradient = filter_grad(lambda wrapper: wrapper(X).sum())(wrapper)
    assert equal(jtu.tree_leaves(gradient)[0], X)


@pytest.mark.parametrize(
    "clone", [copy.copy, copy.deepcopy, lambda wrapper: pickle.loads(pickle.dumps(wrapper))]
)
def test_wrapper_is_cloned(clone):
    wrapper = filter_jit(double)
    wrapper(X)
    assert equal(clone(wrapper)(X), 2 * X)


def test_wrappers_of_one_function_are_equal():
    assert filter_jit(double) == filter_jit(double)


# Metadata.


def test_wrapped_is_the_function():
    assert filter_jit(double).__wrapped__ is double


def test_name_is_that_of_the_function():
    assert filter_jit(double).__name__ == "double"


def test_doc_is_that_of_the_function():
    assert filter_jit(double).__doc__ == "Twice the argument."


def test_signature_is_that_of_the_function():
    assert inspect.signature(filter_jit(double)) == inspect.signature(double)


def test_signature_of_a_wrapped_module_is_that_of_its_call():
    assert str(inspect.signature(filter_jit(Affine(1.0)))) == "(x)"


def test_signature_of_a_jitted_method_has_no_self():
    assert str(inspect.signature(Affine(1.0).jitted)) == "(x)"


def test_signature_of_a_wrapped_partial_lacks_what_is_bound():
    assert list(inspect.signature(filter_jit(functools.partial(scaled, 1.0))).parameters) == [
        "scale"
    ]


def test_name_of_a_jitted_method_is_that_of_the_function():
    assert Affine(1.0).jitted.__name__ == "jitted"


def test_name_stands_in_what_is_lowered():
    assert "jit_double" in filter_jit(double).lower(X).as_text()


def test_wrapper_refuses_arguments_that_the_function_does_not_take():
    with pytest.raises(TypeError, match=r"double\(\)"):
        filter_jit(double)(X, unknown=1)


def test_wrapper_refuses_too_few_arguments():
    with pytest.raises(TypeError, match=r"double\(\).*x"):
        filter_jit(double)()


def test_function_that_is_pickled_by_value_leaves_what_was_compiled_behind():
    def twice(x):
        return 2 * x

    filter_jit(twice)(jnp.ones(2))
    loaded = types.FunctionType(twice.__code__, globals())
    loaded.__dict__.update(pickle.loads(pickle.dumps(vars(twice))))
    assert equal(filter_jit(loaded)(jnp.ones(2)), jnp.full(2, 2.0))
