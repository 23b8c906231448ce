"""What is passed to a function under `filter_jit`, and what comes back."""

import collections
import dataclasses
import enum
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.transforms.programs.registry import program

X = jnp.arange(3.0)


@program
def static_arguments(eqx):
    scale = eqx.filter_jit(lambda x, how, times: times * x if how == "up" else x / times)
    return scale(X, "up", 2), scale(X, "down", 2), scale(X, "up", 4.0)


@program
def keyword_arguments(eqx):
    subtract = eqx.filter_jit(lambda x, y: x - y)
    return subtract(x=X, y=2 * X), subtract(X, y=2 * X), subtract(y=X, x=2 * X)


@program
def defaults(eqx):
    @eqx.filter_jit
    def function(x, factor=2.0, *, offset=X, name="n"):
        return factor * x + offset, name

    return function(X), function(X, 3.0), function(X, offset=1.0), function(X, name="m")


@program
def variadic_arguments(eqx):
    @eqx.filter_jit
    def function(first, *others, **named):
        return first, others, named

    return function(X), function(X, 1, "a"), function(X, X, b=2, a=X)


@program
def positional_only_arguments(eqx):
    @eqx.filter_jit
    def function(x, /, **named):
        return x, named

    return function(X, x="named like the other")


@program
def python_numbers_stay_python_numbers(eqx):
    seen = []

    @eqx.filter_jit
    def function(*numbers):
        seen.append([type(number).__name__ for number in numbers])
        return numbers

    return function(1, 2.5, True, 1j), seen


@program
def numpy_arrays_and_scalars_are_traced(eqx):
    seen = []

    @eqx.filter_jit
    def function(*arrays):
        seen.append([isinstance(array, jax.core.Tracer) for array in arrays])
        return arrays

    return function(np.ones(2, np.float32), np.float32(3), np.int32(3), np.bool_(True)), seen


@program
def strings_none_and_bytes(eqx):
    return eqx.filter_jit(lambda *args: args)("a", None, b"b", X)


@program
def containers_of_arrays_and_statics(eqx):
    Pair = collections.namedtuple("Pair", ["x", "y"])
    ordered = collections.OrderedDict(b=X, a=1)
    return eqx.filter_jit(lambda tree: tree)(
        {"list": [X, 1, [None]], "tuple": (X, "s"), "pair": Pair(X, 2), "ordered": ordered}
    )


@program
def enum_dtype_type_and_function_are_static(eqx):
    Colour = enum.Enum("Colour", ["RED", "BLUE"])

    @eqx.filter_jit
    def function(colour, dtype, kind, activation):
        return colour is Colour.RED, jnp.zeros(2, dtype), kind is dict, activation(X)

    return function(Colour.RED, jnp.int32, dict, jnp.tanh), function(
        Colour.BLUE, np.dtype("float16"), list, jnp.sin
    )


@program
def legacy_and_typed_keys(eqx):
    @eqx.filter_jit
    def function(key):
        key, other = jax.random.split(key)
        return key, jax.random.bits(other, (2,))

    return function(jax.random.key(0)), function(jax.random.PRNGKey(0))


@program
def struct_is_a_static_argument(eqx):
    struct = jax.ShapeDtypeStruct((2,), jnp.float32)
    return eqx.filter_jit(lambda struct: jnp.ones(struct.shape, struct.dtype))(struct)


@program
def no_arguments(eqx):
    return eqx.filter_jit(lambda: 2 * X)()


@program
def weak_types(eqx):
    double = eqx.filter_jit(lambda x: 2 * x)
    return double(jnp.array(1.0)), double(jnp.ones(())), double(jnp.asarray(2))


# --- outputs ---


@program
def python_numbers_are_returned_as_they_are(eqx):
    return eqx.filter_jit(lambda x: (1, 2.5, True, 1j, x))(X)


@program
def nothing_is_returned(eqx):
    return eqx.filter_jit(lambda x: None)(X)


@program
def numpy_arrays_are_returned_as_jax_arrays(eqx):
    return eqx.filter_jit(lambda x: (np.ones(2, np.float32), np.float32(3)))(X)


@program
def static_output_depends_on_the_shape(eqx):
    function = eqx.filter_jit(lambda x: (x, "matrix" if x.ndim == 2 else "vector"))
    return function(X), function(X[None]), function(X)


@program
def function_is_returned_as_itself(eqx):
    def inner(x):
        return x

    return eqx.filter_jit(lambda x: inner)(X) is inner, eqx.filter_jit(lambda f: f)(inner) is inner


@program
def equal_static_comes_back_as_the_one_that_was_traced(eqx):
    @dataclasses.dataclass(frozen=True)
    class Setting:
        value: int

    first, second = Setting(1), Setting(1)
    identity = eqx.filter_jit(lambda setting: setting)
    return identity(first) is first, identity(second) is first


@program
def argument_is_returned_as_an_equal_tree(eqx):
    passed = {"x": [X, "s"]}
    returned = eqx.filter_jit(lambda tree: tree)(passed)
    return returned, returned is passed, returned["x"] is passed["x"]


@program
def same_array_is_returned_twice(eqx):
    first, second = eqx.filter_jit(lambda x: (2 * x,) * 2)(X)
    return first, second


@program
def module_with_static_fields_is_returned(eqx):
    class Model(eqx.Module):
        weight: Any
        activation: Any
        name: str = eqx.field(static=True)
        size: int = 3

    model = eqx.filter_jit(lambda x: Model(2 * x, jnp.tanh, "n"))(X)
    return model.weight, model.activation is jnp.tanh, model.name, model.size


@program
def bound_method_is_returned(eqx):
    class Model(eqx.Module):
        weight: Any

        def scale(self, x):
            return self.weight * x

    return eqx.filter_jit(lambda model: model.scale)(Model(X))(2.0)


@program
def generator_is_returned_unused(eqx):
    def count(x):
        yield x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return type(eqx.filter_jit(count)(1)).__name__
