"""How an instance is made: generated and custom `__init__`, `__post_init__`, `__check_init__`."""

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from tests.module.programs.registry import program


@program
def positional_and_keyword_arguments(eqx):
    class Model(eqx.Module):
        x: int
        y: int = 2
        z: int = eqx.field(default=3, kw_only=True)

    return [repr(vars(Model(1))), repr(vars(Model(1, y=5, z=6)))]


@program
def keyword_only_argument_by_position(eqx):
    class Model(eqx.Module):
        x: int = eqx.field(kw_only=True)

    return Model(1)


@program
def keyword_only_marker_makes_the_rest_keyword_only(eqx):
    class Model(eqx.Module):
        x: int
        _: dataclasses.KW_ONLY
        y: int
        z: int = 3

    return str(inspect.signature(Model)), vars(Model(1, y=2))


@program
def required_field_after_a_default_of_the_base(eqx):
    class Base(eqx.Module):
        x: int = 1

    class Model(Base):
        y: int

    return Model


@program
def required_keyword_only_field_after_a_default_of_the_base(eqx):
    class Base(eqx.Module):
        x: int = 1

    class Model(Base):
        y: int = eqx.field(kw_only=True)

    return vars(Model(y=2))


@program
def default_factory_of_a_subclass_replaces_a_default(eqx):
    class Base(eqx.Module):
        x: Any = 1

    class Model(Base):
        x: Any = eqx.field(default_factory=lambda: [2])

    return Model().x


@program
def field_without_init_is_set_by_post_init(eqx):
    class Model(eqx.Module):
        x: int
        y: int = eqx.field(init=False)

        def __post_init__(self):
            self.y = self.x * 2

    return vars(Model(2)), str(inspect.signature(Model))


@program
def field_without_init_that_nobody_sets(eqx):
    class Model(eqx.Module):
        x: int = eqx.field(init=False)

    return Model()


@program
def post_init_of_the_base_through_super(eqx):
    class Base(eqx.Module):
        x: int

        def __post_init__(self):
            self.x = self.x + 1

    class Model(Base):
        y: int = 0

        def __post_init__(self):
            super().__post_init__()
            self.y = self.x + 10

    return vars(Model(1))


@program
def post_init_under_a_custom_init_of_the_subclass(eqx):
    called = []

    class Base(eqx.Module):
        x: int

        def __post_init__(self):
            called.append("post")

    class Model(Base):
        def __init__(self):
            super().__init__(1)

    return vars(Model()), called


@program
def both_init_and_post_init(eqx):
    called = []

    class Model(eqx.Module):
        x: int

        def __init__(self):
            self.x = 1

        def __post_init__(self):
            called.append("post")

    return vars(Model()), called


@program
def init_variable_with_a_default(eqx):
    class Model(eqx.Module):
        x: int = eqx.field(init=False)
        scale: dataclasses.InitVar[int] = 2

        def __post_init__(self, scale):
            self.x = scale * 3

    return Model().x, Model(5).x


@program
def init_variable_that_shares_its_name_with_a_method(eqx):
    class Model(eqx.Module):
        x: int
        scale: dataclasses.InitVar[int]

        def __post_init__(self, scale):
            self.x = self.x * scale

    return jtu.tree_leaves(Model(2, 3))


@program
def two_bases_with_generated_inits(eqx):
    class Left(eqx.Module):
        x: int

    class Right(eqx.Module):
        y: int

    class Model(Left, Right):
        z: int

    return str(inspect.signature(Model)), vars(Model(1, 2, 3))


@program
def instance_made_under_jit(eqx):
    class Model(eqx.Module):
        x: jax.Array

        def __init__(self, x):
            self.x = 2 * x

    return float(jax.jit(lambda x: Model(x))(jnp.array(3.0)).x)


@program
def documentation_of_the_class_says_its_signature_if_there_is_none(eqx):
    class Model(eqx.Module):
        x: int

    return Model.__doc__


@program
def module_itself_has_instances(eqx):
    return repr(eqx.Module()), jtu.tree_leaves(eqx.Module())


@program
def too_many_arguments_for_a_class_without_fields(eqx):
    class Model(eqx.Module):
        pass

    return Model(1)
