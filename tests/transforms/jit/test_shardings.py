"""Shardings of arguments and outputs."""

import functools
import types

import jax
import jax.numpy as jnp
import pytest

from eqxlike import Module, filter_jit, filter_vmap
from tests.transforms.jit.models import Affine


def mesh():
    return jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def split():
    return jax.sharding.NamedSharding(mesh(), jax.P("x"))


def whole():
    return jax.sharding.NamedSharding(mesh(), jax.P())


def is_split(array):
    return not array.sharding.is_fully_replicated and len(array.sharding.device_set) == 2


def is_whole(array):
    return array.sharding.is_fully_replicated and len(array.sharding.device_set) == 2


def test_one_in_sharding_is_for_all_arguments():
    x, y = filter_jit(lambda x, y: (x, y), in_shardings=split())(jnp.ones(4), jnp.ones(4))
    assert is_split(x)
    assert is_split(y)


def test_in_shardings_are_given_for_each_argument():
    jitted = filter_jit(lambda x, y: (x + 1, y + 1), in_shardings=(split(), whole()))
    x, y = jitted(jnp.ones(4), jnp.ones(4))
    assert is_split(x)
    assert is_whole(y)


def test_in_sharding_is_for_all_arrays_of_a_module():
    jitted = filter_jit(lambda model: model, in_shardings=(split(),))
    model = jitted(Affine(jnp.ones(4), jnp.ones((2, 3)), "mode"))
    assert is_split(model.scale)
    assert is_split(model.shift)


def test_in_shardings_are_a_prefix_that_reaches_into_an_argument():
    jitted = filter_jit(lambda tree: tree, in_shardings=({"a": split(), "b": whole()},))
    tree = jitted({"a": (jnp.ones(4), "text", jnp.ones(2)), "b": jnp.ones(4)})
    assert is_split(tree["a"][0])
    assert is_split(tree["a"][2])
    assert is_whole(tree["b"])


def test_in_shardings_reach_into_a_module():
    prefix = Affine(split(), whole())
    jitted = filter_jit(lambda model: model, in_shardings=(prefix,))
    model = jitted(Affine(jnp.ones(4), jnp.ones(4)))
    assert is_split(model.scale)
    assert is_whole(model.shift)


def test_in_sharding_of_an_argument_that_is_no_array_is_passed_over():
    jitted = filter_jit(lambda x, how: (x, how), in_shardings=split())
    x, how = jitted(jnp.ones(4), "text")
    assert is_split(x)
    assert how == "text"


def test_in_sharding_none_leaves_an_array_where_it_is():
    jitted = filter_jit(lambda x, y: (x, y), in_shardings=(split(), None))
    x, y = jitted(jnp.ones(4), jax.device_put(jnp.ones(4), whole()))
    assert is_split(x)
    assert is_whole(y)


def test_in_shardings_need_none_for_a_default_left_out():
    jitted = filter_jit(lambda x, how="text": (x, how), in_shardings=(split(),))
    assert is_split(jitted(jnp.ones(4))[0])


def test_in_shardings_are_a_list_too():
    x, y = filter_jit(lambda x, y: (x, y), in_shardings=[split(), None])(jnp.ones(4), jnp.ones(4))
    assert is_split(x)
    assert not is_split(y)


def scale(x, y, factor=1.0, *, shift=None):
    return x * factor, y


class Scale(Module):
    factor: jax.Array

    def __call__(self, x, y):
        return self.factor * x, y

    method = __call__


CALLED = {
    "function": scale,
    "method": Scale(jnp.ones(4)).method,
    "Module": Scale(jnp.ones(4)),
    "transformed": filter_vmap(scale),
    "transformed Module": filter_vmap(Scale(jnp.array(1.0))),
    "transformed method": filter_vmap(Scale(jnp.array(1.0)).method),
    "partial": functools.partial(scale, factor=jnp.ones(4)),
}


@pytest.mark.parametrize("called", CALLED)
@pytest.mark.parametrize("is_warm", [False, True])
def test_fewer_in_shardings_than_arguments_are_an_error(called, is_warm):
    jitted = filter_jit(CALLED[called], in_shardings=(split(),))
    for _ in range(1 + is_warm):
        with pytest.raises(
            ValueError,
            match=r"has 1 entries, and this call of \w+ has 2 arguments to place: x, y\. Expected",
        ):
            jitted(jnp.ones(4), jnp.ones(4))


@pytest.mark.parametrize("called", CALLED)
def test_more_in_shardings_than_arguments_are_an_error(called):
    jitted = filter_jit(CALLED[called], in_shardings=(split(),) * 5)
    with pytest.raises(ValueError, match=r"has 5 entries, .* 2 arguments to place: x, y\."):
        jitted(jnp.ones(4), jnp.ones(4))


def test_in_shardings_of_variadic_arguments_are_one_for_each():
    jitted = filter_jit(lambda x, *more: (x, *more), in_shardings=(split(), None))
    with pytest.raises(ValueError, match=r"has 3 arguments to place: x, more\[0\], more\[1\]\."):
        jitted(jnp.ones(4), jnp.ones(4), jnp.ones(4))


def test_in_sharding_is_needed_for_a_default_that_was_given():
    jitted = filter_jit(lambda x, y=None: (x, y), in_shardings=(split(),))
    jitted(jnp.ones(4))
    with pytest.raises(ValueError, match=r"has 2 arguments to place: x, y\."):
        jitted(jnp.ones(4), jnp.ones(4))


def test_in_sharding_of_a_default_that_was_given_as_it_is_may_be_left_out():
    jitted = filter_jit(lambda x, how="text": x, in_shardings=(split(),))
    assert is_split(jitted(jnp.ones(4), "text"))


@pytest.mark.parametrize("called", CALLED)
def test_in_shardings_are_given_by_name(called):
    jitted = filter_jit(CALLED[called], in_shardings={"y": split()})
    for _ in range(2):
        x, y = jitted(jnp.ones(4), jnp.ones(4))
        assert is_split(y)
        assert len(x.sharding.device_set) == 2


@pytest.mark.parametrize("called", CALLED)
def test_in_shardings_by_name_hold_for_calls_by_keyword(called):
    _, y = filter_jit(CALLED[called], in_shardings={"y": split()})(y=jnp.ones(4), x=jnp.ones(4))
    assert is_split(y)


def test_in_shardings_by_name_place_the_instance_of_a_method_too():
    def method(self, x):
        return self

    bound = types.MethodType(method, Affine(jnp.ones(4), jnp.ones(4)))
    model = filter_jit(bound, in_shardings={"self": Affine(split(), whole())})(jnp.ones(4))
    assert is_split(model.scale)
    assert is_whole(model.shift)


def test_in_shardings_by_name_reach_into_variadic_arguments():
    jitted = filter_jit(
        lambda *args, key, **options: (args, key, options),
        in_shardings={
            "args": (None, split()),
            "key": split(),
            "options": {"a": whole(), "b": None},
        },
    )
    x = jnp.ones(4)
    args, key, options = jitted(x, x, b=x, key=x, a=x)
    assert is_split(args[1])
    assert is_split(key)
    assert is_whole(options["a"])


def test_an_unknown_name_in_in_shardings_is_an_error_that_lists_the_parameters():
    with pytest.raises(
        ValueError,
        match=r"scale has no parameter named 'z'; it has 'x', 'y', 'factor', 'shift'\.",
    ):
        filter_jit(scale, in_shardings={"z": split()})


def test_an_unknown_name_for_a_transformed_function_lists_the_parameters_of_the_function():
    with pytest.raises(ValueError, match="scale has no parameter named 'z'; it has 'x', 'y', "):
        filter_jit(filter_vmap(scale), in_shardings={"z": split()})


def test_in_shardings_by_name_that_are_no_prefix_are_an_error_with_the_name():
    jitted = filter_jit(lambda x: x, in_shardings={"x": {"a": split()}})
    with pytest.raises(ValueError, match=r"`in_shardings\['x'\]` is not a prefix"):
        jitted(jnp.ones(4))


def test_in_shardings_hold_for_calls_by_keyword():
    jitted = filter_jit(lambda x, y: (x, y), in_shardings=(split(), whole()))
    x, y = jitted(y=jnp.ones(4), x=jnp.ones(4))
    assert is_split(x)
    assert is_whole(y)


def test_in_shardings_that_are_no_prefix_are_an_error():
    jitted = filter_jit(lambda x, y: x, in_shardings=({"a": split()}, None))
    with pytest.raises(ValueError, match="in_shardings"):
        jitted(jnp.ones(4), jnp.ones(4))


def test_in_sharding_against_a_committed_array_is_the_error_of_jax():
    x = jax.device_put(jnp.ones(4), jax.devices()[1])
    with pytest.raises(ValueError, match="does not match the sharding on the respective arg"):
        filter_jit(lambda x: x + 1, in_shardings=split())(x)


def test_one_out_sharding_is_for_all_of_the_output():
    jitted = filter_jit(lambda x: {"a": x, "b": (x + 1, "text")}, out_shardings=split())
    output = jitted(jnp.ones(4))
    assert is_split(output["a"])
    assert is_split(output["b"][0])
    assert output["b"][1] == "text"


def test_out_shardings_are_given_for_each_part_of_the_output():
    jitted = filter_jit(lambda x: (x, x + 1), out_shardings=(split(), whole()))
    first, second = jitted(jnp.ones(4))
    assert is_split(first)
    assert is_whole(second)


def test_out_shardings_reach_into_a_module():
    jitted = filter_jit(lambda x: Affine(x, x), out_shardings=Affine(split(), whole()))
    model = jitted(jnp.ones(4))
    assert is_split(model.scale)
    assert is_whole(model.shift)


def test_out_sharding_none_leaves_the_choice_to_the_compiler():
    x = jax.device_put(jnp.ones(4), split())
    first, second = filter_jit(lambda x: (x, x + 1), out_shardings=(whole(), None))(x)
    assert is_whole(first)
    assert is_split(second)


def test_out_sharding_holds_for_an_output_whose_length_depends_on_the_shape():
    jitted = filter_jit(lambda x: [x] * x.shape[0], out_shardings=split())
    for size in (2, 4, 2):
        assert all(map(is_split, jitted(jnp.ones(size))))


def test_out_shardings_that_are_no_prefix_are_an_error():
    jitted = filter_jit(lambda x: (x, x), out_shardings={"a": split()})
    with pytest.raises(ValueError, match="out_shardings"):
        jitted(jnp.ones(4))


def test_in_shardings_hold_for_what_is_lowered():
    jitted = filter_jit(lambda x: x + 1, in_shardings=split())
    compiled = jitted.lower(jax.ShapeDtypeStruct((4,), jnp.float32)).compile()
    assert is_split(compiled(jax.device_put(jnp.ones(4), split())))


def test_shardings_hold_for_warm_calls():
    jitted = filter_jit(lambda x: x + 1, in_shardings=split(), out_shardings=whole())
    assert all(is_whole(jitted(jnp.ones(4))) for _ in range(3))


def test_in_shardings_of_a_module_are_for_the_arguments_of_its_call():
    jitted = filter_jit(Affine(jnp.ones(4)), in_shardings=(split(),))
    assert is_split(jitted(jnp.ones(4)))
