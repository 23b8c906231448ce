"""How often a function is traced: counted, for each kind of argument."""

import copy
import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest

from eqxlike import filter_grad, filter_jit, filter_vmap, is_array, nn, tree_at
from tests.transforms.jit.traced import Affine, Traced
from tests.transforms.jit.values import Colour, Config, InheritedConfig, Rank


def count_traces(*trees):
    traced = Traced(lambda tree: [leaf for leaf in jtu.tree_leaves(tree) if is_array(leaf)])
    for tree in trees:
        traced(tree)
    return traced.count


MODELS = {
    "array": lambda: jnp.ones(2),
    "module": lambda: Affine(jnp.ones(2)),
    "nested-module": lambda: Affine(Affine(jnp.ones(2)), (jnp.ones(3), "a")),
    "module-with-list": lambda: Affine([jnp.ones(2)], {"a": jnp.ones(3)}),
    "mlp": lambda: nn.MLP(2, 2, 4, 2, key=jax.random.key(0)),
    "tuple": lambda: (jnp.ones(2), None, "a", 1.5),
    "optax-state": lambda: optax.adam(1e-3).init(jnp.ones(2)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_same_again_is_one_trace(name):
    tree = MODELS[name]()
    assert count_traces(*[tree] * 5) == 1


@pytest.mark.parametrize("name", MODELS)
def test_an_equal_one_made_anew_is_one_trace(name):
    assert count_traces(*[MODELS[name]() for _ in range(5)]) == 1


@pytest.mark.parametrize("name", MODELS)
def test_new_values_are_one_trace(name):
    tree = MODELS[name]()
    others = [
        jtu.tree_map(lambda leaf, i=index: leaf + i if is_array(leaf) else leaf, tree)
        for index in range(5)
    ]
    assert count_traces(tree, *others) == 1


EDITS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda tree: pickle.loads(pickle.dumps(tree)),
    "replace": lambda tree: dataclasses.replace(tree, scale=jnp.zeros(2)),
    "tree_map": lambda tree: jtu.tree_map(lambda leaf: leaf, tree),
    "tree_at": lambda tree: tree_at(lambda it: it.scale, tree, jnp.zeros(2)),
    "numpy": lambda tree: tree_at(lambda it: it.scale, tree, np.zeros(2, np.float32)),
}


@pytest.mark.parametrize("name", EDITS)
def test_new_arrays_are_one_trace_through(name):
    tree = Affine(jnp.ones(2), ("a", 1))
    assert count_traces(tree, EDITS[name](tree), tree) == 1


def test_new_shape_is_one_trace_more():
    assert count_traces(Affine(jnp.ones(2)), Affine(jnp.ones(3)), Affine(jnp.ones(2))) == 2


def test_new_dtype_is_one_trace_more():
    trees = [Affine(jnp.ones(2, dtype)) for dtype in (jnp.float32, jnp.int32, jnp.float32)]
    assert count_traces(*trees) == 2


def test_weak_type_is_one_trace_more():
    weak, strong = jnp.asarray(1.0), jnp.asarray(1.0, jnp.float32)
    assert count_traces(Affine(weak), Affine(strong), Affine(weak)) == 2


def test_new_kind_of_key_is_one_trace_more():
    keys = [jax.random.key(0, impl=impl) for impl in ("threefry2x32", "rbg", "threefry2x32")]
    assert count_traces(*map(Affine, keys)) == 2


def test_numpy_array_in_place_of_a_jax_array_is_no_new_trace():
    assert count_traces(Affine(jnp.ones(2)), Affine(np.ones(2, np.float32))) == 1


def test_new_structure_is_one_trace_more():
    assert count_traces((jnp.ones(2), None), (None, jnp.ones(2)), (jnp.ones(2), None)) == 2


def make_partial(value):
    return functools.partial(max, value)


class WithMethod:
    def method(self):
        return self


INSTANCE = WithMethod()
TABLE = {"a": 1}


# Each is told apart from all others in its row.
TOLD_APART = {
    "equal-numbers": [1, 1.0, True, 1 + 0j, np.int64(1)],
    "zeros": [0, 0.0, -0.0, False, complex(0.0, -0.0)],
    "not-numbers": [float("nan"), float("inf"), float("-inf")],
    "text": ["1", b"1", 1],
    "enums": [Colour.RED, Colour.GREEN, Rank.FIRST, 1],
    "tuples": [(1,), (1.0,), (True,)],
    "zeros-in-tuples": [(0.0,), (-0.0,)],
    "dataclasses": [Config(1), Config(1.0), Config(True)],
    "subclasses-of-dataclasses": [InheritedConfig(1), InheritedConfig(1.0)],
    "partials": [make_partial(1), make_partial(1.0)],
    "functions": [jnp.sin, jnp.cos],
    "types": [np.float32, jnp.float32, "float32"],
    "dtypes": [np.dtype("float32"), np.dtype("int32")],
    "nothing": [None, (), False],
}


# Python makes the values anew; nothing tells one from another.
INTERCHANGEABLE = {
    "int": lambda: int("1" * 30),
    "float": lambda: float("1.5"),
    "zero": lambda: float("0.0"),
    "nan": lambda: float("nan"),
    "complex": lambda: complex("1j"),
    "str": lambda: "".join(["te", "xt"]),
    "bytes": lambda: bytes([1, 2]),
    "enum": lambda: Colour["RED"],
    "tuple": lambda: (1, float("nan"), "".join(["te", "xt"])),
    "dataclass": lambda: Config(float("1.5")),
    "partial": lambda: make_partial(float("1.5")),
    "method": lambda: INSTANCE.method,
    "builtin-method": lambda: TABLE.get,
    "dtype": lambda: np.dtype("float32").newbyteorder("="),
    "slice": lambda: slice(0, int("1000000")),
    "range": lambda: range(int("1000000")),
}


@pytest.mark.parametrize("name", TOLD_APART)
def test_static_leaves_that_differ_are_a_trace_each(name):
    values = TOLD_APART[name]
    trees = [Affine(jnp.ones(2), value) for value in values]
    assert count_traces(*trees, *trees) == len(values)


@pytest.mark.parametrize("name", TOLD_APART)
def test_static_arguments_that_differ_are_a_trace_each(name):
    values = TOLD_APART[name]
    assert count_traces(*values, *values) == len(values)


@pytest.mark.parametrize("name", TOLD_APART)
def test_static_fields_that_differ_are_a_trace_each(name):
    values = TOLD_APART[name]
    trees = [Affine(jnp.ones(2), mode=value) for value in values]
    assert count_traces(*trees, *trees) == len(values)


@pytest.mark.parametrize("name", INTERCHANGEABLE)
def test_static_leaves_that_nothing_tells_apart_are_one_trace(name):
    trees = [Affine(jnp.ones(2), INTERCHANGEABLE[name]()) for _ in range(3)]
    assert count_traces(*trees) == 1


@pytest.mark.parametrize("name", INTERCHANGEABLE)
def test_static_arguments_that_nothing_tells_apart_are_one_trace(name):
    assert count_traces(*(INTERCHANGEABLE[name]() for _ in range(3))) == 1


# Python 3.11 has no hash for slices, and a static field asks for one.
@pytest.mark.parametrize("name", [name for name in INTERCHANGEABLE if name != "slice"])
def test_static_fields_that_nothing_tells_apart_are_one_trace(name):
    trees = [Affine(jnp.ones(2), mode=INTERCHANGEABLE[name]()) for _ in range(3)]
    assert count_traces(*trees) == 1


def test_numpy_scalars_of_one_type_are_one_trace():
    assert count_traces(np.int64(1), np.int64(2), np.int64(3)) == 1


# Under and around other transformations: as often as `jax.jit`.

AROUND = {
    "jit": lambda f: jax.jit(f)(jnp.ones(2)),
    "grad": lambda f: jax.grad(lambda x: f(x).sum())(jnp.ones(2)),
    "vmap": lambda f: jax.vmap(f)(jnp.ones((3, 2))),
    "jvp": lambda f: jax.jvp(f, (jnp.ones(2),), (jnp.ones(2),)),
    "vjp": lambda f: jax.vjp(f, jnp.ones(2))[1](jnp.ones(2)),
    "scan": lambda f: jax.lax.scan(lambda c, x: (f(c), x), jnp.ones(2), None, length=3),
    "scan-directly": lambda f: jax.lax.map(f, jnp.ones((3, 2))),
    "cond": lambda f: jax.lax.cond(True, f, lambda x: x, jnp.ones(2)),
    "hessian": lambda f: jax.hessian(lambda x: f(x).sum())(jnp.ones(2)),
    "make_jaxpr": lambda f: jax.make_jaxpr(f)(jnp.ones(2)),
    "eval_shape": lambda f: jax.eval_shape(f, jnp.ones(2)),
    "filter_vmap": lambda f: filter_vmap(f)(jnp.ones((3, 2))),
    "filter_grad": lambda f: filter_grad(lambda x: f(x).sum())(jnp.ones(2)),
    "filter_jit": lambda f: filter_jit(lambda x: f(f(x)))(jnp.ones(2)),
}


@pytest.mark.parametrize("name", AROUND)
def test_function_under_another_transformation_is_traced_as_often_as_by_jax(name):
    def count(jit):
        calls = 0

        def function(x):
            nonlocal calls
            calls += 1
            return 3.0 * x

        jitted = jit(function)
        for _ in range(3):
            AROUND[name](jitted)
        return calls

    assert count(filter_jit) <= count(jax.jit)
