"""Errors of assignments and deletions, and exceptions in `__init__`."""

import dataclasses
import gc
import weakref
from typing import Any

import pytest

import eqxlike
from tests.module.models import Inner


class Undeclared(eqxlike.Module):
    def __init__(self):
        self.y = 2


def test_error_of_an_assignment_or_a_deletion_names_field_and_fix():
    tree_at = r"eqxlike\.tree_at\(lambda module: module\.weight, module, value\)"
    declare = "'y': Undeclared declares no such field. Write `y: <type>` in the body of the class"
    module = Inner(1)
    for change, expected in [
        (lambda: setattr(module, "weight", 2), f"^cannot assign to field 'weight'.*{tree_at}"),
        (Undeclared, declare),
        (lambda: module.__init__(2), "cannot call `__init__` of a Inner"),
        (lambda: delattr(module, "weight"), "cannot delete field 'weight'"),
    ]:
        with pytest.raises(dataclasses.FrozenInstanceError, match=expected):
            change()
    assert module.weight == 1


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
def test_instance_whose_init_raises_is_frozen_and_freed(stage):
    held = []
    with pytest.raises(ZeroDivisionError):
        make_raising(stage, held)()
    with pytest.raises(dataclasses.FrozenInstanceError):
        held[0].x = 2
    reference = weakref.ref(held.pop())
    gc.collect()
    assert reference() is None


def test_generated_init_calls_the_setattr_of_the_class():
    class Counted(eqxlike.Module):
        value: int

        def __setattr__(self, name, value):
            super().__setattr__(name, value + 1)

    assert Counted(1).value == 2
