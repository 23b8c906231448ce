"""How Modules are taken apart and put together."""

import functools
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
from eqxlike._module._codec import is_incomplete, make_codec
from tests.beside_equinox import both


@functools.cache
def classes(eqx):
    """The same classes on either library: all dynamic, all static, mixed, empty."""

    class Pair(eqx.Module):
        first: Any
        second: Any

    class Label(eqx.Module):
        name: str = eqx.field(static=True)
        size: int = eqx.field(static=True)

    class Mixed(Pair):
        name: str = eqx.field(static=True)
        third: Any

    class Empty(eqx.Module):
        pass

    return Pair, Label, Mixed, Empty


NUMBERS = st.integers(-5, 5) | st.floats(-5, 5) | st.booleans()
LEAVES = (
    NUMBERS
    | st.text("ab", max_size=2)
    | st.lists(st.floats(-5, 5, width=32), max_size=3).map(lambda x: np.array(x, np.float32))
)
# A tree is described by nested tuples, so that either library can build it.
PLANS = st.recursive(
    st.tuples(st.just("leaf"), LEAVES)
    | st.just(("none",))
    | st.just(("empty",))
    | st.tuples(st.just("label"), st.sampled_from("ab"), st.integers(0, 2)),
    lambda plans: (
        st.tuples(st.just("pair"), plans, plans)
        | st.tuples(st.just("mixed"), plans, plans, st.sampled_from("ab"), plans)
        | st.tuples(st.just("list"), st.lists(plans, max_size=3))
        | st.tuples(st.just("dict"), st.dictionaries(st.sampled_from("abc"), plans))
    ),
    max_leaves=8,
)


def build(plan, eqx=eqxlike):
    Pair, Label, Mixed, Empty = classes(eqx)
    match plan:
        case ("leaf", value):
            return value
        case ("none",):
            return None
        case ("empty",):
            return Empty()
        case ("label", name, size):
            return Label(name, size)
        case ("pair", first, second):
            return Pair(build(first, eqx), build(second, eqx))
        case ("mixed", first, second, name, third):
            return Mixed(build(first, eqx), build(second, eqx), name, build(third, eqx))
        case ("list", items):
            return [build(item, eqx) for item in items]
        case ("dict", items):
            return {key: build(item, eqx) for key, item in items.items()}


def identical(leaves, others):
    return len(leaves) == len(others) and all(map(lambda x, y: x is y, leaves, others))


@given(PLANS)
def test_unflatten_undoes_flatten(plan):
    tree = build(plan)
    leaves, treedef = jtu.tree_flatten(tree)
    rebuilt = treedef.unflatten(leaves)
    assert jtu.tree_structure(rebuilt) == treedef
    assert identical(jtu.tree_leaves(rebuilt), leaves)


@given(PLANS)
def test_flatten_undoes_unflatten_for_any_leaves(plan):
    treedef = jtu.tree_structure(build(plan))
    leaves = [object() for _ in range(treedef.num_leaves)]
    assert identical(jtu.tree_leaves(treedef.unflatten(leaves)), leaves)


@given(PLANS)
def test_a_map_of_the_identity_is_the_identity(plan):
    tree = build(plan)
    assert eqxlike.tree_equal(jtu.tree_map(lambda leaf: leaf, tree), tree, typematch=True)


@given(PLANS)
def test_a_map_of_a_composition_is_the_composition_of_maps(plan):
    tree = build(plan)
    twice = jtu.tree_map(str, jtu.tree_map(type, tree))
    assert jtu.tree_leaves(twice) == jtu.tree_leaves(
        jtu.tree_map(lambda leaf: str(type(leaf)), tree)
    )


@given(PLANS)
def test_flatten_with_keys_gives_the_leaves_of_flatten(plan):
    tree = build(plan)
    with_path, treedef = jtu.tree_flatten_with_path(tree)
    assert treedef == jtu.tree_structure(tree)
    assert identical([leaf for _, leaf in with_path], jtu.tree_leaves(tree))


@given(PLANS)
def test_leaves_and_key_paths_are_those_of_equinox(plan):
    def named(eqx):
        return [
            (jtu.keystr(path), type(leaf), str(leaf))
            for path, leaf in jtu.tree_leaves_with_path(build(plan, eqx))
        ]

    assert named(eqxlike) == named(equinox)


@given(PLANS)
def test_key_paths_tell_the_leaves_apart(plan):
    paths = [path for path, _ in jtu.tree_leaves_with_path(build(plan))]
    assert len({*paths}) == len(paths)


@given(PLANS.map(lambda plan: (plan, plan)) | st.tuples(PLANS, PLANS))
def test_structures_are_equal_where_those_of_equinox_are(plans):
    plan, other = plans

    def same(eqx):
        return jtu.tree_structure(build(plan, eqx)) == jtu.tree_structure(build(other, eqx))

    assert same(eqxlike) == same(equinox)


@given(PLANS)
def test_equal_structures_have_equal_hashes(plan):
    one, other = jtu.tree_structure(build(plan)), jtu.tree_structure(build(plan))
    assert (one == other, hash(one) == hash(other)) == (True, True)


@both
def test_a_static_value_is_part_of_the_structure(eqx):
    _, Label, _, _ = classes(eqx)
    assert jtu.tree_structure(Label("a", 1)) != jtu.tree_structure(Label("b", 1))


@both
def test_the_classes_of_one_body_have_different_structures(eqx):
    class One(eqx.Module):
        x: int

    class Other(eqx.Module):
        x: int

    assert jtu.tree_structure(One(1)) != jtu.tree_structure(Other(1))


@both
def test_a_subclass_without_fields_of_its_own_has_its_own_structure(eqx):
    Pair, *_ = classes(eqx)

    class Sub(Pair):
        pass

    assert jtu.tree_structure(Pair(1, 2)) != jtu.tree_structure(Sub(1, 2))


@both
def test_is_leaf_sees_modules(eqx):
    Pair, *_ = classes(eqx)
    inner = Pair(1, 2)
    leaves = jtu.tree_leaves(Pair(inner, 3), is_leaf=lambda node: node is inner)
    assert leaves == [inner, 3]


@both
def test_a_map_over_two_modules_of_different_static_fields_is_refused(eqx):
    _, _, Mixed, _ = classes(eqx)
    with pytest.raises(ValueError, match=r"[Mm]ismatch|[Dd]iff"):
        jtu.tree_map(lambda x, y: x, Mixed(1, 2, "a", 3), Mixed(1, 2, "b", 3))


@both
def test_unflatten_makes_an_instance_without_calling_init(eqx):
    called = []

    class Model(eqx.Module):
        x: int

        def __init__(self):
            called.append(None)
            self.x = 1

    jtu.tree_map(lambda leaf: leaf, Model())
    assert len(called) == 1


@both
def test_static_values_are_kept_by_reference(eqx):
    _, Label, _, _ = classes(eqx)
    name = "".join(["na", "me"])
    assert jtu.tree_map(lambda leaf: leaf, Label(name, 1)).name is name


@both
def test_a_module_passes_through_raw_jit(eqx):
    _, _, Mixed, _ = classes(eqx)
    double = jax.jit(lambda module: jtu.tree_map(lambda leaf: 2 * leaf, module))
    doubled = double(Mixed(jnp.ones(2), [3.0], "a", None))
    assert (doubled.first.tolist(), float(doubled.second[0])) == ([2, 2], 6)
    assert (type(doubled), doubled.name, doubled.third) == (Mixed, "a", None)


@both
def test_raw_jit_traces_once_for_each_structure(eqx):
    _, _, Mixed, _ = classes(eqx)
    traces = []

    @jax.jit
    def total(module):
        traces.append(module.name)
        return module.first + module.second + module.third

    for name in ("a", "b", "a"):
        for value in (1.0, 2.0):
            total(Mixed(value, value, name, value))
    assert traces == ["a", "b"]


@both
def test_a_module_passes_through_raw_grad(eqx):
    Pair, *_ = classes(eqx)
    gradient = jax.grad(lambda pair: pair.first * pair.second**2)(Pair(2.0, 3.0))
    assert (type(gradient), float(gradient.first), float(gradient.second)) == (Pair, 9, 12)


@both
def test_a_module_passes_through_raw_vmap_with_a_module_of_axes(eqx):
    Pair, *_ = classes(eqx)
    added = jax.vmap(lambda pair: pair.first + pair.second, in_axes=(Pair(0, None),))(
        Pair(jnp.arange(3), 1)
    )
    assert added.tolist() == [1, 2, 3]


@both
def test_a_module_is_a_carry_of_scan(eqx):
    _, _, Mixed, _ = classes(eqx)

    def step(module, x):
        return jtu.tree_map(lambda leaf: leaf + x, module), module.first

    final, history = jax.lax.scan(step, Mixed(0, 1, "a", 2), jnp.arange(3))
    assert ([*map(int, jtu.tree_leaves(final))], history.tolist()) == ([3, 4, 5], [0, 0, 1])


@both
def test_an_error_of_raw_jit_names_the_path_of_a_leaf_that_is_no_array(eqx):
    Pair, *_ = classes(eqx)
    with pytest.raises(TypeError, match=r"\.second\[1\]"):
        jax.jit(lambda pair: pair.first)(Pair(1, [2, "text"]))


def test_a_codec_lists_dynamic_and_static_fields():
    _, _, Mixed, _ = classes(eqxlike)
    codec = make_codec(Mixed)
    assert codec.dynamic_names == ("first", "second", "third")
    assert codec.static_names == ("name",)


def test_only_what_came_from_an_incomplete_instance_is_incomplete():
    _, _, Mixed, _ = classes(eqxlike)
    codec = make_codec(Mixed)
    half_made = object.__new__(Mixed)
    assert is_incomplete(codec.flatten(half_made)[1])
    assert not is_incomplete(codec.flatten(Mixed(1, 2, "a", 3))[1])


def test_the_file_name_of_generated_code_names_the_class():
    Pair, *_ = classes(eqxlike)
    assert Pair.__qualname__ in Pair._eqxlike_class.codec.flatten.__code__.co_filename
