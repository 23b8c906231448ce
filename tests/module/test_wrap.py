"""`module_update_wrapper`, and wrappers that are pickled by name.

`programs/wrapping.py` compares the metadata with Equinox.
"""

import copy
import pickle
import sys
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

import eqxlike
from eqxlike import Module, filter_grad, filter_jit, module_update_wrapper


class Logged(Module):
    function: Any
    weight: Any = None

    def __call__(self, *args):
        return self.function(*args)

    @property
    def __wrapped__(self):
        return self.function


def double(x):
    """Doubles."""
    return 2 * x


def triple(x):
    """Triples."""
    return 3 * x


def test_error_for_a_class_without_the_property_shows_the_property():
    with pytest.raises(ValueError, match=r"(?s)Holder has none.*def __wrapped__\(self\):"):
        module_update_wrapper(Holder(double))


def described(**changed):
    """A function whose metadata are changed. All these functions have the same code."""

    def function(x: int) -> int:
        return x

    for name, value in changed.items():
        setattr(function, f"__{name}__", value)
    return function


UNHASHABLE: list[Any] = [[], []]

DESCRIBED = [
    described(),
    described(name="other"),
    described(qualname="other"),
    described(doc="Other."),
    described(module="other"),
    described(annotations={"x": float, "return": int}),
    described(annotations={"return": int, "x": int}),
    described(annotations={}),
    described(annotations={"x": UNHASHABLE[0]}),
    described(annotations={"x": UNHASHABLE[1]}),
]


def test_wrappers_with_equal_metadata_have_equal_structures():
    structures, others = (
        [jtu.tree_structure(module_update_wrapper(Logged(None), each)) for each in DESCRIBED]
        for _ in range(2)
    )
    for index, structure in enumerate(structures):
        assert [structure == each for each in others] == [at == index for at in range(len(others))]
        assert hash(structure) == hash(others[index])


def test_updated_wrapper_leaves_unset_fields_unset():
    class Wrapper(Module):
        function: Any
        other: Any

        def __init__(self):
            self.function = double
            self.other = [leaf.__name__ for leaf in jtu.tree_leaves(module_update_wrapper(self))]

        @property
        def __wrapped__(self):
            return self.function

    assert Wrapper().other == ["double"]


@pytest.mark.parametrize("transform", [filter_jit, filter_grad, eqxlike.filter_vmap])
def test_transformed_functions_show_the_metadata_of_the_wrapped_or_given_function(transform):
    told = module_update_wrapper(transform(double), triple)
    returned = filter_jit(lambda it: it)
    for way in (lambda it: it, copy.deepcopy, lambda it: returned(Holder(it)).function):
        wrapper, updated = way(transform(double)), way(told)
        assert (wrapper.__name__, wrapper.__doc__) == ("double", "Doubles.")
        assert (updated.__name__, updated.__doc__) == ("triple", "Triples.")


# --- pickling by name ---------------------------------------------------------------------------


@filter_jit
def jitted(x):
    return 2 * x


@eqxlike.filter_grad
def gradient(x):
    return x**2


class Holder(Module):
    function: Any

    @filter_jit
    def method(self, x):
        return 3 * x


not_found_by_its_name = filter_jit(double)


def test_decorated_function_is_copied_and_pickled_by_name():
    for wrapper in (jitted, gradient, Holder.method):
        assert copy.copy(wrapper) is copy.deepcopy(wrapper) is wrapper
        assert pickle.loads(pickle.dumps(wrapper)) is wrapper
    mapped = jtu.tree_map(lambda leaf: leaf, Holder(jitted))
    assert mapped.function is not jitted
    for holder in (Holder(jitted), mapped):
        assert pickle.loads(pickle.dumps(holder)).function is jitted
    method = pickle.loads(pickle.dumps(Holder(1).method))
    assert (method(jnp.array(2.0)), method.__self__) == (6.0, Holder(1))


def test_wrapper_under_another_name_or_in_a_script_is_pickled_by_value(monkeypatch):
    other = pickle.loads(pickle.dumps(not_found_by_its_name))
    assert other is not not_found_by_its_name
    assert other(jnp.array(2.0)) == 4

    # In another process, `__main__` may not contain the function.
    def function(x):
        return x

    function.__module__, function.__qualname__ = "__main__", "function"
    wrapper = filter_jit(function)
    monkeypatch.setattr(sys.modules["__main__"], "function", wrapper, raising=False)
    assert not isinstance(wrapper.__reduce_ex__(2), str)
