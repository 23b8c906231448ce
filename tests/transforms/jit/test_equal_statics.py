"""Static values that are equal but not identical are distinguished."""

import dataclasses

import equinox
import jax.numpy as jnp
import numpy as np

from eqxlike import filter_jit, is_array
from tests.partition.models import Pair
from tests.partition.statics import Config, Named, Settings


def test_numeric_attributes_of_a_static_object_are_compared_by_type():
    def name_type(named):
        return type(getattr(named.name, "size", named.name)).__name__

    jitted, theirs = filter_jit(name_type), equinox.filter_jit(name_type)
    assert [jitted(Named(number)) for number in (1, True)] == ["int", "bool"]
    # In nested objects `True` equals 1, as it always does in Equinox.
    assert [jitted(Named(Config(number))) for number in (1, True)] == ["int", "int"]
    assert [theirs(Named(number)) for number in (1, True)] == ["int", "int"]


def test_function_sees_its_own_argument_after_a_call_with_an_equal_one():
    for wrap in (lambda config: config, lambda config: Pair(1, mode=config)):
        mine = wrap(Config(1, "first"))
        filter_jit(lambda it: 0)(mine)
        seen = filter_jit(lambda it: getattr(it, "mode", it).note)(wrap(Config(1, "second")))
        assert seen == "second"
        returned = filter_jit(lambda wrap=wrap: wrap(Config(1, "theirs")))()
        assert getattr(returned, "mode", returned).note == "theirs"
    mine = Settings(3)
    filter_jit(lambda it: 0)(mine)
    filter_jit(lambda: Settings(3))().size = 100
    assert mine.size == 3


def test_static_leaf_and_array_have_different_traces():
    jitted = filter_jit(lambda module: is_array(module.left))
    values = (1.0, jnp.array(1.0), np.float32(1), 1.0)
    assert [jitted(Pair(value)) for value in values] == [False, True, True, False]


def test_equal_callables_have_different_traces():
    @dataclasses.dataclass(frozen=True)
    class Constant:
        value: object

        def __call__(self):
            return jnp.asarray(self.value)

    integer, floating = filter_jit(Constant(2)), filter_jit(Constant(2.0))
    assert integer().dtype == jnp.int32
    assert floating().dtype == jnp.float32
