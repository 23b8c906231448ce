"""Equality, hash, order and text of instances."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.beside_equinox import both


@both
@pytest.mark.parametrize(
    ("make_one", "make_other", "is_equal"),
    [
        (lambda cls, sub: cls(1, 2), lambda cls, sub: cls(1, 2), True),
        (lambda cls, sub: cls(1, 2), lambda cls, sub: cls(3, 2), False),
        (lambda cls, sub: cls(1, 2), lambda cls, sub: cls(1, 3), False),
        (lambda cls, sub: cls(1, 2), lambda cls, sub: cls(1.0, 2), True),
        (lambda cls, sub: cls(1, 2), lambda cls, sub: sub(1, 2), False),
        (lambda cls, sub: cls(1, 2), lambda cls, sub: (1, 2), False),
        (lambda cls, sub: cls(1, 2), lambda cls, sub: 1, False),
        (lambda cls, sub: cls([1], 2), lambda cls, sub: cls((1,), 2), False),
        (lambda cls, sub: cls(jnp.ones(2), 2), lambda cls, sub: cls(jnp.ones(2), 2), True),
        (lambda cls, sub: cls(jnp.ones(2), 2), lambda cls, sub: cls(jnp.zeros(2), 2), False),
        (lambda cls, sub: cls(jnp.ones(2), 2), lambda cls, sub: cls(jnp.ones(3), 2), False),
        (lambda cls, sub: cls(jnp.ones(2), 2), lambda cls, sub: cls(jnp.ones(2, int), 2), False),
    ],
)
def test_instances_are_equal_if_class_structure_and_leaves_are(eqx, make_one, make_other, is_equal):
    class Model(eqx.Module):
        x: Any
        y: Any = eqx.field(static=True)

    class Sub(Model):
        pass

    assert bool(make_one(Model, Sub) == make_other(Model, Sub)) is is_equal


@both
def test_equal_instances_have_equal_hashes(eqx):
    class Model(eqx.Module):
        x: Any
        y: Any = eqx.field(static=True)

    assert hash(Model((1, "a"), 2)) == hash(Model((1, "a"), 2))


@both
def test_an_instance_may_be_a_key(eqx):
    class Model(eqx.Module):
        x: Any

    assert {Model(1): "one", Model(2): "two"}[Model(2)] == "two"


@both
def test_an_instance_with_arrays_has_no_hash(eqx):
    class Model(eqx.Module):
        x: Any

    with pytest.raises(TypeError, match="unhashable"):
        hash(Model(jnp.ones(2)))


@both
def test_equality_under_jit_is_traced(eqx):
    class Model(eqx.Module):
        x: Any

    same = jax.jit(lambda one, other: one == other)
    assert [bool(same(Model(1), Model(1))), bool(same(Model(1), Model(2)))] == [True, False]


@both
def test_a_users_own_special_methods_are_kept_and_inherited(eqx):
    class Base(eqx.Module):
        x: int

        def __eq__(self, other):
            return True

        def __hash__(self):
            return 3

        def __repr__(self):
            return "R"

    class Model(Base):
        pass

    assert (Model(1) == 2, hash(Model(1)), repr(Model(1))) == (True, 3, "R")


@both
def test_equality_without_hash_makes_instances_unhashable(eqx):
    class Model(eqx.Module):
        x: int

        def __eq__(self, other):
            return True

    with pytest.raises(TypeError, match="unhashable type: 'Model'"):
        hash(Model(1))


@both
def test_instances_have_no_order(eqx):
    class Model(eqx.Module):
        x: int

    with pytest.raises(TypeError, match="not supported between instances"):
        _ = Model(1) < Model(2)


@both
def test_repr_shows_fields_static_ones_too_and_arrays_by_shape(eqx):
    class Model(eqx.Module):
        weight: Any
        items: list
        name: str = eqx.field(static=True)

    model = Model(jnp.ones((2, 3)), [np.ones(2), 1], "n")
    expected = "Model(weight=f32[2,3], items=[f64[2](numpy), 1], name='n')"
    assert "".join(repr(model).split()).endswith("".join(expected.split()))


@both
def test_str_is_repr(eqx):
    class Model(eqx.Module):
        x: int

    assert str(Model(1)) == repr(Model(1))
