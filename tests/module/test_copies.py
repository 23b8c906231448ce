"""Copies: by `copy`, `pickle`, `dataclasses.replace` and a map."""

import copy
import dataclasses
import pickle
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqxlike
from tests.beside_equinox import both
from tests.module.models import Inner, StaticAny


class Outer(eqxlike.Module):
    inner: Inner
    others: list
    scale: float = 1.0


class Initialised(eqxlike.Module):
    weight: Any
    doubled: Any

    def __init__(self, weight, /):
        self.weight = weight
        self.doubled = weight * 2


class Empty(eqxlike.Module):
    pass


def make_outer():
    return Outer(Inner(jnp.arange(3.0), "a"), [Inner(np.ones(2), "b"), None], scale=2.0)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{
        f"pickle {protocol}": lambda module, protocol=protocol: pickle.loads(
            pickle.dumps(module, protocol)
        )
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)
    },
    "replace": dataclasses.replace,
    "tree_map": lambda module: jtu.tree_map(lambda leaf: leaf, module),
}
MAKERS = {
    "nested": make_outer,
    "empty": Empty,
    "static only": lambda: StaticAny((1, "a")),
    "custom init": lambda: Initialised(np.ones(2)),
    "arrays": lambda: Inner(jnp.ones(2)),
    "from filter_jit": lambda: eqxlike.filter_jit(lambda x: Inner(2 * x))(jnp.ones(2)),
    "nested, from filter_jit": lambda: eqxlike.filter_jit(lambda x: Inner(Inner(2 * x)))(
        jnp.ones(2)
    ),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("maker", MAKERS)
def test_a_copy_is_equal_to_the_original(how, maker):
    if (how, maker) == ("replace", "custom init"):
        how = "copy"  # Its `__init__` takes other arguments than its fields.
    original = MAKERS[maker]()
    duplicate = COPIES[how](original)
    assert type(duplicate) is type(original)
    assert duplicate is not original
    assert eqxlike.tree_equal(duplicate, original, typematch=True)


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_is_frozen(how):
    with pytest.raises(dataclasses.FrozenInstanceError):
        COPIES[how](make_outer()).scale = 3.0


def test_a_shallow_copy_shares_the_fields():
    original = make_outer()
    assert copy.copy(original).others is original.others


def test_a_deep_copy_shares_no_list():
    original = make_outer()
    assert copy.deepcopy(original).others is not original.others


def test_an_instance_used_in_filter_jit_pickles_the_same():
    module = Inner(np.ones(2))
    before = pickle.dumps(module)
    eqxlike.filter_jit(lambda module: module.weight * 2)(module)
    assert pickle.dumps(module) == before


@both
def test_a_users_getstate_decides_what_a_copy_holds(eqx):
    class Model(eqx.Module):
        x: int

        def __getstate__(self):
            return {"x": 7}

    assert copy.copy(Model(1)).x == 7


@both
def test_replace_runs_converters_and_checks(eqx):
    class Model(eqx.Module):
        x: float = eqx.field(converter=float)
        y: int = 0

        def __check_init__(self):
            if self.x < 0:
                raise ValueError("negative")

    assert dataclasses.replace(Model(1, 5), x=3).x == 3.0
    with pytest.raises(ValueError, match="negative"):
        dataclasses.replace(Model(1), x=-3)


@both
def test_replace_keeps_the_other_fields_by_reference(eqx):
    class Model(eqx.Module):
        x: list
        y: int

    model = Model([1], 2)
    assert dataclasses.replace(model, y=3).x is model.x


@both
def test_asdict_lists_the_fields(eqx):
    class Model(eqx.Module):
        x: int
        y: int = eqx.field(static=True)

    assert dataclasses.asdict(Model(1, 2)) == {"x": 1, "y": 2}


@both
def test_vars_holds_the_fields_alone(eqx):
    class Model(eqx.Module):
        x: Any
        y: int = eqx.field(static=True)

    model = Model(jnp.ones(2), 2)
    eqx.filter_jit(lambda model: model.x)(model)
    assert list(vars(model)) == ["x", "y"]
