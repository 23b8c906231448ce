"""Metaclasses that inherit from the metaclass of Modules, and classes pickled by value.

Tools such as cloudpickle pickle the classes of `__main__` and of notebooks by value.
"""

import abc
import pickle
import subprocess
import sys
from typing import Any, ClassVar

import cloudpickle
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

import eqxlike as eqx
from tests.beside_equinox import both


@both
def test_metaclass_may_subclass_the_metaclass_of_modules(eqx):
    made = []

    class Meta(type(eqx.Module)):
        def __new__(mcs, name, bases, namespace, /, tag=None, **keywords):
            cls = super().__new__(mcs, name, bases, namespace, **keywords)
            type.__setattr__(cls, "tag", tag)
            return cls

        def __call__(cls, *args, **kwargs):
            made.append(cls.__name__)
            return super().__call__(*args, **kwargs)

    class Base(eqx.Module, metaclass=Meta, tag="base"):
        x: Any

    class Model(Base, tag="model"):
        mode: str = eqx.field(static=True, default="a")

    model = eqx.filter_jit(lambda model: model)(Model(1.0))
    assert (Base.tag, Model.tag, made) == ("base", "model", ["Model"])
    assert (type(model), jtu.tree_leaves(model), model.mode) == (Model, [1.0], "a")


def make_modules() -> dict[str, Any]:
    """Modules whose local classes cannot be imported, by their special feature."""

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
        "inherits": Inherits(jnp.array(2.0)),
        "converter": Converts(jnp.array(2.0)),
        "abstract above": Named("a name"),
        "own init": Initialises(jnp.array(2.0)),
        "mixin": Mixed(jnp.array(2.0)),
        "bound method": Scale(jnp.array(2.0)).twice,
        "filter_jit": eqx.filter_jit(Scale(jnp.array(2.0))),
        "frozen": eqx.nn.freeze(Scale(jnp.array(2.0))),
    }


MODULES = make_modules()

# Modules that their class, or a subclass, can make from the first field.
OF_ONE_CLASS = [name for name in MODULES if name not in ("bound method", "filter_jit", "frozen")]

IN_ANOTHER_PROCESS = """
import dataclasses, pickle, sys, warnings

warnings.simplefilter("error")
import cloudpickle, jax, jax.numpy as jnp
import eqxlike as eqx

x = jnp.array(3.0)

def through_leaves(module):
    leaves, structure = jax.tree.flatten(module)
    return jax.tree.unflatten(structure, leaves)

def made_again(module):
    return type(module)(getattr(module, dataclasses.fields(module)[0].name))

def of_a_subclass(module):
    class Below(type(module)):
        pass

    return Below(getattr(module, dataclasses.fields(module)[0].name))

@eqx.filter_jit
def jitted(modules, belows):
    belows = {name: through_leaves(below) for name, below in belows.items()}
    return [{name: each(x) for name, each in given.items()} for given in (modules, belows)]

def is_frozen(module):
    try:
        module.factor = 1.0
    except dataclasses.FrozenInstanceError:
        return True

data, of_one_class = pickle.load(sys.stdin.buffer)
modules = {name: cloudpickle.loads(each) for name, each in data.items()}
made = {name: modules[name] for name in of_one_class}
found = {
    "called": {name: module(x) for name, module in modules.items()},
    "through its leaves": {name: through_leaves(each)(x) for name, each in modules.items()},
    "pickled again": {
        name: cloudpickle.loads(cloudpickle.dumps(each))(x) for name, each in modules.items()
    },
    "made again": {name: made_again(each)(x) for name, each in made.items()},
}
belows = {name: of_a_subclass(module) for name, module in made.items()}
found["jitted"], found["of a subclass"] = jitted(modules, belows)
assert all(map(is_frozen, modules.values()))
sys.stdout.buffer.write(pickle.dumps(jax.tree.map(float, found)))
"""


def test_classes_pickled_by_value_work_in_another_process():
    pickled = {name: cloudpickle.dumps(module) for name, module in MODULES.items()}
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS],
        input=pickle.dumps((pickled, OF_ONE_CLASS)),
        stdout=subprocess.PIPE,
        check=True,
    )
    found = pickle.loads(done.stdout)
    expected = {name: float(module(jnp.array(3.0))) for name, module in MODULES.items()}
    of_one_class = {name: expected[name] for name in OF_ONE_CLASS}
    made = {"made again": of_one_class, "of a subclass": of_one_class}
    assert found == {**dict.fromkeys(found, expected), **made}


def test_class_loaded_in_the_same_process_is_the_same_object():
    module = MODULES["inherits"]
    cls, leaves = type(module), jax.tree.leaves(module)
    loaded = cloudpickle.loads(cloudpickle.dumps(module))
    assert type(loaded) is cls
    assert loaded == module
    assert jax.tree.leaves(module) == leaves
    assert jax.tree.leaves(cls(jnp.array(1.0))) == [1.0, 1.0]


def test_class_of_frozen_arrays_cannot_be_pickled():
    with pytest.raises(pickle.PicklingError, match="class of a Scale with frozen arrays"):
        cloudpickle.dumps(type(MODULES["frozen"]))
