"""What may not be assigned or deleted, what the error says, and what an exception leaves behind."""

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


def test_the_error_of_an_assignment_says_what_to_write_instead():
    tree_at = r"eqxlike\.tree_at\(lambda module: module\.weight, module, value\)"
    declare = "'y': Undeclared declares no such field. Write `y: <type>` in the body of the class"
    for assign, expected in [
        (lambda: setattr(Inner(1), "weight", 2), f"^cannot assign to field 'weight'.*{tree_at}"),
        (Undeclared, declare),
        (lambda: Inner(1).__init__(2), "cannot call `__init__` of a Inner"),
    ]:
        with pytest.raises(dataclasses.FrozenInstanceError, match=expected):
            assign()


def test_deleting_a_field_raises_with_its_name():
    module = Inner(1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'weight'"):
        del module.weight
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
def test_an_exception_while_making_an_instance_leaves_it_frozen_and_keeps_nothing_alive(stage):
    held = []
    with pytest.raises(ZeroDivisionError):
        make_raising(stage, held)()
    with pytest.raises(dataclasses.FrozenInstanceError):
        held[0].x = 2
    reference = weakref.ref(held.pop())
    gc.collect()
    assert reference() is None


def test_an_assignment_of_the_generated_init_goes_through_a_setattr_that_somebody_wrote():
    class Counted(eqxlike.Module):
        value: int

        def __setattr__(self, name, value):
            super().__setattr__(name, value + 1)

    assert Counted(1).value == 2
