"""Modules as pytrees: flattening, key paths, equality, hashing, copies, pickles, references."""

import copy
import dataclasses
import pickle
import weakref
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

import eqxlike
from tests.beside_equinox import error_of
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
def key_paths(eqx):
    Pair = pair(eqx)
    tree = {"pairs": [Pair(1), Pair((2, 3))], "one": Pair({"a": Pair(4)})}
    paths = [(jtu.keystr(path), leaf) for path, leaf in jtu.tree_leaves_with_path(tree)]
    ((path, _),) = jtu.tree_leaves_with_path(Pair(1))
    mapped = jtu.tree_map_with_path(lambda path, leaf: (jtu.keystr(path), leaf), Pair(1))
    return paths, path == (jtu.GetAttrKey("x"),), mapped.x


@program
def maps(eqx):
    Pair = pair(eqx)

    class Other(eqx.Module):
        x: Any

    name = "".join(["na", "me"])
    mapped = jtu.tree_map(lambda _: object, Pair((1, 2), name))
    inner = Pair(1)

    def add(one, other):
        return jtu.tree_map(lambda x, y: x + y, one, other)

    return (
        (jtu.tree_leaves(Pair(None)), jtu.tree_map(lambda x: x, Pair(None)).x),
        (add(Pair((1, 2)), Pair((3, 4))).x, jtu.tree_map(lambda x: [x, x], Pair(1)).x),
        ([leaf is object for leaf in mapped.x], mapped.name is name),
        (error_of(add, Pair(1, "a"), Pair(1, "b")), error_of(add, Pair(1), Other(1))),
        jtu.tree_leaves(Pair((inner, 3)), is_leaf=lambda node: node is inner)[0] is inner,
    )


@program
def structures(eqx):
    class Pair(pair(eqx)):
        pass

    class Same(eqx.Module):
        x: Any
        name: str = eqx.field(static=True, default="pair")

    one = jtu.tree_structure(Pair(1))
    others = Pair(2), Pair(1, "other"), Pair((1,)), pair(eqx)(1), Same(1)
    outer, inner = jtu.tree_structure(Pair(0)), jtu.tree_structure([0, 0])
    transposed = jtu.tree_transpose(outer, inner, Pair([1, 2]))
    same = [({one: "found"}.get(jtu.tree_structure(other))) for other in others]
    return same, [each.x for each in transposed]


@program
def equality(eqx):
    Pair = pair(eqx)

    class Sub(Pair):
        pass

    class Model(eqx.Module):
        x: int

        def __eq__(self, other):
            return True

    class Hashed(Model):
        def __hash__(self):
            return 3

        def __repr__(self):
            return "R"

    class Below(Hashed):
        pass

    others = Pair(1), Pair(1.0), Pair(2), Pair(1, "other"), Pair((1,)), 1, None, Sub(1)
    one = Pair(jnp.ones(2))
    arrays = jnp.ones(2), jnp.zeros(2), jnp.ones(3), np.ones(2), jnp.ones(2, int), 1
    same = jax.jit(lambda one, other: one == other)
    return (
        [Pair(1) == other for other in others],
        [bool(one == Pair(other)) for other in arrays],
        [bool(same(Pair(1), Pair(value))) for value in (1, 2)],
        (Pair([1]) == Pair((1,)), Below(1) == 2, hash(Below(1)), repr(Below(1))),
        (hash(Pair((1, "a"))) == hash(Pair((1, "a"))), {Pair(1): "found"}[Pair(1)]),
        len({Pair(1), Pair(1), Pair(2)}),
        (error_of(hash, one), error_of(hash, Model(1))),
    )


@program
def copies(eqx):
    class Own(eqx.Module):
        x: int

        def __getstate__(self):
            return {"x": 7}

    one = pair(eqx)([1, pair(eqx)([2])])
    shallow, deep = copy.copy(one), copy.deepcopy(one)
    return (
        (shallow is one, shallow.x is one.x, shallow == one),
        (deep.x is one.x, deep.x[1].x is one.x[1].x, deep == one),
        copy.copy(Own(1)).x,
    )


@program
def pickles(eqx):
    Pair = pair(eqx)
    one = Pair({"a": np.ones(2), "b": Pair(3), "c": jnp.arange(2)})
    other = pickle.loads(pickle.dumps(one))
    return (
        (other.x["a"].tolist(), other.x["b"].x, other.name, type(other) is Pair),
        (other.x["c"].tolist(), isinstance(other.x["c"], jax.Array)),
        (pickle.loads(pickle.dumps(Pair)) is Pair, pickle.loads(pickle.dumps(Pair(3).scale))(2)),
    )


@program
def replaced_fields(eqx):
    class Hidden(eqx.Module):
        x: int = eqx.field(init=False, default=3)

    class Custom(eqx.Module):
        x: int

        def __init__(self, size):
            self.x = size

    one = pair(eqx)([1])
    other = dataclasses.replace(one, name="other")
    errors = [error_of(dataclasses.replace, each, x=2) for each in (Hidden(), Custom(1))]
    return other.x is one.x, one.name, other.name, errors


@program
def dictionary_and_tuple_of_the_fields(eqx):
    one = pair(eqx)(pair(eqx)(1))
    names = sorted(each for each in dir(one) if not each.startswith("_"))
    return dataclasses.asdict(one), dataclasses.astuple(one), vars(one.x), names


@program
def references(eqx):
    one = pair(eqx)(1)
    reference = weakref.ref(one)
    was_alive = reference() is one
    del one
    return was_alive, reference()


@program
def through_transformations(eqx):
    Pair = pair(eqx)
    names = []

    def step(carry, x):
        return Pair(carry.x + x, carry.name), Pair(x)

    @jax.jit
    def run(one):
        names.append(one.name)
        last, all_ = jax.lax.scan(step, one, jnp.arange(3.0))
        chosen = jax.lax.cond(True, lambda: Pair(1.0), lambda: Pair(2.0))
        mapped = jax.vmap(lambda one: one.x + 1, in_axes=(Pair(0),))(Pair(jnp.arange(2)))
        return last, all_, chosen, mapped, jax.grad(lambda one: one.x**2)(one)

    outputs = [run(Pair(value, name)) for name in "aba" for value in (1.0, 2.0)]
    returned = eqx.filter_jit(lambda one: one)(Pair((jnp.ones(2), "a")))
    return (
        (names, [[leaf.tolist() for leaf in jtu.tree_leaves(each)] for each in outputs]),
        [(type(each) is Pair, each.name) for each in (outputs[0][0], outputs[0][-1], returned)],
        (returned.x[1], copy.copy(returned).x[0].tolist(), len(vars(returned))),
        error_of(jax.jit(lambda pair: pair), Pair((1, "a"))),
    )


@program
def shown(eqx):
    class Model(eqx.Module):
        call: Any

        def __init__(self):
            self.call = self.__call__

        def __call__(self):
            return 1

    one = pair(eqx)([1, jnp.ones((2, 3)), np.ones(2)])
    return repr(one).split("(", 1)[1], str(one) == repr(one), "recursive" in repr(Model())
