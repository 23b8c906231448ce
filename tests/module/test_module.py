"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

import abc
import collections.abc
import contextlib
import copy
import dataclasses
import functools
import gc
import inspect
import pickle
import typing
import weakref
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqxlike

both = pytest.mark.parametrize(
    "eqx", [pytest.param(equinox, id="equinox"), pytest.param(eqxlike, id="eqxlike")]
)

T = typing.TypeVar("T")


@typing.runtime_checkable
class HasWeight(typing.Protocol):
    weight: Any


class Inner(eqxlike.Module):
    weight: Any
    name: str = eqxlike.field(static=True, default="inner")


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


# --- signatures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Module", "field"])
def test_has_the_parameters_of_equinox(name):
    def parameters(library):
        signature = inspect.signature(getattr(library, name))
        return [(p.name, p.kind, p.default) for p in signature.parameters.values()]

    assert parameters(eqxlike) == parameters(equinox)


@both
def test_signature_lists_the_fields_with_their_defaults_and_kinds(eqx):
    class Model(eqx.Module):
        x: int
        y: float = eqx.field(kw_only=True)
        z: str = "z"
        hidden: int = eqx.field(init=False, default=0)

    parameters = inspect.signature(Model).parameters.values()
    assert [str(parameter) for parameter in parameters] == ["x: int", "z: str = 'z'", "y: float"]


@both
def test_signature_is_that_of_a_custom_init_without_self(eqx):
    class Model(eqx.Module):
        x: int

        def __init__(self, size, *sizes, key=None):
            self.x = size

    assert str(inspect.signature(Model)) == "(size, *sizes, key=None)"


@both
def test_signature_of_a_callable_instance_is_that_of_call(eqx):
    class Model(eqx.Module):
        def __call__(self, x, *, key=None):
            return x

    assert str(inspect.signature(Model())) == "(x, *, key=None)"


@both
def test_signature_takes_the_annotation_of_the_converter(eqx):
    def to_tuple(value: list) -> tuple:
        return tuple(value)

    class Model(eqx.Module):
        x: tuple = eqx.field(converter=to_tuple)

    assert inspect.signature(Model).parameters["x"].annotation is list


# --- the generated dataclass --------------------------------------------------------------------


@both
def test_a_subclass_is_a_dataclass_with_the_annotated_fields_in_order(eqx):
    class Base(eqx.Module):
        x: int
        y: int

    class Model(Base):
        z: int
        x: float  # pyright: ignore

    assert dataclasses.is_dataclass(Model)
    assert [each.name for each in dataclasses.fields(Model)] == ["x", "y", "z"]


@both
def test_an_unannotated_attribute_is_no_field(eqx):
    class Model(eqx.Module):
        x = 3

    assert (Model().x, jtu.tree_leaves(Model())) == (3, [])


@both
def test_a_class_variable_is_no_field(eqx):
    class Model(eqx.Module):
        x: int
        y: typing.ClassVar[int] = 2

    assert (Model(1).y, jtu.tree_leaves(Model(1))) == (2, [1])


@both
def test_a_class_attribute_may_be_assigned_after_the_class_was_made(eqx):
    class Model(eqx.Module):
        x: int

    Model.y = 5
    assert Model(1).y == 5


@both
@pytest.mark.parametrize(
    "default", [[], {}, np.ones(2), jnp.ones(2)], ids=lambda value: type(value).__name__
)
def test_a_mutable_default_is_refused(eqx, default):
    with pytest.raises(ValueError, match=r"mutable default .* for field x is not allowed"):

        class Model(eqx.Module):
            x: Any = default


@both
def test_a_default_is_an_attribute_of_the_class(eqx):
    class Model(eqx.Module):
        x: int = 3
        y: int = eqx.field(default=4, static=True)

    assert (Model.x, Model.y) == (3, 4)


@both
def test_a_field_without_default_is_no_attribute_of_the_class(eqx):
    class Model(eqx.Module):
        x: int

    assert not hasattr(Model, "x")


@both
def test_a_redeclared_field_keeps_its_default_as_in_any_dataclass(eqx):
    class Base(eqx.Module):
        x: int = 3

    class Model(Base):
        x: float

    assert Model().x == 3


@both
def test_a_subclass_may_change_a_default(eqx):
    class Base(eqx.Module):
        x: int = 3

    class Model(Base):
        x: int = 4

    assert (Base().x, Model().x) == (3, 4)


@both
def test_an_attribute_without_annotation_over_a_field_is_no_new_default(eqx):
    class Base(eqx.Module):
        x: int = 3

    class Model(Base):
        x = 4

    assert Model().x == 3


@both
def test_a_module_may_be_a_default(eqx):
    class Part(eqx.Module):
        x: int

    class Model(eqx.Module):
        part: Part = Part(1)

    assert jtu.tree_leaves(Model()) == [1]


@both
def test_a_default_factory_is_called_for_each_instance(eqx):
    class Model(eqx.Module):
        x: list = eqx.field(default_factory=list)

    assert Model().x == []
    assert Model().x is not Model().x


@both
def test_a_field_without_default_after_one_with_is_refused(eqx):
    with pytest.raises(TypeError, match="non-default argument 'y' follows default argument"):

        class Model(eqx.Module):
            x: int = 1
            y: int


@both
def test_post_init_runs_after_the_generated_init_and_may_assign(eqx):
    class Model(eqx.Module):
        x: int
        y: int = eqx.field(init=False)

        def __post_init__(self):
            self.y = self.x + 1

    assert Model(1).y == 2


@both
def test_post_init_is_inherited_with_the_generated_init(eqx):
    class Base(eqx.Module):
        x: int

        def __post_init__(self):
            self.x = self.x + 1

    class Model(Base):
        y: int

    model = Model(1, 2)
    assert (model.x, model.y) == (2, 2)


@both
def test_an_init_variable_reaches_post_init_and_is_not_stored(eqx):
    class Model(eqx.Module):
        x: int = eqx.field(init=False)
        seed: dataclasses.InitVar[int]

        def __post_init__(self, seed):
            self.x = seed

    assert vars(Model(3)) == {"x": 3}


@both
def test_instances_match_a_class_pattern_by_position(eqx):
    class Model(eqx.Module):
        x: int
        y: int

    match Model(1, 2):
        case Model(x, y):
            assert (x, y) == (1, 2)


@both
@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "missing 1 required positional argument: 'x'"),
        ((1, 2), {}, "takes 2 positional arguments but 3 were given"),
        ((1,), {"y": 2}, "got an unexpected keyword argument 'y'"),
    ],
)
def test_wrong_arguments_raise_as_any_function_does(eqx, args, kwargs, message):
    class Model(eqx.Module):
        x: int

    with pytest.raises(TypeError, match=message):
        Model(*args, **kwargs)


@both
def test_having_both_init_and_post_init_warns(eqx):
    with pytest.warns(UserWarning, match="both an `__init__` method and a\\s+`__post_init__`"):

        class Model(eqx.Module):
            x: int

            def __init__(self):
                self.x = 1

            def __post_init__(self):
                pass


# --- a custom __init__ --------------------------------------------------------------------------


@both
def test_a_custom_init_may_read_what_it_assigned(eqx):
    class Model(eqx.Module):
        x: int
        y: int

        def __init__(self, x):
            self.x = x
            self.y = self.x + 1

    assert Model(1).y == 2


@both
def test_a_custom_init_may_assign_a_field_twice(eqx):
    class Model(eqx.Module):
        x: int

        def __init__(self):
            self.x = 1
            self.x = 2

    assert Model().x == 2


@both
def test_a_custom_init_is_inherited(eqx):
    class Base(eqx.Module):
        x: int

        def __init__(self, *, x):
            self.x = x

    class Model(Base):
        y: int = 3

    model = Model(x=1)
    assert (model.x, model.y) == (1, 3)


@both
def test_a_custom_init_may_call_a_generated_one_above(eqx):
    class Base(eqx.Module):
        x: int

    class Model(Base):
        y: int

        def __init__(self):
            super().__init__(1)
            self.y = self.x + 1

    model = Model()
    assert (model.x, model.y) == (1, 2)


@both
def test_a_custom_init_of_a_plain_mixin_is_inherited(eqx):
    class Mixin:
        def __init__(self, x):
            self.x = x + 10

    class Model(Mixin, eqx.Module):
        x: int

    assert Model(1).x == 11


@both
def test_inits_cooperate_along_the_method_resolution_order(eqx):
    class Left(eqx.Module):
        x: int

        def __init__(self, x, **kwargs):
            self.x = x
            super().__init__(**kwargs)

    class Right(eqx.Module):
        y: int

        def __init__(self, y, **kwargs):
            self.y = y
            super().__init__(**kwargs)

    class Model(Left, Right):
        pass

    model = Model(x=1, y=2)
    assert (model.x, model.y) == (1, 2)


@both
def test_a_diamond_has_each_field_once(eqx):
    class Top(eqx.Module):
        x: int

    class Left(Top):
        y: int

    class Right(Top):
        z: int

    class Model(Left, Right):
        pass

    assert sorted(jtu.tree_leaves(Model(x=1, y=2, z=3))) == [1, 2, 3]


@both
def test_a_wrapped_init_still_counts_as_generated_for_subclasses(eqx):
    class Base(eqx.Module):
        x: int

    original = Base.__init__

    @functools.wraps(original)
    def patched(self, *args, **kwargs):
        original(self, *args, **kwargs)

    Base.__init__ = patched

    class Model(Base):
        y: int

    assert vars(Model(1, 2)) == {"x": 1, "y": 2}


@both
def test_an_init_patched_without_wraps_still_counts_as_generated_for_subclasses(eqx):
    class Base(eqx.Module):
        x: int

    original = Base.__init__

    def patched(self, *args, **kwargs):
        original(self, *args, **kwargs)

    Base.__init__ = patched

    class Model(Base):
        y: int

    assert vars(Model(1, 2)) == {"x": 1, "y": 2}


@both
def test_a_module_may_be_made_inside_the_init_of_another_of_its_class(eqx):
    class Model(eqx.Module):
        x: int
        inner: Any

        def __init__(self, depth):
            self.x = depth
            self.inner = Model(depth - 1) if depth else None
            self.x = self.x + 10

    assert jtu.tree_leaves(Model(2)) == [12, 11, 10]


@both
@pytest.mark.parametrize("make", [lambda cls: cls(), lambda cls: cls(3)], ids=["none", "one"])
def test_a_field_that_init_never_sets_is_a_type_error_that_names_it(eqx, make):
    class Model(eqx.Module):
        x: int
        y: int

        def __init__(self, x=0):
            self.x = x

    with pytest.raises(TypeError, match=r"'y'.*not init"):
        make(Model)


@both
def test_a_field_with_a_converter_that_init_never_sets_is_a_type_error_that_names_it(eqx):
    class Model(eqx.Module):
        x: int = eqx.field(converter=float)

        def __init__(self):
            pass

    with pytest.raises(TypeError, match=r"'x'.*not init"):
        Model()


@both
def test_a_static_field_that_init_never_sets_is_a_type_error_that_names_it(eqx):
    class Model(eqx.Module):
        x: int = eqx.field(static=True, init=False)

    with pytest.raises(TypeError, match=r"'x'.*not init"):
        Model()


def test_all_the_missing_fields_are_named():
    class Model(eqxlike.Module):
        x: int
        y: int

        def __init__(self):
            pass

    with pytest.raises(TypeError, match="Fields 'x', 'y' of Model not initialized by `__init__`"):
        Model()


def test_a_default_that_init_never_assigned_is_a_leaf():
    class Model(eqxlike.Module):
        x: int = 3
        y: int = eqxlike.field(init=False, default=4)

        def __init__(self):
            pass

    assert jtu.tree_leaves(Model()) == [3, 4]


@both
def test_storing_a_method_of_self_on_self_is_refused(eqx):
    class Model(eqx.Module):
        function: Any

        def __init__(self):
            self.function = self.method

        def method(self):
            return 1

    with pytest.raises(ValueError, match=r"method.* in.*__init__"):
        Model()


@both
def test_a_static_method_of_self_may_be_stored_on_self(eqx):
    class Model(eqx.Module):
        function: Any

        def __init__(self):
            self.function = self.method

        @staticmethod
        def method():
            return 1

    assert Model().function() == 1


@both
@pytest.mark.parametrize("transform", [jax.jit, jax.vmap], ids=["jit", "vmap"])
def test_storing_a_jax_transformed_module_in_a_field_warns(eqx, transform):
    class Part(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            return self.weight * x

    class Model(eqx.Module):
        function: Any

    with pytest.warns(UserWarning, match="JAX-transformed callable"):
        Model(transform(Part(jnp.ones(2))))


# --- half-made instances ------------------------------------------------------------------------


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


# --- __check_init__ -----------------------------------------------------------------------------


@both
def test_check_init_runs_at_each_level_from_the_class_upwards(eqx):
    called = []

    class Mixin:
        def __check_init__(self):
            called.append("mixin")

    class Base(eqx.Module):
        x: int

        def __check_init__(self):
            called.append("base")

    class Middle(Base):
        pass

    class Model(Middle, Mixin):
        def __check_init__(self):
            called.append("model")

    Model(1)
    assert called == ["model", "base", "mixin"]


@both
def test_check_init_sees_converted_values(eqx):
    seen = []

    class Model(eqx.Module):
        x: str = eqx.field(converter=str)

        def __check_init__(self):
            seen.append(self.x)

    Model(1)
    assert seen == ["1"]


@both
def test_check_init_may_not_assign(eqx):
    class Model(eqx.Module):
        x: int

        def __check_init__(self):
            self.x = 2

    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'x'"):
        Model(1)


@both
def test_check_init_does_not_run_on_unflatten(eqx):
    called = []

    class Model(eqx.Module):
        x: int

        def __check_init__(self):
            called.append(None)

    jtu.tree_map(lambda leaf: leaf, Model(1))
    assert len(called) == 1


# --- fields -------------------------------------------------------------------------------------


@both
def test_a_converter_runs_once_on_an_argument(eqx):
    class Model(eqx.Module):
        x: int = eqx.field(converter=lambda value: value + 1)

    assert Model(1).x == 2


@both
def test_a_converter_runs_once_on_a_default(eqx):
    class Model(eqx.Module):
        x: int = eqx.field(converter=lambda value: value + 1, default=1)

    assert Model().x == 2


@both
def test_a_converter_runs_once_when_a_subclass_calls_the_init_above(eqx):
    class Base(eqx.Module):
        x: int = eqx.field(converter=lambda value: value + 1)

    class Model(Base):
        def __init__(self):
            super().__init__(1)

    assert Model().x == 2


@both
def test_a_converter_runs_once_when_init_was_patched(eqx):
    class Model(eqx.Module):
        x: int = eqx.field(converter=lambda value: value + 1)

    original = Model.__init__
    Model.__init__ = lambda self, *args: original(self, *args)
    assert Model(1).x == 2


@both
def test_a_converter_runs_after_init_and_post_init(eqx):
    class Model(eqx.Module):
        x: str = eqx.field(converter=str)
        seen: Any = eqx.field(init=False)

        def __post_init__(self):
            self.seen = self.x

    model = Model(1)
    assert (model.x, model.seen) == ("1", 1)


@both
def test_a_converter_runs_on_a_field_that_takes_no_argument(eqx):
    class Model(eqx.Module):
        x: str = eqx.field(converter=str, init=False)

        def __post_init__(self):
            self.x = 3

    assert Model().x == "3"


@both
def test_the_converter_of_a_redeclared_field_is_that_of_the_subclass(eqx):
    class Base(eqx.Module):
        x: Any = eqx.field(converter=str)

    class Converting(Base):
        x: Any = eqx.field(converter=float)

    class Plain(Base):
        x: Any

    assert (Converting(1).x, Plain(1).x) == (1.0, 1)


@both
def test_a_converter_may_make_a_static_value_hashable(eqx):
    class Model(eqx.Module):
        x: tuple = eqx.field(converter=tuple, static=True)

    assert Model([1, 2]).x == (1, 2)


@both
def test_what_a_converter_raises_passes_through(eqx):
    class Model(eqx.Module):
        x: int = eqx.field(converter=int)

    with pytest.raises(ValueError, match="invalid literal for int"):
        Model("q")


@both
def test_a_converter_does_not_run_on_unflatten(eqx):
    class Model(eqx.Module):
        x: Any = eqx.field(converter=lambda value: value + 1)

    assert jtu.tree_map(lambda leaf: leaf, Model(1)).x == 2


@both
def test_a_static_field_is_no_leaf(eqx):
    class Model(eqx.Module):
        x: int
        y: int = eqx.field(static=True)

    assert jtu.tree_leaves(Model(1, 2)) == [1]


@both
def test_a_module_in_a_static_field_has_no_leaves_there(eqx):
    class Part(eqx.Module):
        x: int

    class Model(eqx.Module):
        part: Part = eqx.field(static=True)

    assert jtu.tree_leaves(Model(Part(1))) == []


@both
def test_a_subclass_may_make_a_static_field_dynamic(eqx):
    class Base(eqx.Module):
        x: int = eqx.field(static=True)

    class Model(Base):
        x: int

    assert jtu.tree_leaves(Model(1)) == [1]


@both
def test_metadata_of_a_field_is_kept(eqx):
    class Model(eqx.Module):
        x: int = eqx.field(static=True, converter=int, metadata={"unit": "m"})

    assert dataclasses.fields(Model)[0].metadata["unit"] == "m"


@both
def test_that_a_field_is_static_stands_in_its_metadata(eqx):
    class Model(eqx.Module):
        x: int = eqx.field(static=True)

    assert dataclasses.fields(Model)[0].metadata["static"] is True


@both
def test_a_plain_dataclass_field_with_static_metadata_is_static(eqx):
    class Model(eqx.Module):
        x: int = dataclasses.field(metadata={"static": True})

    assert jtu.tree_leaves(Model(1)) == []


@both
@pytest.mark.parametrize("name", ["static", "converter"])
def test_metadata_may_not_take_a_reserved_name(eqx, name):
    with pytest.raises(ValueError, match=rf"metadata.*{name}"):
        eqx.field(static=True, converter=int, metadata={name: 1})


@both
def test_a_field_may_be_hidden_from_repr(eqx):
    class Model(eqx.Module):
        x: int = eqx.field(repr=False)
        y: int

    assert repr(Model(1, 2)).endswith("Model(y=2)")


@both
def test_a_field_takes_no_unknown_options(eqx):
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
        eqx.field(foo=1)


@both
def test_a_field_takes_no_positional_arguments(eqx):
    with pytest.raises(TypeError, match="positional argument"):
        eqx.field(1)


@both
def test_a_field_has_a_default_or_a_factory_not_both(eqx):
    with pytest.raises(ValueError, match="cannot specify both default and default_factory"):
        eqx.field(default=1, default_factory=list)


class StaticAny(eqxlike.Module):
    option: Any = eqxlike.field(static=True)


@pytest.mark.parametrize(
    "value", [jnp.ones((2, 3)), np.ones((2, 3), np.float32)], ids=["jax", "numpy"]
)
def test_an_array_in_a_static_field_is_an_error_with_field_shape_and_dtype(value):
    expected = r"StaticAny\.option is a static field .* shape \(2, 3\) and dtype float32"
    with pytest.raises(TypeError, match=expected):
        StaticAny(value)


def test_a_numpy_scalar_in_a_static_field_is_a_static_value():
    assert jtu.tree_leaves(StaticAny(np.float32(1))) == []


def test_a_tracer_in_a_static_field_is_an_error():
    with pytest.raises(TypeError, match=r"StaticAny\.option is a static field"):
        jax.jit(StaticAny)(jnp.ones(2))


@pytest.mark.parametrize("value", [[1], {"a": 1}, {1}, bytearray()], ids=repr)
def test_an_unhashable_value_in_a_static_field_is_an_error_with_field_and_type(value):
    expected = rf"StaticAny\.option is a static field .* type {type(value).__name__}.* not hashable"
    with pytest.raises(TypeError, match=expected):
        StaticAny(value)


def test_an_array_inside_a_tuple_in_a_static_field_is_an_error():
    with pytest.raises(TypeError, match=r"StaticAny\.option is a static field"):
        StaticAny((1, jnp.ones(2)))


@pytest.mark.parametrize("value", [None, 1, "a", (1, (2,)), len, int, frozenset({1})], ids=repr)
def test_a_hashable_value_in_a_static_field_is_kept(value):
    assert StaticAny(value).option is value


@both
def test_fields_with_the_names_of_locals_and_globals_keep_their_values(eqx):
    names = ["cls", "new", "children", "fields", "statics", "key0", "incomplete_type", "len", "σ"]
    Model = type(eqx.Module)("Model", (eqx.Module,), {"__annotations__": dict.fromkeys(names, int)})
    doubled = jtu.tree_map(lambda leaf: 2 * leaf, Model(*range(len(names))))
    assert vars(doubled) == {name: 2 * index for index, name in enumerate(names)}


@both
def test_a_field_with_a_mangled_name_survives_a_map(eqx):
    class Model(eqx.Module):
        __secret: int

        def read(self):
            return self.__secret

    assert jtu.tree_map(lambda leaf: leaf + 1, Model(1)).read() == 2


@both
def test_a_property_over_a_field_is_no_leaf(eqx):
    class Base(eqx.Module):
        x: int

    class Model(Base):
        @property
        def x(self):
            return 3

        def __init__(self):
            pass

    assert jtu.tree_leaves(Model()) == []


# --- frozen -------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("name", ["weight", "fresh"])
def test_assigning_after_init_raises_with_the_name_of_the_field(eqx, name):
    class Model(eqx.Module):
        weight: int

    with pytest.raises(dataclasses.FrozenInstanceError, match=f"cannot assign to field '{name}'"):
        setattr(Model(1), name, 2)


def test_the_error_of_an_assignment_says_what_to_write_instead():
    with pytest.raises(dataclasses.FrozenInstanceError) as caught:
        Inner(1).weight = 2
    assert str(caught.value).startswith("cannot assign to field 'weight' of a Inner")
    assert "eqxlike.tree_at(lambda module: module.weight, module, value)" in str(caught.value)


@both
def test_assigning_an_undeclared_name_in_init_raises_with_the_name(eqx):
    class Model(eqx.Module):
        x: int

        def __init__(self):
            self.x = 1
            self.y = 2

    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'y'"):
        Model()


def test_the_error_of_an_undeclared_name_says_what_to_write():
    class Model(eqxlike.Module):
        def __init__(self):
            self.y = 2

    expected = "Model declares no such field. Write `y: <type>` in the body of the class"
    with pytest.raises(dataclasses.FrozenInstanceError, match=expected):
        Model()


@both
@pytest.mark.parametrize(
    "annotation", [typing.ClassVar[int], dataclasses.InitVar[int]], ids=["class", "init"]
)
def test_assigning_a_pseudo_field_in_init_raises(eqx, annotation):
    class Model(eqx.Module):
        x: int
        y: annotation = 3

        def __init__(self):
            self.x = 1
            self.y = 4

    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'y'"):
        Model()


@both
def test_assigning_the_name_of_a_method_in_init_raises(eqx):
    class Model(eqx.Module):
        def method(self):
            pass

        def __init__(self):
            self.method = 3

    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'method'"):
        Model()


@both
def test_assigning_to_another_instance_in_init_raises(eqx):
    class Model(eqx.Module):
        x: int

        def __init__(self, other=None):
            self.x = 1
            if other is not None:
                other.x = 5

    with pytest.raises(dataclasses.FrozenInstanceError):
        Model(Model())


@both
def test_augmented_assignment_raises(eqx):
    class Model(eqx.Module):
        x: int

    model = Model(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.x += 1


@both
def test_calling_a_generated_init_again_raises(eqx):
    class Model(eqx.Module):
        x: int

    model = Model(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.__init__(2)


@both
def test_calling_a_custom_init_again_raises(eqx):
    class Model(eqx.Module):
        x: int

        def __init__(self, x):
            self.x = x

    model = Model(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.__init__(2)


def test_filter_jit_sees_what_a_second_call_of_init_left():
    @eqxlike.filter_jit
    def read(module):
        return module.weight * 1

    module = Inner(jnp.array(1.0))
    read(module)
    with contextlib.suppress(dataclasses.FrozenInstanceError):
        module.__init__(jnp.array(5.0))
    assert read(module) == module.weight


def test_deleting_a_field_raises_with_its_name():
    module = Inner(1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'weight'"):
        del module.weight
    assert module.weight == 1


@both
def test_what_came_out_of_a_map_is_frozen(eqx):
    class Model(eqx.Module):
        x: int

    with pytest.raises(dataclasses.FrozenInstanceError):
        jtu.tree_map(lambda leaf: leaf, Model(1)).x = 2


# --- classes ------------------------------------------------------------------------------------


@both
def test_a_generic_module_may_be_parametrised_or_not(eqx):
    class Model(eqx.Module, typing.Generic[T]):
        x: T

    assert type(Model[int](1)) is type(Model(1)) is Model


@both
def test_a_subclass_of_a_parametrised_generic_inherits_its_fields(eqx):
    class Base(eqx.Module, typing.Generic[T]):
        x: T

    class Model(Base[int]):
        y: int

    assert jtu.tree_leaves(Model(1, 2)) == [1, 2]


@both
def test_a_property_reads_the_fields(eqx):
    class Model(eqx.Module):
        x: int

        @property
        def double(self):
            return 2 * self.x

    assert Model(2).double == 4


@both
def test_a_cached_property_is_no_leaf(eqx):
    class Model(eqx.Module):
        x: int

        @functools.cached_property
        def double(self):
            return 2 * self.x

    model = Model(2)
    assert (model.double, jtu.tree_leaves(model)) == (4, [2])


@both
def test_a_cached_property_is_computed_anew_after_a_map(eqx):
    class Model(eqx.Module):
        x: int

        @functools.cached_property
        def double(self):
            return 2 * self.x

    model = Model(2)
    assert model.double == 4
    assert jtu.tree_map(lambda leaf: leaf + 1, model).double == 6


@both
def test_an_attribute_error_inside_a_property_names_the_attribute(eqx):
    class Model(eqx.Module):
        @property
        def x(self):
            return self.absent

    with pytest.raises(AttributeError, match="absent"):
        _ = Model().x


@both
def test_class_methods_and_static_methods_work_on_class_and_instance(eqx):
    class Model(eqx.Module):
        x: int

        @classmethod
        def make(cls):
            return cls(3)

        @staticmethod
        def double(value):
            return 2 * value

    model = Model.make()
    assert (model.make().x, Model.double(2), model.double(2)) == (3, 4, 4)


@both
def test_special_methods_work(eqx):
    class Model(eqx.Module):
        x: int

        def __call__(self, y):
            return self.x + y

        def __add__(self, y):
            return self.x + y

        def __len__(self):
            return self.x

        def __getitem__(self, index):
            return index

        def __iter__(self):
            return iter([self.x])

        def __contains__(self, value):
            return value == self.x

        def __bool__(self):
            return False

    model = Model(1)
    outcome = (model(1), model + 1, len(model), model[5], list(model), 1 in model, bool(model))
    assert outcome == (2, 2, 1, 5, [1], True, False)


@both
def test_a_user_getattr_is_asked_only_for_what_is_not_there(eqx):
    class Model(eqx.Module):
        x: int

        def __getattr__(self, name):
            if name.startswith("_"):
                raise AttributeError(name)
            return name

    model = Model(1)
    mapped = jtu.tree_map(lambda leaf: leaf + 1, copy.copy(model))
    assert (model.x, model.other, mapped.x, jtu.tree_leaves(mapped)) == (1, "other", 2, [2])


@both
def test_the_getattr_of_a_mixin_behind_module_is_asked(eqx):
    class Mixin:
        def __getattr__(self, name):
            if name.startswith("_"):
                raise AttributeError(name)
            return name

    class Model(eqx.Module, Mixin):
        x: int

    assert (Model(1).x, Model(1).other) == (1, "other")


@both
def test_a_mapping_may_be_a_module(eqx):
    class Model(eqx.Module, collections.abc.Mapping):
        x: dict

        def __getitem__(self, key):
            return self.x[key]

        def __iter__(self):
            return iter(self.x)

        def __len__(self):
            return len(self.x)

    assert dict(Model({"a": 1})) == {"a": 1}


@both
def test_arguments_of_a_class_statement_reach_init_subclass(eqx):
    tags = []

    class Base(eqx.Module):
        def __init_subclass__(cls, tag=None, **kwargs):
            super().__init_subclass__(**kwargs)
            tags.append(tag)

    class Model(Base, tag="a"):
        pass

    assert tags == ["a"]


ABSTRACT = {
    "method": abc.abstractmethod(lambda self: None),
    "property": property(abc.abstractmethod(lambda self: None)),
    "class method": classmethod(abc.abstractmethod(lambda cls: None)),
    "static method": staticmethod(abc.abstractmethod(lambda: None)),
}


@both
@pytest.mark.parametrize("kind", ABSTRACT)
def test_a_class_with_something_abstract_has_no_instances(eqx, kind):
    Model = type(eqx.Module)("Model", (eqx.Module,), {"member": ABSTRACT[kind]})
    with pytest.raises(TypeError, match=r"abstract class Model .*abstract method '?member"):
        Model()


@both
def test_an_abstract_special_method_makes_the_class_abstract(eqx):
    class Model(eqx.Module):
        @abc.abstractmethod
        def __call__(self):
            pass

    with pytest.raises(TypeError, match="abstract class Model"):
        Model()


@both
def test_a_subclass_that_does_not_override_an_abstract_method_has_no_instances(eqx):
    class Base(eqx.Module):
        @abc.abstractmethod
        def method(self):
            pass

    class Model(Base):
        x: int = 1

    with pytest.raises(TypeError, match="abstract class Model"):
        Model()


@both
def test_a_subclass_that_overrides_an_abstract_method_has_instances(eqx):
    class Base(eqx.Module):
        @abc.abstractmethod
        def method(self):
            pass

    class Model(Base):
        def method(self):
            return 2

    assert Model().method() == 2


@both
def test_the_abstract_methods_of_a_class_are_listed(eqx):
    class Model(eqx.Module):
        @abc.abstractmethod
        def method(self):
            pass

        def other(self):
            pass

    assert Model.__abstractmethods__ == {"method"}


@both
def test_an_annotation_alone_does_not_override_an_abstract_method(eqx):
    class Base(eqx.Module):
        @abc.abstractmethod
        def method(self):
            pass

    class Model(Base):
        method: Any

    with pytest.raises(TypeError, match="abstract class Model"):
        Model(lambda: 3)


@both
def test_a_field_may_shadow_a_method_of_the_base(eqx):
    class Base(eqx.Module):
        def method(self):
            return 1

    class Model(Base):
        method: Any

    assert Model(lambda: 3).method() == 3


@both
def test_the_documentation_of_a_class_and_of_its_init_is_kept(eqx):
    class Model(eqx.Module):
        """The class."""

        x: int

        def __init__(self):
            """The init."""
            self.x = 1

    assert (Model.__doc__, Model.__init__.__doc__) == ("The class.", "The init.")


@both
def test_an_instance_satisfies_a_runtime_protocol_of_its_fields(eqx):
    class Model(eqx.Module):
        weight: int

    assert isinstance(Model(1), HasWeight)


@both
def test_a_field_is_found_without_running_code(eqx):
    class Model(eqx.Module):
        weight: int

    # What is found need not be the value: runtime protocols ask whether there is anything.
    assert inspect.getattr_static(Model(1), "weight", None) is not None


@both
def test_an_instance_may_be_weakly_referenced(eqx):
    class Model(eqx.Module):
        x: int

    model = Model(1)
    reference = weakref.ref(model)
    assert reference() is model
    del model
    assert reference() is None


# --- copies -------------------------------------------------------------------------------------

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


# --- what a filtered function returned ----------------------------------------------------------

# Each reads a module in its own way, as the first to do so.
READINGS = {
    "attribute": lambda module: (module.weight.tolist(), module.name),
    "vars": lambda module: (vars(module)["weight"].tolist(), vars(module)["name"]),
    "fields": lambda module: [each.name for each in dataclasses.fields(module)],
    "asdict": lambda module: dataclasses.asdict(module)["name"],
    "hasattr": lambda module: (hasattr(module, "weight"), hasattr(module, "absent")),
    "getattr default": lambda module: getattr(module, "name", None),
    "object": lambda module: object.__getattribute__(module, "name"),
    "getstate": lambda module: sorted(module.__getstate__()),
    "dir": lambda module: {"weight", "name", "double"} <= {*dir(module)},
    "getmembers": lambda module: dict(inspect.getmembers(module))["name"],
    "getattr_static": lambda module: inspect.getattr_static(module, "name"),
    "repr": repr,
    "equality": lambda module: module == Returned(2 * jnp.ones(2), "returned"),
    "leaves": lambda module: [leaf.tolist() for leaf in jtu.tree_leaves(module)],
    "structure": jtu.tree_structure,
    "paths": lambda module: [jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path(module)],
    "method": lambda module: module.double().tolist(),
    "property": lambda module: module.label,
    "cached property": lambda module: module.cached,
    "match": lambda module: module.__match_args__,
    "raw jit": lambda module: jax.jit(lambda module: module.double())(module).tolist(),
    "tree_at": lambda module: eqxlike.tree_at(lambda m: m.weight, module, 1).name,
    "copy": lambda module: copy.copy(module).name,
    "deepcopy": lambda module: copy.deepcopy(module).weight.tolist(),
    "replace": lambda module: dataclasses.replace(module, weight=1).name,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)).weight.tolist(),
    "dict update": lambda module: {**module.__dict__}["name"],
    "weakref": lambda module: weakref.ref(module)().name,
    "isinstance": lambda module: isinstance(module, Returned),
}


class Returned(eqxlike.Module):
    weight: Any
    name: str = eqxlike.field(static=True)

    @property
    def label(self):
        return self.name.upper()

    @functools.cached_property
    def cached(self):
        return self.name * 2

    def double(self):
        return 2 * self.weight


@pytest.mark.parametrize("how", READINGS)
def test_a_module_that_filter_jit_returned_reads_like_one_made_by_hand(how):
    @eqxlike.filter_jit
    def make(x):
        return Returned(2 * x, "returned")

    make(jnp.ones(2))
    by_hand = Returned(2 * jnp.ones(2), "returned")
    assert READINGS[how](make(jnp.ones(2))) == READINGS[how](by_hand)


def test_a_module_that_filter_jit_returned_satisfies_a_runtime_protocol_of_its_fields():
    assert isinstance(eqxlike.filter_jit(lambda x: Inner(2 * x))(jnp.ones(2)), HasWeight)


def test_a_module_that_filter_jit_returned_is_frozen():
    module = eqxlike.filter_jit(lambda x: Inner(2 * x))(jnp.ones(2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        module.weight = 1


def test_an_absent_attribute_of_what_filter_jit_returned_is_named():
    module = eqxlike.filter_jit(lambda x: Inner(2 * x))(jnp.ones(2))
    with pytest.raises(AttributeError, match=r"'Inner' object has no attribute 'absent'"):
        _ = module.absent


# --- equality, hash, text -----------------------------------------------------------------------


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
