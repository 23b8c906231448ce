"""Fields: converters, metadata, static ones, and names that could clash."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

from tests.beside_equinox import both
from tests.module.models import StaticAny


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


def containing_itself():
    value = [1]
    value.append(value)
    return value


class RaisesInHash:
    def __hash__(self):
        raise TypeError("no hash today")


@pytest.mark.parametrize(
    ("value", "path", "why"),
    [
        ({"a": (1, RaisesInHash())}, r" at StaticAny\.option\['a'\]\[1\]", "no hash today"),
        (containing_itself(), r" at StaticAny\.option\[1\]", "it contains itself"),
        (memoryview(bytearray(2)), "", "cannot hash writable memoryview object"),
    ],
    ids=["hash-raises", "cycle", "no-attributes"],
)
def test_a_static_value_that_nothing_can_be_compared_by_is_an_error_with_its_path(value, path, why):
    expected = rf"StaticAny\.option is a static field .*{path}, which is not hashable \({why}\)"
    with pytest.raises((TypeError, ValueError), match=expected):
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
