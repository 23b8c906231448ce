"""Modules as pytrees: flattening, key paths, equality, hashing, copies, pickles, references."""

import copy
import dataclasses
import gc
import pickle
import weakref
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

import eqxlike
from tests.module.programs.registry import program


class EquinoxPair(equinox.Module):
    x: Any
    name: str = equinox.field(static=True, default="pair")

    def scale(self, y):
        return self.x * y


class EqxlikePair(eqxlike.Module):
    x: Any
    name: str = eqxlike.field(static=True, default="pair")

    def scale(self, y):
        return self.x * y


def pair(eqx):
    """A class that pickle can find."""
    return {equinox: EquinoxPair, eqxlike: EqxlikePair}[eqx]


@program
def leaves_in_the_order_of_the_fields(eqx):
    class Base(eqx.Module):
        b: Any
        a: Any

    class Model(Base):
        d: Any
        c: Any
        b: Any

    return jtu.tree_leaves(Model(1, 2, 3, 4))


@program
def key_paths(eqx):
    Pair = pair(eqx)
    tree = {"pairs": [Pair(1), Pair((2, 3))], "one": Pair({"a": Pair(4)})}
    return [(jtu.keystr(path), leaf) for path, leaf in jtu.tree_leaves_with_path(tree)]


@program
def key_paths_are_of_attributes(eqx):
    ((path, _),) = jtu.tree_leaves_with_path(pair(eqx)(1))
    return path == (jtu.GetAttrKey("x"),)


@program
def map_with_path(eqx):
    mapped = jtu.tree_map_with_path(lambda path, leaf: (jtu.keystr(path), leaf), pair(eqx)(1))
    return mapped.x


@program
def none_in_a_field(eqx):
    return jtu.tree_leaves(pair(eqx)(None)), jtu.tree_map(lambda x: x, pair(eqx)(None)).x


@program
def map_over_two_modules(eqx):
    Pair = pair(eqx)
    return jtu.tree_map(lambda x, y: x + y, Pair((1, 2)), Pair((3, 4))).x


@program
def map_over_modules_of_different_static_fields(eqx):
    Pair = pair(eqx)
    return jtu.tree_map(lambda x, y: x + y, Pair(1, "a"), Pair(1, "b"))


@program
def map_over_modules_of_different_classes(eqx):
    class Other(eqx.Module):
        x: Any

    return jtu.tree_map(lambda x, y: x + y, pair(eqx)(1), Other(1))


@program
def leaves_of_any_kind_after_a_map(eqx):
    mapped = jtu.tree_map(lambda _: object, pair(eqx)((1, 2)))
    return [leaf is object for leaf in mapped.x], mapped.name


@program
def map_to_another_structure(eqx):
    return jtu.tree_map(lambda x: [x, x], pair(eqx)(1)).x


@program
def transpose(eqx):
    Pair = pair(eqx)
    outer, inner = jtu.tree_structure(Pair(0)), jtu.tree_structure([0, 0])
    return [each.x for each in jtu.tree_transpose(outer, inner, Pair([1, 2]))]


@program
def structures_as_keys(eqx):
    Pair = pair(eqx)
    one, same, other = map(jtu.tree_structure, (Pair(1), Pair(2), Pair(1, "other")))
    return {one: "found"}.get(same), {one: "found"}.get(other)


@program
def equality_of_modules(eqx):
    Pair = pair(eqx)
    others = [Pair(1), Pair(1.0), Pair(2), Pair(1, "other"), Pair((1,)), 1, None]
    return [Pair(1) == other for other in others]


@program
def equality_of_modules_with_arrays(eqx):
    Pair = pair(eqx)
    one = Pair(jnp.ones(2))
    others = [Pair(jnp.ones(2)), Pair(jnp.zeros(2)), Pair(jnp.ones(3)), Pair(np.ones(2)), Pair(1)]
    return [bool(one == other) for other in others]


@program
def hashes_of_equal_modules(eqx):
    Pair = pair(eqx)
    return hash(Pair((1, "a"))) == hash(Pair((1, "a"))), {Pair(1): "found"}[Pair(1)]


@program
def hash_of_a_module_with_an_array(eqx):
    return hash(pair(eqx)(jnp.ones(2)))


@program
def set_of_modules(eqx):
    Pair = pair(eqx)
    return len({Pair(1), Pair(1), Pair(2)})


@program
def shallow_copy_shares(eqx):
    one = pair(eqx)([1])
    other = copy.copy(one)
    return other is one, other.x is one.x, other == one


@program
def deep_copy_does_not_share(eqx):
    one = pair(eqx)([1, pair(eqx)([2])])
    other = copy.deepcopy(one)
    return other.x is one.x, other.x[1].x is one.x[1].x, other == one


@program
def pickle_of_an_instance(eqx):
    one = pair(eqx)({"a": np.ones(2), "b": pair(eqx)(3)})
    other = pickle.loads(pickle.dumps(one))
    return other.x["a"].tolist(), other.x["b"].x, other.name, type(other) is type(one)


@program
def pickle_of_an_instance_with_jax_arrays(eqx):
    other = pickle.loads(pickle.dumps(pair(eqx)(jnp.arange(2))))
    return other.x.tolist(), isinstance(other.x, jax.Array)


@program
def pickle_of_a_class_and_of_a_method(eqx):
    Pair = pair(eqx)
    method = pickle.loads(pickle.dumps(Pair(3).scale))
    return pickle.loads(pickle.dumps(Pair)) is Pair, method(2)


@program
def replaced_field(eqx):
    one = pair(eqx)(1)
    other = dataclasses.replace(one, x=2)
    return one.x, other.x, other.name


@program
def replaced_field_that_takes_no_argument(eqx):
    class Model(eqx.Module):
        x: int = eqx.field(init=False, default=3)

    return dataclasses.replace(Model(), x=2)


@program
def replaced_field_under_a_custom_init(eqx):
    class Model(eqx.Module):
        x: int

        def __init__(self, size):
            self.x = size

    return dataclasses.replace(Model(1), x=2)


@program
def dictionary_and_tuple_of_the_fields(eqx):
    one = pair(eqx)(pair(eqx)(1))
    return dataclasses.asdict(one), dataclasses.astuple(one)


@program
def match_by_position_and_by_name(eqx):
    match pair(eqx)(1, "a"):
        case EquinoxPair(x, name=name) | EqxlikePair(x, name=name):
            by_name = x, name
    match pair(eqx)(1, "a"):
        case EquinoxPair(x, name) | EqxlikePair(x, name):
            by_position = x, name
    return by_name, by_position, pair(eqx).__match_args__


@program
def match_of_keyword_only_fields(eqx):
    class Model(eqx.Module):
        x: int
        y: int = eqx.field(kw_only=True)
        z: int = eqx.field(init=False, default=1)

    return Model.__match_args__


@program
def weak_reference(eqx):
    one = pair(eqx)(1)
    reference = weakref.ref(one)
    was_alive = reference() is one
    del one
    return was_alive, reference()


@program
def instance_in_a_cycle_is_collected(eqx):
    holder = []
    one = pair(eqx)(holder)
    holder.append(one)
    reference = weakref.ref(one)
    del one, holder
    gc.collect()
    return reference()


@program
def dictionary_of_the_instance(eqx):
    one = pair(eqx)(1)
    return vars(one), sorted(each for each in dir(one) if not each.startswith("_"))


@program
def flattened_in_init(eqx):
    seen = []

    class Model(eqx.Module):
        x: int
        y: int
        name: str = eqx.field(static=True)

        def __init__(self):
            self.x = 1
            seen.append(jtu.tree_leaves(self))
            self.y = 2
            self.name = "a"
            seen.append(jtu.tree_leaves(self))

    Model()
    return seen


@program
def filtered_and_combined(eqx):
    one = pair(eqx)((jnp.ones(2), "a", 3))
    arrays, rest = eqx.partition(one, eqx.is_array)
    return jtu.tree_leaves(rest), len(jtu.tree_leaves(arrays)), eqx.combine(arrays, rest) == one


@program
def through_scan_cond_and_vmap(eqx):
    Pair = pair(eqx)

    def step(carry, x):
        return Pair(carry.x + x), Pair(x)

    last, all_ = jax.lax.scan(step, Pair(jnp.array(0)), jnp.arange(3))
    chosen = jax.lax.cond(True, lambda: Pair(jnp.array(1)), lambda: Pair(jnp.array(2)))
    mapped = jax.vmap(lambda one: Pair(2 * one.x))(Pair(jnp.arange(2)))
    return last.x.tolist(), all_.x.tolist(), int(chosen.x), mapped.x.tolist()


@program
def returned_from_filter_jit(eqx):
    one = eqx.filter_jit(lambda one: one)(pair(eqx)((jnp.ones(2), "a")))
    return one.x[1], one.name, type(one) is pair(eqx), copy.copy(one).x[0].tolist(), len(vars(one))


@program
def shown(eqx):
    return repr(pair(eqx)([1, jnp.ones((2, 3))])).split("(", 1)[1]


@program
def shown_while_it_holds_a_method_of_itself(eqx):
    class Model(eqx.Module):
        call: Any

        def __init__(self):
            self.call = self.__call__

        def __call__(self):
            return 1

    return "recursive" in repr(Model())
