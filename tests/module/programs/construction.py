"""Making an instance: generated and custom `__init__`, `__post_init__`, `__check_init__`."""

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from beartype import beartype
from jaxtyping import Array, Float, jaxtyped

from tests.beside_equinox import error_of
from tests.module.programs.registry import program

# --- the generated __init__ ---------------------------------------------------------------------


@program
def arguments_of_the_generated_init(eqx):
    class Model(eqx.Module):
        x: int
        _: dataclasses.KW_ONLY
        y: int
        z: int = 3
        hidden: int = eqx.field(init=False, default_factory=int)

    class Sub(Model):
        w: int = eqx.field(default=4, kw_only=False)
        x: float  # pyright: ignore

    return (
        [str(inspect.signature(cls)) for cls in (Model, Sub)],
        [vars(Model(1, y=2)), vars(Model(1, y=5, z=6)), vars(Sub(1, 2, y=3))],
        [each.name for each in dataclasses.fields(Sub)],
        Sub.__match_args__,
        [
            error_of(Model),
            error_of(Model, 1, 2),
            error_of(Model, 1),
            error_of(Model, 1, y=2, hidden=3),
            error_of(type("Empty", (eqx.Module,), {}), 1),
        ],
    )


@program
def defaults_of_a_class_and_its_subclasses(eqx):
    class Part(eqx.Module):
        x: jax.Array

    class Base(eqx.Module):
        x: Any = 3
        y: int = eqx.field(default=4, static=True)
        z: list = eqx.field(default_factory=lambda: [1])
        part: Part = Part(jnp.ones(2))

    class Redeclared(Base):
        x: float

    class Changed(Base):
        x: int = 5

    class Unannotated(Base):
        x = 6

    class ByFactory(Base):
        x: Any = eqx.field(default_factory=lambda: [2])

    models = Base, Redeclared, Changed, Unannotated, ByFactory
    return (
        (Base.x, Base.y, hasattr(Base, "z"), Base().z is Base().z),
        [(cls().x, cls(7).x, len(jtu.tree_leaves(cls()))) for cls in models],
    )


@program
def refused_defaults(eqx):
    class NoContainer:
        __hash__ = None  # pyright: ignore

    def make(**body):
        annotations = dict.fromkeys(body, Any)
        return type(eqx.Module)("Model", (eqx.Module,), {"__annotations__": annotations, **body})

    values = [], {}, np.ones(2), jnp.ones(2), NoContainer(), eqx.field(default=np.ones(2))
    after = {"__annotations__": {"y": int}}
    return [error_of(make, x=value) for value in values], [
        error_of(type(eqx.Module), "Model", (make(x=1),), after),
        error_of(type(eqx.Module), "Model", (eqx.Module,), {"x": eqx.field(static=True)}),
    ]


@program
def metadata_and_signature_of_init(eqx):
    class Model(eqx.Module):
        x: int

    class Custom(eqx.Module):
        """The class."""

        x: int

        def __init__(self, size, *sizes, key=None):
            """The init."""
            self.x = size

        def __call__(self, x, *, key=None):
            return x

    return (
        Model.__doc__,
        (Model.__init__.__name__, Model.__init__.__qualname__, Model.__init__.__module__),
        (Custom.__doc__, Custom.__init__.__doc__),
        (str(inspect.signature(Custom)), str(inspect.signature(Custom(1)))),
        (repr(eqx.Module()), jtu.tree_leaves(eqx.Module())),
    )


# --- __post_init__ and __check_init__ -----------------------------------------------------------


@program
def post_init_sets_fields_without_arguments(eqx):
    class Base(eqx.Module):
        x: int
        y: int = eqx.field(init=False)

        def __post_init__(self):
            self.y = self.x * 2
            self.x = self.x + 1

    class Model(Base):
        z: int = 0

        def __post_init__(self):
            super().__post_init__()
            self.z = self.y + 10

    class Inherits(Base):
        z: int

    return vars(Base(2)), str(inspect.signature(Base)), vars(Model(1)), vars(Inherits(1, 3))


@program
def post_init_takes_init_variables(eqx):
    class Model(eqx.Module):
        x: int = eqx.field(init=False)
        first: dataclasses.InitVar[int]
        scale: dataclasses.InitVar[int] = 2

        def __post_init__(self, first, scale):
            self.x = first + 10 * scale

    return vars(Model(1)), vars(Model(1, 5)), jtu.tree_leaves(Model(2, scale=3))


@program
def check_init_of_every_class_in_the_hierarchy(eqx):
    called = []

    class Mixin:
        def __check_init__(self):
            called.append("mixin")

    class Top(eqx.Module):
        x: Any = eqx.field(converter=str)

        def __check_init__(self):
            called.append(("top", self.x))

    class Left(Top):
        def __check_init__(self):
            called.append("left")

    class Right(Top):
        pass

    class Model(Left, Right, Mixin):
        def __check_init__(self):
            called.append("model")

    model = Model(1)
    jtu.tree_map(lambda leaf: leaf, model)
    dataclasses.replace(model, x=2)
    return called


# --- a custom __init__ --------------------------------------------------------------------------


@program(differs="as for any class, `__new__` may return something else")
def new_that_returns_another_class(eqx):
    class Model(eqx.Module):
        def __new__(cls):
            return 3

    return Model()


@program
def monkeypatched_generated_init(eqx):
    class Model(eqx.Module):
        x: float = eqx.field(converter=lambda x: x + 1)
        y: int = 2

    original = Model.__init__

    def checked(self, *args, **kwargs):
        original(self, *args, **kwargs)

    Model.__init__ = checked

    class Sub(Model):
        z: int = 3

    return vars(Model(1)), vars(Sub(1, 2, 4)), str(inspect.signature(Sub))


# --- an instance in its __init__ ----------------------------------------------------------------


@program
def instance_in_init_has_the_fields_set_so_far(eqx):
    seen: list[Any] = []
    structures = []

    class Model(eqx.Module):
        x: int
        y: int
        z: int = eqx.field(static=True)

        def __init__(self, z):
            self.look()
            self.y = 2
            self.look()
            self.z = z
            self.look()
            self.x = 1

        def look(self):
            structures.append(jtu.tree_structure(self))
            seen.append([(jtu.keystr(key), each) for key, each in jtu.tree_leaves_with_path(self)])
            copied = jtu.tree_map(lambda leaf: leaf + 1, self)
            seen.append([getattr(copied, name, None) for name in "xyz"])
            seen.append((repr(self).split("Model")[1], error_of(setattr, copied, "x", 1)))

    Model(1), Model(2)
    return seen, [structures.index(each) for each in structures]


@program
def instance_in_init_passes_through_jit(eqx):
    class Model(eqx.Module):
        x: jax.Array
        y: jax.Array

        def __init__(self, x):
            self.x = x
            self.y = self.next()
            self.x = self.y
            self.y = self.next() + jax.jit(lambda module: module.x + 1)(self)

        @eqx.filter_jit
        def next(self):
            return self.x + 1

    return float(Model(jnp.array(1.0)).y)


# --- under jaxtyping's decorator, which checks the arguments of `__init__` ------------------------


typed = jaxtyped(typechecker=beartype)


@program
def typed_classes(eqx):
    @typed
    class Base(eqx.Module):
        x: Float[Array, " size"]

    @typed
    class Model(Base):
        y: Float[Array, " size"]
        # The converter accepts other types than the annotation.
        z: Float[Array, ""] = eqx.field(converter=jnp.asarray, default=1.0)

    class Sub(Model):
        w: int = 4

    two, three = jnp.ones(2), jnp.ones(3)
    models = Model(two, two, 2.0), Sub(two, two, 3.0, 5)
    return [each.z.shape for each in models], models[1].w, error_of(Model, two, three)
