"""Classes that are pickled by value, as those of `__main__` and of notebooks are."""

import abc
import pickle
import subprocess
import sys
from typing import Any, ClassVar, Generic, TypeVar

import cloudpickle
import jax
import jax.numpy as jnp
import pytest

import eqxlike as eqx


def make_modules() -> dict[str, Any]:
    """Modules of classes that no import finds, by a word for what is special in each."""

    T = TypeVar("T")

    class Scale(eqx.Module):
        factor: Any

        def __call__(self, x):
            return self.factor * x

        def twice(self, x):
            return 2 * self(x)

    class Inherits(Scale):
        shift: float = 1.0
        power: int = eqx.field(static=True, default=2)

        def __call__(self, x):
            return super().__call__(x) ** self.power + self.shift

    class Overrides(Inherits):
        shift: float = 5.0

    class Around(eqx.Module, Generic[T]):
        inner: T

        def __call__(self, x):
            return self.inner(x)  # pyright: ignore[reportCallIssue]

    class Converts(Scale):
        factor: Any = eqx.field(converter=jnp.asarray)
        names: list[str] = eqx.field(default_factory=list)

    class AbstractNamed(eqx.Module, strict=True):
        name: eqx.AbstractVar[str]
        order: eqx.AbstractClassVar[int]

        @abc.abstractmethod
        def __call__(self, x): ...

    class Named(AbstractNamed, strict=True):
        name: str
        order: ClassVar[int] = 3

        def __call__(self, x):
            return x * self.order

    class Jitted(eqx.Module):
        factor: Any

        @eqx.filter_jit
        def __call__(self, x):
            return self.factor * x

    class Initialises(Scale):
        def __init__(self, factor):
            self.factor = jnp.asarray(factor)

        def __check_init__(self):
            assert self.factor is not None

    class Plain:
        def scaled(self: Any, x):
            return self.factor * x

    class Mixed(eqx.Module, Plain):
        factor: Any

        def __call__(self, x):
            return self.scaled(x)

    return {
        "plain": Scale(jnp.array(2.0)),
        "inherits": Inherits(jnp.array(2.0)),
        "overrides a default": Overrides(jnp.array(2.0)),
        "generic": Around[Scale](Scale(jnp.array(2.0))),
        "converter": Converts(jnp.array(2.0)),
        "abstract above": Named("a name"),
        "jitted": Jitted(jnp.array(2.0)),
        "own init": Initialises(jnp.array(2.0)),
        "mixin": Mixed(jnp.array(2.0)),
        "bound method": Scale(jnp.array(2.0)).twice,
        "filter_jit": eqx.filter_jit(Scale(jnp.array(2.0))),
        "frozen": eqx.nn.freeze(Scale(jnp.array(2.0))),
    }


MODULES = make_modules()

# What can be made again from its first field, by its class and by a subclass.
OF_ONE_CLASS = [name for name in MODULES if name not in ("bound method", "filter_jit", "frozen")]

IN_ANOTHER_PROCESS = """
import dataclasses, pickle, sys, warnings

warnings.simplefilter("error")
import cloudpickle, jax, jax.numpy as jnp
import eqxlike as eqx

def call(module):
    return module(jnp.array(3.0))

def through_leaves(module):
    leaves, structure = jax.tree.flatten(module)
    return jax.tree.unflatten(structure, leaves)

def made_again(module):
    return type(module)(getattr(module, dataclasses.fields(module)[0].name))

def of_a_subclass(module):
    class Below(type(module)):
        pass

    below = Below(getattr(module, dataclasses.fields(module)[0].name))
    return eqx.filter_jit(through_leaves)(below)

def refuses_assignment(module):
    try:
        module.factor = 1.0
    except dataclasses.FrozenInstanceError:
        return 1.0
    return 0.0

ways = {
    "called": call,
    "jitted": eqx.filter_jit(call),
    "through its leaves": lambda module: call(through_leaves(module)),
    "pickled again": lambda module: call(cloudpickle.loads(cloudpickle.dumps(module))),
    "made again": lambda module: call(made_again(module)),
    "of a subclass": lambda module: call(of_a_subclass(module)),
    "refuses assignment": refuses_assignment,
}
pickled, asked = pickle.load(sys.stdin.buffer)
loaded = {name: cloudpickle.loads(data) for name, data in pickled.items()}
found = {(name, way): float(ways[way](loaded[name])) for name, way in asked}
sys.stdout.buffer.write(pickle.dumps(found))
"""

EVERY_WAY = ("called", "jitted", "through its leaves", "pickled again", "refuses assignment")
ASKED = [
    *((name, way) for name in MODULES for way in EVERY_WAY),
    *((name, way) for name in OF_ONE_CLASS for way in ("made again", "of a subclass")),
]


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], float]:
    pickled = {name: cloudpickle.dumps(module) for name, module in MODULES.items()}
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS],
        input=pickle.dumps((pickled, ASKED)),
        stdout=subprocess.PIPE,
        check=True,
    )
    return pickle.loads(done.stdout)


@pytest.mark.parametrize(("name", "way"), ASKED)
def test_a_class_by_value_is_the_same_in_another_process(found, name, way):
    expected = 1.0 if way == "refuses assignment" else MODULES[name](jnp.array(3.0))
    assert found[name, way] == expected


def test_a_class_that_is_loaded_where_it_was_made_stays_as_it_is():
    module = MODULES["inherits"]
    cls, leaves = type(module), jax.tree.leaves(module)
    loaded = cloudpickle.loads(cloudpickle.dumps(module))
    assert type(loaded) is cls
    assert loaded == module
    assert jax.tree.leaves(module) == leaves
    assert jax.tree.leaves(cls(jnp.array(1.0))) == [1.0, 1.0]


def test_the_class_of_frozen_arrays_is_not_pickled_by_itself():
    with pytest.raises(pickle.PicklingError, match="Scale with frozen arrays by itself"):
        cloudpickle.dumps(type(MODULES["frozen"]))
