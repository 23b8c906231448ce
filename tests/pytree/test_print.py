"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

import dataclasses
import functools
import inspect
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

both = pytest.mark.parametrize(
    "eqx", [pytest.param(equinox, id="equinox"), pytest.param(eqxlike, id="eqxlike")]
)


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Plain:
    x: Any
    y: int = 3


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
    "partial": functools.partial(max, 1),
    "jax partial": jtu.Partial(max, 1),
}


def without_addresses(text):
    return re.sub(r"0x[0-9a-f]+", "0x", text)


def test_has_the_parameters_of_equinox():
    def parameters(library):
        signature = inspect.signature(library.tree_pformat)
        return [
            (p.name, p.kind, "function" if callable(p.default) else p.default)
            for p in signature.parameters.values()
            if p.name != "pytree"
        ]

    assert parameters(eqxlike) == parameters(equinox)


@pytest.mark.parametrize(
    "options", [{}, {"short_arrays": False}, {"struct_as_array": True}], ids=str
)
@pytest.mark.parametrize("sample", SAMPLES)
def test_prints_as_equinox_does(sample, options):
    one, other = (
        without_addresses(eqx.tree_pformat(SAMPLES[sample], **options))
        for eqx in (eqxlike, equinox)
    )
    assert one == other


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
