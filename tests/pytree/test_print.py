"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

import collections
import dataclasses
import enum
import functools
import inspect
import math
import re
from typing import Any, NamedTuple

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eqxlike
from eqxlike import tree_pformat
from tests.beside_equinox import both


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Plain:
    x: Any
    y: int = 3


@dataclasses.dataclass
class Secretive:
    x: Any
    hidden: int = dataclasses.field(default=1, repr=False)


@dataclasses.dataclass
class Described:
    x: Any

    def __repr__(self):
        return "two\nlines"

    def method(self):
        return self.x


class Colour(enum.Enum):
    RED = 1


SAMPLES = {
    "int": 1,
    "float": 1.5,
    "str": "a",
    "None": None,
    "list": [1, 2],
    "pair": (1, 2),
    "single": (1,),
    "empty tuple": (),
    "empty list": [],
    "empty dict": {},
    "dict": {"a": 1, 2: [3]},
    "set": {1},
    "frozenset": frozenset(),
    "named tuple": Point(1, jnp.ones(2)),
    "dataclass": Plain(jnp.ones(2), 4),
    "dataclass of defaults": Plain(1),
    "dataclass with a hidden field": Secretive(1, 2),
    "dataclass with a text of its own": [Described(1)],
    "named tuple in itself": Point(1, Point(jnp.ones(2), ())),
    "ordered dict": collections.OrderedDict(b=1, a=jnp.ones(2)),
    "default dict": collections.defaultdict(list, a=jnp.ones(2)),
    "deque": collections.deque([jnp.ones(2)]),
    "dict with mixed keys": {1: 2, "a": 3, None: 4, (1,): 5},
    "enumeration": Colour.RED,
    "long list": list(range(100)),
    "long text": ["a" * 100, "b"],
    "complex": 1 + 2j,
    "numbers that are none": [math.inf, math.nan, -0.0],
    "slice": slice(1, 2),
    "float32": jnp.ones((2, 3)),
    "bfloat16": jnp.ones(2, jnp.bfloat16),
    "float8": jnp.ones(2, jnp.float8_e4m3fn),
    "complex64": jnp.ones(2, jnp.complex64),
    "int32": jnp.arange(3),
    "int4": jnp.ones(2, jnp.int4),
    "uint8": jnp.ones(2, jnp.uint8),
    "bool": jnp.ones(2, bool),
    "scalar": jnp.ones(()),
    "weak scalar": jnp.array(1.0),
    "key": jax.random.key(0),
    "keys": jax.random.split(jax.random.key(0), 3),
    "numpy": np.ones(2),
    "numpy bfloat16": np.ones(2, jnp.bfloat16),
    "numpy scalar": np.float32(1),
    "numpy text": np.array(["a"]),
    "struct": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16),
    "structs": [jax.ShapeDtypeStruct((), jnp.int4), jax.ShapeDtypeStruct((0,), jnp.float32)],
    "weak struct": jax.eval_shape(lambda: 1.0),
    "key struct": jax.eval_shape(lambda: jax.random.key(0)),
    "function": np.sum,
    "builtin": len,
    "ufunc": np.sin,
    "jax ufunc": jnp.add,
    "jitted": jnp.sin,
    "custom jvp": jax.nn.relu,
    "class": dict,
    "dtype": jnp.float32,
    "bound method": Described(1).method,
    "bound builtin": "a".join,
    "lambda": lambda x: x,
    "cached": functools.lru_cache(len),
    "jit, vmap, grad": [jax.jit(np.sum), jax.vmap(np.sum), jax.grad(np.sum)],
    "types": [Any, list[int], int | str],
    "treedef": jtu.tree_structure([1, {"a": 2}]),
    "numpy object": np.array([1, "a"], object),
    "numpy int4": np.ones(2, jnp.int4),
    "partial": functools.partial(max, 1),
    "jax partial": jtu.Partial(max, 1),
}


def without_addresses(text):
    return re.sub(r"0x[0-9a-f]+", "0x", text)


@pytest.mark.parametrize("name", ["tree_pformat", "tree_pprint"])
def test_has_the_parameters_of_equinox(name):
    def parameters(library):
        signature = inspect.signature(getattr(library, name))
        return [
            (p.name, p.kind, "function" if inspect.isfunction(p.default) else p.default)
            for p in signature.parameters.values()
        ]

    assert parameters(eqxlike) == parameters(equinox)


OPTIONS = [
    {},
    {"short_arrays": False},
    {"struct_as_array": True},
    {"short_arrays": False, "struct_as_array": True},
    {"width": 1},
    {"width": 20},
    {"truncate_leaf": lambda node: isinstance(node, list | jax.Array | Plain)},
    {"truncate_leaf": dataclasses.is_dataclass},
]


@pytest.mark.parametrize("sample", SAMPLES)
def test_prints_as_equinox_does(sample):
    def texts(eqx):
        return [
            without_addresses(eqx.tree_pformat(SAMPLES[sample], **options)) for options in OPTIONS
        ]

    assert texts(eqxlike) == texts(equinox)


def make_tree_of_modules(eqx):
    class Inner(eqx.Module):
        x: Any
        hidden: Any = eqx.field(default=1, repr=False)
        name: str = eqx.field(static=True, default="inner")

        def method(self):
            return self.x

    class Own(eqx.Module):
        x: Any

        def __repr__(self):
            return "own"

    class Empty(eqx.Module):
        pass

    class Outer(Inner):
        others: Any = None

    inner = Inner(jnp.ones((2, 3)))
    return {
        "outer": Outer([inner, np.ones(2)], others=(Own(1), Empty(), Point(inner, None))),
        "methods": [inner.method, Inner.method],
        "classes": [Inner, Empty],
        "layers": eqx.nn.Sequential([eqx.nn.Linear(2, 2, key=jax.random.key(0))]),
    }


@pytest.mark.parametrize("part", ["outer", "methods", "classes", "layers"])
def test_prints_modules_as_equinox_does(part):
    def texts(eqx):
        tree = make_tree_of_modules(eqx)[part]
        texts = [eqx.tree_pformat(tree, **options) for options in OPTIONS]
        return [
            without_addresses(text)
            .replace(eqx.__name__, "library")
            .replace("_ModuleMeta", "ModuleMeta")
            for text in texts
        ]

    assert texts(eqxlike) == texts(equinox)


@both
def test_what_holds_itself_is_cut_off(eqx):
    node = [1]
    node.append(node)
    assert eqx.tree_pformat(node) == "[1, <recursive>]"


@both
def test_pprint_prints_what_pformat_says(eqx, capsys):
    tree = {"first": list(range(8)), "second": Plain(jnp.ones((2, 3)), [Point(1, 2)])}
    for options in OPTIONS:
        assert eqx.tree_pprint(tree, **options) is None
        assert capsys.readouterr().out == tree_pformat(tree, **options) + "\n"


@both
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (jnp.float32, "f32[2,3]"),
        (jnp.float16, "f16[2,3]"),
        (jnp.bfloat16, "bf16[2,3]"),
        (jnp.int8, "i8[2,3]"),
        (jnp.uint32, "u32[2,3]"),
        (jnp.complex64, "c64[2,3]"),
        (bool, "bool[2,3]"),
    ],
)
def test_an_array_is_its_dtype_and_shape(eqx, dtype, expected):
    assert eqx.tree_pformat(jnp.zeros((2, 3), dtype)) == expected


@both
def test_a_numpy_array_is_marked(eqx):
    assert eqx.tree_pformat(np.ones(2)) == "f64[2](numpy)"


@both
def test_arrays_may_be_printed_in_full(eqx):
    assert "1., 2." in eqx.tree_pformat([jnp.array([1.0, 2.0])], short_arrays=False)


@both
def test_a_struct_may_be_printed_as_an_array(eqx):
    struct = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert eqx.tree_pformat([struct], struct_as_array=True) == "[f32[2]]"


@both
@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (lambda f: jax.jit(f)(jnp.ones(3)), "[f32[3]]"),
        (lambda f: jax.vmap(f)(jnp.ones((3, 2))), "[f32[2]]"),
        (lambda f: jax.linearize(f, jnp.ones(3)), "[f32[3]]"),
    ],
    ids=["jit", "vmap", "linearize"],
)
def test_a_tracer_prints_as_its_array(eqx, transform, expected):
    texts = []

    def function(x):
        texts.append(eqx.tree_pformat([x]))
        return x

    transform(function)
    assert texts == [expected]


@both
def test_truncate_leaf_shortens_a_node_to_its_type(eqx):
    text = eqx.tree_pformat([Plain(1), [2]], truncate_leaf=lambda node: isinstance(node, Plain))
    assert text == "[Plain(...), [2]]"


@both
def test_truncate_leaf_reaches_fields(eqx):
    text = eqx.tree_pformat(Plain("a", 4), truncate_leaf=lambda node: isinstance(node, int))
    assert text == "Plain(x='a', y=int(...))"


@both
@pytest.mark.parametrize(("width", "indent"), [(10, 2), (20, 4), (40, 1)])
def test_breaks_lines_as_equinox_does(eqx, width, indent):
    tree = {"first": list(range(8)), "second": Plain(jnp.ones((2, 3)), [Point(1, 2)])}
    text = eqx.tree_pformat(tree, width=width, indent=indent)
    assert text == equinox.tree_pformat(tree, width=width, indent=indent)
    assert f"\n{' ' * indent}'first'" in text


# In Equinox it is two spaces for these, whatever `indent` says.
def test_a_jax_partial_is_indented_like_all_else():
    text = tree_pformat(jtu.Partial(max, 1), width=1, indent=4)
    assert text.splitlines()[1:3] == ["    func=<built-in function max>,", "    args=("]
    assert "\n  func" in equinox.tree_pformat(jtu.Partial(max, 1), width=1, indent=4)


@given(st.lists(st.lists(st.integers(0, 99), max_size=6), max_size=6), st.integers(30, 60))
def test_lines_keep_within_the_width(tree, width):
    assert max(map(len, tree_pformat(tree, width=width).splitlines())) <= width


@given(
    st.recursive(st.integers() | st.text("ab"), lambda trees: st.lists(trees) | st.tuples(trees))
)
def test_plain_trees_print_as_python_reads_them(tree):
    assert eval(tree_pformat(tree)) == tree


@both
def test_options_are_by_keyword_only(eqx):
    with pytest.raises(TypeError):
        eqx.tree_pformat([1], 80)


@both
def test_a_module_prints_as_its_repr(eqx):
    class Model(eqx.Module):
        x: Any

    assert eqx.tree_pformat(Model(jnp.ones(2))) == repr(Model(jnp.ones(2)))


@both
def test_a_user_repr_inside_a_module_is_used(eqx):
    class Part:
        def __repr__(self):
            return "<part>"

    class Model(eqx.Module):
        x: Any

    assert eqx.tree_pformat(Model(Part())).endswith("Model(x=<part>)")
