"""`module_update_wrapper`, and wrappers that pickle knows by name.

What the metadata are and what keeps them is compared with Equinox in `programs/wrapping.py`.
"""

import copy
import pickle
import sys
from typing import Any

import jax
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


def test_the_error_for_a_class_without_the_property_says_what_to_write():
    class Wrapper(Module):
        function: Any

    with pytest.raises(ValueError, match=r"(?s)Wrapper has none.*def __wrapped__\(self\):"):
        module_update_wrapper(Wrapper(double))


def test_metadata_are_part_of_the_structure():
    structures = [
        jtu.tree_structure(module_update_wrapper(Logged(None), wrapped))
        for wrapped in (double, double, triple)
    ]
    assert structures[0] == structures[1] != structures[2]
    assert hash(structures[0]) == hash(structures[1])


def described(**changed):
    """A function that differs from the others only in what it says of itself."""

    def function(x: int) -> int:
        return x

    for name, value in changed.items():
        setattr(function, f"__{name}__", value)
    return function


UNHASHABLE: list[Any] = [[], []]

DESCRIBED = {
    "as it is": described(),
    "name": described(name="other"),
    "qualified name": described(qualname="other"),
    "documentation": described(doc="Other."),
    "no documentation": described(doc=None),
    "module": described(module="other"),
    "annotations": described(annotations={"x": float, "return": int}),
    "order of annotations": described(annotations={"return": int, "x": int}),
    "no annotations": described(annotations={}),
    "unhashable annotation": described(annotations={"x": UNHASHABLE[0]}),
    "another unhashable annotation": described(annotations={"x": UNHASHABLE[1]}),
}


def shown(wrapper):
    names = ("__name__", "__qualname__", "__doc__", "__module__")
    annotations = {name: id(each) for name, each in wrapper.__annotations__.items()}
    return [getattr(wrapper, name) for name in names], list(annotations.items())


@pytest.mark.parametrize("first", DESCRIBED)
@pytest.mark.parametrize("second", DESCRIBED)
def test_wrappers_have_one_structure_if_they_say_the_same_of_themselves(first, second):
    wrappers = [module_update_wrapper(Logged(None), DESCRIBED[name]) for name in (first, second)]
    structures = [*map(jtu.tree_structure, wrappers)]
    assert (structures[0] == structures[1]) is (shown(wrappers[0]) == shown(wrappers[1]))


# A list keeps the partition from being cached.
@pytest.mark.parametrize("held", [None, 1.0, [1.0]], ids=["nothing", "a number", "a list"])
@pytest.mark.parametrize("jit", [jax.jit, filter_jit])
def test_each_wrapper_comes_back_with_its_own_metadata(held, jit):
    pass_on = jit(lambda wrapper: wrapper)
    wrappers = [module_update_wrapper(Logged(None, held), each) for each in DESCRIBED.values()]
    for _ in range(3):
        for wrapper in wrappers:
            assert shown(pass_on(wrapper)) == shown(wrapper)


def test_a_wrapper_passes_through_raw_jit():
    updated = module_update_wrapper(Logged(jnp.ones(2)), double)
    assert jax.jit(lambda wrapper: wrapper)(updated).__name__ == "double"


def test_what_filter_jit_returned_shows_its_metadata_at_first_sight():
    updated = module_update_wrapper(Logged(double, jnp.ones(2)))
    pass_on = filter_jit(lambda wrapper: wrapper)
    # The second call takes the cached partition of what the first returned.
    assert pass_on(pass_on(updated)).__doc__ == "Doubles."


def test_filter_jit_traces_once_for_all_weights_of_a_wrapper():
    traces = []

    @filter_jit
    def call(wrapper):
        traces.append(wrapper.__name__)
        return wrapper(wrapper.weight)

    outputs = [
        float(call(module_update_wrapper(Logged(double, jnp.array(value))))) for value in (1.0, 2.0)
    ]
    assert (outputs, traces) == ([2.0, 4.0], ["double"])


def test_a_wrapper_that_was_not_updated_keeps_the_documentation_of_its_class():
    mapped = jtu.tree_map(lambda leaf: leaf, Logged(double, 1))
    assert (mapped.__doc__, hasattr(mapped, "__name__")) == (Logged.__doc__, False)


def test_fields_of_an_updated_wrapper_that_were_not_set_stay_so():
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


WAYS_ON = {
    "as it is": lambda wrapper: wrapper,
    "tree_map": lambda wrapper: jtu.tree_map(lambda leaf: leaf, wrapper),
    "filter_jit": lambda wrapper: filter_jit(lambda wrapper: wrapper)(wrapper),
    "inside a Module": lambda wrapper: filter_jit(lambda it: it)(Holder(wrapper)).function,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("way", WAYS_ON)
@pytest.mark.parametrize("transform", [filter_jit, filter_grad, eqxlike.filter_vmap])
def test_one_of_our_wrappers_shows_what_it_wraps(way, transform):
    wrapper = WAYS_ON[way](transform(double))
    assert (wrapper.__name__, wrapper.__doc__) == ("double", "Doubles.")


@pytest.mark.parametrize("way", WAYS_ON)
@pytest.mark.parametrize("transform", [filter_jit, filter_grad, eqxlike.filter_vmap])
def test_one_of_our_wrappers_shows_what_it_is_told_to(way, transform):
    updated = WAYS_ON[way](module_update_wrapper(transform(double), triple))
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


@pytest.mark.parametrize(
    "wrapper", [jitted, gradient, Holder.method], ids=["jit", "grad", "method"]
)
@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda wrapper: pickle.loads(pickle.dumps(wrapper))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_decorated_function_is_copied_as_a_function_is(wrapper, duplicate):
    assert duplicate(wrapper) is wrapper


def test_a_module_that_holds_a_decorated_function_pickles():
    assert pickle.loads(pickle.dumps(Holder(jitted))).function is jitted


def test_a_decorated_method_pickles_with_its_instance():
    method = pickle.loads(pickle.dumps(Holder(1).method))
    assert (method(jnp.array(2.0)), method.__self__) == (6.0, Holder(1))


def test_a_wrapper_under_another_name_pickles_by_its_parts():
    other = pickle.loads(pickle.dumps(not_found_by_its_name))
    assert other is not not_found_by_its_name
    assert other(jnp.array(2.0)) == 4


def test_a_decorated_function_of_a_script_pickles_by_its_parts(monkeypatch):
    # Another process has another `__main__`, where what came by name would not be found.
    def function(x):
        return x

    function.__module__, function.__qualname__ = "__main__", "function"
    wrapper = filter_jit(function)
    monkeypatch.setattr(sys.modules["__main__"], "function", wrapper, raising=False)
    assert not isinstance(wrapper.__reduce_ex__(2), str)
