"""The report of a retrace: differences from the most similar trace, and advice."""

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
from eqxlike._transforms._jit._differences import (
    Arguments,
    describe_static,
    find_differences,
    form_of_type,
)
from eqxlike.debug import Trace

HERE = "tests/debug/test_retraces.py"


class Model(eqx.Module):
    layers: list
    config: object = eqx.field(static=True, default=None)


@dataclasses.dataclass(frozen=True)
class Config:
    depth: int


Point = collections.namedtuple("Point", "x y")


class Plain:
    """An object that is compared by identity."""

    def __repr__(self) -> str:
        return "a plain object"


class HoldsArray(Plain):
    def __init__(self):
        self.array = jnp.ones(2)

    __repr__ = object.__repr__  # pyright: ignore


@dataclasses.dataclass(frozen=True)
class Rude:
    """An object whose attributes raise an error when the report reads them."""

    depth: int

    def __getattribute__(self, name):
        file = sys._getframe(1).f_code.co_filename
        if name == "depth" and ("_traces" in file or file.endswith("_text.py")):
            raise RuntimeError("no")
        return object.__getattribute__(self, name)


def model(config=None):
    return Model([eqx.nn.Linear(2, 2, key=jax.random.key(0))], config)


ones = jnp.ones


def traced(*calls):
    """The last trace of a function of one `argument`, called once with each of `calls`."""
    function = eqx.filter_jit(lambda argument: None)
    for argument in calls:
        function(argument)
    return function.traces[-1]


def lines(trace):
    return [str(each) for each in trace.differences]


def scale(factor):
    return lambda x: factor * x


key, sum_over = jax.random.key, functools.partial(functools.partial, jnp.sum)
ANOTHER = f": static value <lambda> ({HERE}:LINE) -> another <lambda> ({HERE}:LINE)"
# For each advice: two calls, and their difference without the word "argument".
CASES = {
    "drop the last batch if it is smaller, or pad it": [
        ([ones(3), 1], [ones(2), 2], "[0]: shape (3,) -> (2,); argument[1]: static value 1 -> 2")
    ],
    "Cast the array before the call": [(ones(2), ones(2, int), ": dtype float32 -> int32")],
    "Give it a dtype, as in `jnp.asarray(0.1, dtype=jnp.float32)`": [
        (jnp.float32(0.1), jnp.asarray(0.1), ": weak type False -> True")
    ],
    "A function is compiled for each dtype": [
        (key(0), key(0, impl="rbg"), ": dtype key<fry> -> key<rbg>")
    ],
    "If it only computes with the number, pass an array": [(0.1, 0.2, ": static value 0.1 -> 0.2")],
    "compiled for each new number": [(1, 1.0, ": static value 1 -> 1.0")],
    "each new value of a static field": [
        # Numbers with equal hashes.
        (model((-1, 0)), model((-2, 0)), ".config[0]: static value -1 -> -2"),
        # `np.sin` does not support weak references.
        (model((1, np.sin)), model((2, np.sin)), ".config[0]: static value 1 -> 2"),
        (model(Point(1, 2)), model(Point(1, 3)), ".config.y: static value 2 -> 3"),
        (model({"a": [8]}), model({"a": [9]}), ".config['a'][0]: static value 8 -> 9"),
    ],
    "Pass the same few values": [
        (frozenset([-1]), frozenset([-2]), ": static value frozenset({-1}) -> frozenset({-2})"),
        (sum_over(axis=0), sum_over(axis=1), ".keywords['axis']: static value 0 -> 1"),
        (Config(3), Config(4), ".depth: static value 3 -> 4"),
        (Rude(1), Rude(2), ": static value Rude(depth=1) -> Rude(depth=2)"),
    ],
    "Pass an array in each call, or in none": [
        (jnp.float32(0.1), 0.1, ": the array float32[] -> the static value 0.1"),
        ({"mask": ones(2)}, {"mask": None}, "['mask']: the array float32[2] -> None"),
    ],
    "Define it once, outside of the loop": [
        (scale(1), scale(2), ANOTHER),
        (jax.jit(scale(1)), jax.jit(scale(2)), ANOTHER),
    ],
    "give its class `__eq__` and `__hash__`": [
        (Plain(), Plain(), ": static value a plain object -> another plain object")
    ],
    "if it holds arrays, make it an `eqxlike.Module`": [
        (HoldsArray(), HoldsArray(), ": static value a HoldsArray -> another HoldsArray")
    ],
    "Classes are compared by identity": [(Config, Plain, ": static value Config -> Plain")],
    "Keep the length, or stack the elements in one array": [
        ([ones(2)] * 2, [ones(2)] * 3, ": a list of length 2 -> a list of length 3")
    ],
    "compiled for each shape": [
        ([ones(2)] * 70, [*[ones(2)] * 69, ones(3)], "[69]: shape (2,) -> (3,)"),
        (Point(1, ones(2)), Point(1, ones(3)), ".y: shape (2,) -> (3,)"),
    ],
    "an array of zeros instead of a missing array": [
        (
            {"x": 1},
            {"x": 2, "mask": ones(2)},
            "['x']: static value 1 -> 2; argument['mask']: absent -> the array float32[2]",
        ),
    ],
    "Pass the same types": [(ones(2), model().layers[0], ": the array float32[2] -> Linear")],
}


def test_report_names_the_differences_and_gives_advice():
    line = scale.__code__.co_firstlineno + 1
    for advice, cases in CASES.items():
        for before, after, expected in cases:
            trace = traced(before, after)
            assert "; ".join(lines(trace)) == f"argument{expected}".replace("LINE", str(line))
            assert advice in str(trace)


def test_symbolic_size_is_shown_as_text():
    function = eqx.filter_jit(lambda x: 2 * x)
    for symbol in ("a", "b"):
        (size,) = jax.export.symbolic_shape(symbol)
        jax.export.export(jax.jit(function))(jax.ShapeDtypeStruct((size, 3), jnp.float32))
    assert lines(function.traces[-1]) == ["x: shape ('a', 3) -> ('b', 3)"]


def test_another_class_of_the_same_name_is_shown_as_another():
    def make():
        class Twin(eqx.Module):
            x: jax.Array

        return Twin(ones(2))

    trace = traced(make(), make())
    assert lines(trace) == ["argument: Twin -> another class Twin"]
    assert "running its definition again makes another class" in str(trace)


def test_difference_of_frozen_arrays_names_the_fields():
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


def test_difference_of_sharding_names_the_axes_of_the_mesh():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    placed = jax.device_put(ones(4), NamedSharding(mesh, PartitionSpec("data")))
    before, after = "no mesh", "mesh(data=2), P('data',)"
    assert lines(traced(ones(4), placed)) == [f"argument: sharding {before} -> {after}"]


def test_difference_of_a_setting_of_jax_names_the_setting():
    function, x = eqx.filter_jit(lambda x: None), ones(2)
    function(x)
    precision = jax.config.jax_default_matmul_precision
    precisions = f"default_matmul_precision: {precision} -> float32"
    for change, line in [
        (jax.enable_x64(True), "enable_x64: False -> True"),
        (jax.default_matmul_precision("float32"), precisions),
        (jax.numpy_dtype_promotion("standard"), "numpy_dtype_promotion: strict -> standard"),
    ]:
        with change:
            function(x)
        assert lines(function.traces[-1]) == [f"JAX's setting jax_{line}"]
        assert "Set them once, at the start of the program" in str(function.traces[-1])


def test_numpy_arrays_of_64_and_32_bits_differ():
    with jax.enable_x64(True):
        trace = traced(np.ones(2, np.float32), np.ones(2))
    assert lines(trace) == ["argument: dtype float32 -> float64"]
    assert "NumPy uses 64 bits where JAX uses 32" in str(trace)


def test_report_begins_with_the_function_and_its_place():
    @eqx.filter_jit
    def mean(batch):
        return None

    mean(ones(2))
    mean(ones(3))
    line = mean.__wrapped__.__code__.co_firstlineno  # pyright: ignore
    first, second = mean.traces
    assert str(first).endswith("is traced for the first time.")
    assert isinstance(first, Trace)
    assert str(second) == (
        f"`mean` ({HERE}:{line}) is traced and compiled again (trace 2). What differs from trace "
        "1:\n"
        "  batch: shape (2,) -> (3,)\n"
        "A function is compiled for each shape. Pass the same shapes in each call: drop the last "
        "batch if it is smaller, or pad it."
    )


def test_long_reports_are_cut():
    text = str(traced([ones(2)] * 30, [ones(3)] * 30))
    assert re.findall(r"argument\[(?:19|20)\]|and 10 more", text) == ["argument[19]", "and 10 more"]
    # Each advice is given once.
    assert text.count("compiled for each shape") == 1
    assert max(map(len, lines(traced("a" * 10_000, "b" * 10_000)))) < 500


def test_trace_is_compared_with_the_latest_of_the_most_similar_traces():
    trace = traced((ones(2), ones(2)), (ones(3), ones(4)), (ones(2), ones(5)))
    assert trace.compared_with == 1
    assert lines(trace) == ["argument[1]: shape (2,) -> (5,)"]
    assert traced(jnp.float32(0.1), 0.1, jnp.asarray(0.1)).compared_with == 1
    assert traced(ones(2), ones(3), ones(4)).compared_with == 2
    # A different structure is a larger difference than many shapes.
    assert traced((ones(2),) * 5, {"a": ones(2)}, (ones(3),) * 5).compared_with == 1


def test_report_without_differences_says_so():
    function = eqx.filter_jit(lambda x: None)
    function(ones(2))
    jax.clear_caches()
    function(ones(2))
    assert "Arguments and settings are the same as in trace 1" in str(function.traces[-1])


def test_named_and_variadic_arguments_have_their_names():
    function = eqx.filter_jit(lambda x, *rest, scale, **more: None)
    function(1, 2, scale=3, other=4)
    function(0, 0, scale=0, other=0)
    paths = [each.path for each in function.traces[-1].differences]
    assert paths == ["x", "rest[0]", "scale", "other"]


def test_trees_deeper_than_the_stack_of_python_are_compared():
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
