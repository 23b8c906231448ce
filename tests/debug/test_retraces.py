"""What is said about a trace after the first: what differs, and what to do about it."""

import collections
import dataclasses
import functools
import re
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import eqxlike as eqx
from eqxlike._partition import Tree, describe, flatten, root_node
from eqxlike._transforms._jit._traces._differences import Arguments, find_differences, form_of_type
from eqxlike._transforms._jit._traces._statics import describe_static
from eqxlike.debug import Trace

HERE = "tests/debug/test_retraces.py"


class Model(eqx.Module):
    layers: list
    config: object = eqx.field(static=True, default=None)


@dataclasses.dataclass(frozen=True)
class Config:
    depth: int
    name: str = "mlp"


Point = collections.namedtuple("Point", "x y")


class Plain:
    """Compared by identity."""

    def __repr__(self) -> str:
        return "a plain object"


class HoldsArray(Plain):
    def __init__(self):
        self.array = jnp.ones(2)

    __repr__ = object.__repr__  # pyright: ignore


@dataclasses.dataclass(frozen=True)
class Rude:
    """Its attributes fail for whoever looks into it to describe it."""

    depth: int

    def __getattribute__(self, name):
        file = sys._getframe(1).f_code.co_filename
        if name == "depth" and ("_traces" in file or file.endswith("_fingerprint.py")):
            raise RuntimeError("no")
        return object.__getattribute__(self, name)


def model(width=2, config=None):
    return Model([eqx.nn.Linear(2, width, key=jax.random.key(0))], config)


def ones(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


def traced(*calls):
    """The last trace of a function of one `argument`, called with each of these."""
    function = eqx.filter_jit(lambda argument: None)
    for argument in calls:
        function(argument)
    return function.traces[-1]


def lines(trace):
    return [str(each) for each in trace.differences]


def scale(factor):
    return lambda x: factor * x


CASES = {
    "batch size": (
        [(ones(32, 3), ones(32)), (ones(16, 3), ones(16))],
        ["argument[0]: shape (32, 3) -> (16, 3)", "argument[1]: shape (32,) -> (16,)"],
        "drop the last batch if it is smaller, or pad it",
    ),
    "dtype": (
        [ones(2), ones(2, dtype=jnp.bfloat16)],
        ["argument: dtype float32 -> bfloat16"],
        "Cast the array before the call",
    ),
    "weak type": (
        [jnp.float32(0.1), jnp.asarray(0.1)],
        ["argument: weak type False -> True"],
        "Give it a dtype, as in `jnp.asarray(0.1, dtype=jnp.float32)`",
    ),
    "key": (
        [jax.random.key(0), jax.random.key(0, impl="rbg")],
        ["argument: dtype key<fry> -> key<rbg>"],
        "A function is compiled for each dtype",
    ),
    "another number": (
        [0.1, 0.2],
        ["argument: static value 0.1 -> 0.2"],
        "If it only computes with the number, pass an array",
    ),
    "a number that equals another": (
        [1, 1.0],
        ["argument: static value 1 -> 1.0"],
        "compiled for each new number",
    ),
    "numbers of one hash in a static field": (
        [model(config=(-1, 0)), model(config=(-2, 0))],
        ["argument.config[0]: static value -1 -> -2"],
        "each new value of a static field",
    ),
    "numbers of one hash in a set": (
        [frozenset([-1]), frozenset([-2])],
        ["argument: static value frozenset({{-1}}) -> frozenset({{-2}})"],
        "",
    ),
    "object that stays and takes no weak reference": (
        [model(config=(1, np.sin)), model(config=(2, np.sin))],
        ["argument.config[0]: static value 1 -> 2"],
        "",
    ),
    "number for array": (
        [jnp.float32(0.1), 0.1],
        ["argument: the array float32[] -> the static value 0.1"],
        "Pass an array in each call, or in none",
    ),
    "nothing for array": (
        [{"x": ones(2), "mask": ones(2)}, {"x": ones(2), "mask": None}],
        ["argument['mask']: the array float32[2] -> None"],
        "Pass an array in each call, or in none",
    ),
    "function from the same line": (
        [scale(1), scale(2)],
        [f"argument: static value <lambda> ({HERE}:{{0}}) -> another <lambda> ({HERE}:{{0}})"],
        "Define it once, outside of the loop",
    ),
    "function of JAX from the same line": (
        [jax.jit(scale(1)), jax.jit(scale(2))],
        [f"argument: static value <lambda> ({HERE}:{{0}}) -> another <lambda> ({HERE}:{{0}})"],
        "Define it once, outside of the loop",
    ),
    "attributes that fail": (
        [Rude(1), Rude(2)],
        ["argument: static value Rude(depth=1) -> Rude(depth=2)"],
        "",
    ),
    "partial": (
        [functools.partial(jnp.sum, axis=0), functools.partial(jnp.sum, axis=1)],
        ["argument.keywords['axis']: static value 0 -> 1"],
        "Pass the same few values",
    ),
    "object": (
        [Plain(), Plain()],
        ["argument: static value a plain object -> another plain object"],
        "give its class `__eq__` and `__hash__`",
    ),
    "object with an array": (
        [HoldsArray(), HoldsArray()],
        ["argument: static value a HoldsArray -> another HoldsArray"],
        "if it holds arrays, make it an `eqxlike.Module`",
    ),
    "dataclass": (
        [Config(3), Config(4)],
        ["argument.depth: static value 3 -> 4"],
        "Pass the same few values",
    ),
    "named tuple": (
        [model(config=Point(1, 2)), model(config=Point(1, 3))],
        ["argument.config.y: static value 2 -> 3"],
        "",
    ),
    "named tuple with an array": (
        [Point(ones(2), 1), Point(ones(3), 2)],
        ["argument.x: shape (2,) -> (3,)", "argument.y: static value 1 -> 2"],
        "",
    ),
    "class": (
        [Config, Plain],
        ["argument: static value Config -> Plain"],
        "Classes are compared by identity",
    ),
    "static field that is not hashable": (
        [model(config={"sizes": [8, 8]}), model(config={"sizes": [8, 9]})],
        ["argument.config['sizes'][1]: static value 8 -> 9"],
        "each new value of a static field",
    ),
    "length of a list": (
        [[ones(2)] * 2, [ones(2)] * 3],
        ["argument: a list of length 2 -> a list of length 3"],
        "Keep the length, or stack the elements in one array",
    ),
    "element of a long list": (
        [[ones(2)] * 70, [*[ones(2)] * 69, ones(3)]],
        ["argument[69]: shape (2,) -> (3,)"],
        "",
    ),
    "keys of a dict": (
        [{"x": ones(2)}, {"x": ones(3), "mask": ones(2)}],
        [
            "argument['x']: shape (2,) -> (3,)",
            "argument['mask']: absent -> the array float32[2]",
        ],
        "an array of zeros instead of a missing array",
    ),
    "layer for array": (
        [ones(2), model().layers[0]],
        ["argument: the array float32[2] -> Linear"],
        "Pass the same types",
    ),
}


def test_differences_say_where_and_what_and_the_message_what_to_do():
    line = scale.__code__.co_firstlineno + 1
    for name, (calls, expected, advice) in CASES.items():
        trace = traced(*calls)
        assert lines(trace) == [text.format(line) for text in expected], name
        assert advice in str(trace)


def test_size_that_is_a_symbol_is_told_as_text():
    function = eqx.filter_jit(lambda x: 2 * x)
    for symbol in ("a", "b"):
        (size,) = jax.export.symbolic_shape(symbol)
        jax.export.export(jax.jit(function))(jax.ShapeDtypeStruct((size, 3), jnp.float32))
    assert lines(function.traces[-1]) == ["x: shape ('a', 3) -> ('b', 3)"]


def test_another_class_of_the_same_name_is_said_to_be_another():
    def make():
        class Twin(eqx.Module):
            x: jax.Array

        return Twin(ones(2))

    trace = traced(make(), make())
    assert lines(trace) == ["argument: Twin -> another class Twin"]
    assert "running its definition again makes another class" in str(trace)


def test_what_is_frozen_is_told_by_its_fields():
    model = eqx.nn.Sequential([eqx.nn.Linear(2, 2, key=jax.random.key(0))])
    half = eqx.nn.freeze(model, lambda model: model[0].weight)
    whole = eqx.nn.freeze(model)
    for before, after, change in (
        (model, half, "Linear -> Linear with frozen weight"),
        (half, whole, "Linear with frozen weight -> Linear with frozen weight, bias"),
        (whole, model, "Linear with frozen weight, bias -> Linear"),
    ):
        trace = traced(before, after)
        assert lines(trace) == [f"argument.layers[0]: {change}"]
        assert "A function is compiled for each set of frozen arrays." in str(trace)


def test_sharding_is_told_by_axes_of_the_mesh():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    placed = jax.device_put(ones(4), NamedSharding(mesh, PartitionSpec("data")))
    before, after = "no mesh", "mesh(data=2), P('data',)"
    assert lines(traced(ones(4), placed)) == [f"argument: sharding {before} -> {after}"]


def test_settings_of_jax_are_told():
    function = eqx.filter_jit(lambda x: None)
    function(ones(2))
    precision = jax.config.jax_default_matmul_precision
    for change, line in [
        (jax.enable_x64(True), "jax_enable_x64: False -> True"),
        (
            jax.default_matmul_precision("float32"),
            f"jax_default_matmul_precision: {precision} -> float32",
        ),
        (
            jax.numpy_dtype_promotion("standard"),
            "jax_numpy_dtype_promotion: strict -> standard",
        ),
    ]:
        with change:
            function(ones(2))
        assert lines(function.traces[-1]) == [f"JAX's setting {line}"]
        assert "Set them once, at the start of the program" in str(function.traces[-1])


def test_numpy_array_of_64_bits_is_told_from_one_of_32():
    with jax.enable_x64(True):
        trace = traced(np.ones(2, np.float32), np.ones(2))
    assert lines(trace) == ["argument: dtype float32 -> float64"]
    assert "NumPy uses 64 bits where JAX uses 32" in str(trace)


def test_message_begins_with_the_function_and_its_place():
    @eqx.filter_jit
    def mean(batch):
        return None

    mean(ones(2))
    mean(ones(3))
    line = mean.__wrapped__.__code__.co_firstlineno  # pyright: ignore
    assert str(mean.traces[-1]) == (
        f"`mean` ({HERE}:{line}) is traced and compiled again (trace 2). What differs from trace "
        "1:\n"
        "  batch: shape (2,) -> (3,)\n"
        "A function is compiled for each shape. Pass the same shapes in each call: drop the last "
        "batch if it is smaller, or pad it."
    )


def test_first_trace_says_so_and_long_messages_are_cut():
    assert str(traced(ones(2))).endswith("is traced for the first time.")
    assert isinstance(traced(ones(2)), Trace)
    text = str(traced([ones(2)] * 30, [ones(3)] * 30))
    assert re.findall(r"argument\[(?:19|20)\]|and 10 more", text) == ["argument[19]", "and 10 more"]
    # The same advice is given once.
    assert text.count("compiled for each shape") == 1
    assert max(map(len, lines(traced("a" * 10_000, "b" * 10_000)))) < 500


def test_latest_trace_most_like_the_new_one_is_compared_with():
    trace = traced((ones(2), ones(2)), (ones(3), ones(4)), (ones(2), ones(5)))
    assert trace.compared_with == 1
    assert lines(trace) == ["argument[1]: shape (2,) -> (5,)"]
    assert traced(jnp.float32(0.1), 0.1, jnp.asarray(0.1)).compared_with == 1
    assert traced(ones(2), ones(3), ones(4)).compared_with == 2
    # A call of another structure is further away than many shapes.
    assert traced((ones(2),) * 5, {"a": ones(2)}, (ones(3),) * 5).compared_with == 1


def test_nothing_that_differs_is_said_so():
    function = eqx.filter_jit(lambda x: None)
    function(ones(2))
    jax.clear_caches()
    function(ones(2))
    assert "Arguments and settings are the same as in trace 1" in str(function.traces[-1])


def test_named_and_variadic_arguments_have_their_names():
    @eqx.filter_jit
    def function(x, *rest, scale, **more):
        return None

    function(1, 2, scale=3, other=4)
    function(0, 0, scale=0, other=0)
    assert [each.path for each in function.traces[-1].differences] == [
        "x",
        "rest[0]",
        "scale",
        "other",
    ]


def test_tree_deeper_than_pythons_stack_is_compared():
    def nested(leaf):
        for _ in range(1500):
            leaf = (leaf,)
        return leaf

    known = []
    for leaf in (ones(2), ones(3)):
        arrays, structure = flatten(nested(leaf))
        root = root_node(["x"], [describe(structure, describe_static)])
        forms = tuple(form_of_type(jax.typeof(each)) for each in arrays)
        known.append(Arguments(Tree(root, forms), ()))
    (found,) = find_differences(*known)
    assert str(found) == f"x{'[0]' * 1500}: shape (2,) -> (3,)"
