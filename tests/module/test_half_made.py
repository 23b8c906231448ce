"""An instance while its `__init__` runs, and after it raised."""

import contextlib
import dataclasses
import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

import eqxlike
from tests.beside_equinox import both


@both
def test_an_instance_in_init_flattens_to_the_fields_set_so_far(eqx):
    seen = []

    class Model(eqx.Module):
        x: int
        y: int
        z: int = eqx.field(static=True)

        def __init__(self):
            seen.append(jtu.tree_leaves(self))
            self.y = 2
            seen.append(jtu.tree_leaves(self))
            self.x = 1
            seen.append(jtu.tree_leaves(self))
            self.z = 3

    Model()
    assert seen == [[], [2], [1, 2]]


@both
def test_an_instance_in_init_keeps_its_key_paths(eqx):
    seen = []

    class Model(eqx.Module):
        x: int
        y: int

        def __init__(self):
            self.y = 2
            seen.extend(jtu.keystr(path) for path, _ in jtu.tree_flatten_with_path(self)[0])
            self.x = 1

    Model()
    assert seen == [".y"]


@both
def test_mapping_over_an_instance_in_init_leaves_unset_fields_unset(eqx):
    copies = []

    class Model(eqx.Module):
        x: int
        y: int
        z: int = eqx.field(static=True)

        def __init__(self):
            self.x = 1
            self.z = 3
            copies.append(jtu.tree_map(lambda leaf: leaf + 1, self))
            self.y = 2

    Model()
    assert [hasattr(copies[0], name) for name in "xyz"] == [True, False, True]


@both
def test_static_fields_set_so_far_are_part_of_the_structure_in_init(eqx):
    structures = []

    class Model(eqx.Module):
        x: int
        z: int = eqx.field(static=True)

        def __init__(self, z):
            self.x = 1
            structures.append(jtu.tree_structure(self))
            self.z = z
            structures.append(jtu.tree_structure(self))

    Model(1), Model(2)
    assert structures[0] == structures[2]
    assert len({*structures}) == 3


@both
def test_an_instance_in_init_passes_through_jit(eqx):
    class Model(eqx.Module):
        x: jax.Array
        y: jax.Array

        def __init__(self, x):
            self.x = x
            self.y = jax.jit(lambda module: module.x + 1)(self)

    assert Model(jnp.array(1.0)).y == 2


@both
def test_an_instance_in_init_passes_through_filter_jit(eqx):
    class Model(eqx.Module):
        x: jax.Array
        y: jax.Array

        def __init__(self, x):
            self.x = x
            self.y = self.next()
            self.x = self.y
            self.y = self.next()

        @eqx.filter_jit
        def next(self):
            return self.x + 1

    assert Model(jnp.array(1.0)).y == 3


@both
def test_an_instance_in_init_prints_what_is_not_set(eqx):
    seen = []

    class Model(eqx.Module):
        x: int
        y: int

        def __init__(self):
            self.x = 1
            seen.append(repr(self))
            self.y = 2

    Model()
    assert "".join(seen[0].split()).endswith("Model(x=1,y=<uninitialised>)")


@both
def test_a_copy_by_tree_map_made_in_init_is_frozen(eqx):
    class Model(eqx.Module):
        x: int
        y: int

        def __init__(self):
            self.x = 1
            jtu.tree_map(lambda leaf: leaf, self).y = 2

    with pytest.raises(dataclasses.FrozenInstanceError):
        Model()


def make_raising(stage, held):
    def maybe_raise(at):
        if at == stage:
            raise ZeroDivisionError

    def convert(value):
        maybe_raise("converter")
        return value

    class Model(eqxlike.Module):
        x: Any = eqxlike.field(converter=convert)

        def __init__(self):
            held.append(self)
            self.x = 1
            maybe_raise("init")

        def __check_init__(self):
            maybe_raise("check_init")

    return Model


@pytest.mark.parametrize("stage", ["init", "converter", "check_init"])
def test_an_exception_while_making_an_instance_leaves_it_frozen(stage):
    held = []
    with pytest.raises(ZeroDivisionError):
        make_raising(stage, held)()
    with pytest.raises(dataclasses.FrozenInstanceError):
        held[0].x = 2


def test_an_exception_in_init_keeps_nothing_alive():
    class Model(eqxlike.Module):
        x: Any

        def __init__(self, references):
            references.append(weakref.ref(self))
            self.x = 1
            raise ZeroDivisionError

    references = []
    with contextlib.suppress(ZeroDivisionError):
        Model(references)
    gc.collect()
    assert references[0]() is None
