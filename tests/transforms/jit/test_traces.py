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

from eqxlike import (
    Module,
    apply_updates,
    checking_partitions,
    filter,
    filter_grad,
    filter_jit,
    filter_value_and_grad,
    filter_vmap,
    is_array,
    nn,
    tree_at,
)
from tests.transforms.jit.traced import Affine, Traced
from tests.transforms.jit.values import Colour, Config


def count_traces(*trees):
    traced = Traced(lambda tree: [leaf for leaf in jtu.tree_leaves(tree) if is_array(leaf)])
    for tree in trees:
        traced(tree)
    return traced.count


MODELS = {
    "array": lambda: jnp.ones(2),
    "nested-module": lambda: Affine(Affine(jnp.ones(2)), (jnp.ones(3), "a")),
    "module-with-list": lambda: Affine([jnp.ones(2)], {"a": jnp.ones(3)}),
    "mlp": lambda: nn.MLP(2, 2, 4, 1, key=jax.random.key(0)),
    "tuple": lambda: (jnp.ones(2), None, "a", 1.5),
    "optax-state": lambda: optax.adam(1e-3).init(jnp.ones(2)),
}


def test_the_same_an_equal_one_and_new_values_are_one_trace():
    for make in MODELS.values():
        tree = make()
        other = jtu.tree_map(lambda leaf: leaf + 1 if is_array(leaf) else leaf, tree)
        assert count_traces(tree, tree, make(), other, tree) == 1


EDITS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda tree: pickle.loads(pickle.dumps(tree)),
    "replace": lambda tree: dataclasses.replace(tree, scale=jnp.zeros(2)),
    "tree_map": lambda tree: jtu.tree_map(lambda leaf: leaf, tree),
    "tree_at": lambda tree: tree_at(lambda it: it.scale, tree, jnp.zeros(2)),
    "numpy": lambda tree: tree_at(lambda it: it.scale, tree, np.zeros(2, np.float32)),
}


def test_new_arrays_are_one_trace_through_copies_and_edits():
    tree = Affine(jnp.ones(2), ("a", 1))
    assert count_traces(tree, *(edit(tree) for edit in EDITS.values()), tree) == 1


def test_new_shape_weak_type_or_kind_of_key_is_one_trace_more():
    weak, strong = jnp.asarray(1.0), jnp.asarray(1.0, jnp.float32)
    keys = [jax.random.key(0, impl=impl) for impl in ("threefry2x32", "rbg")]
    for first, second in ((jnp.ones(2), jnp.ones(3)), (weak, strong), keys):
        assert count_traces(*map(Affine, (first, second, first))) == 2


def make_partial(value):
    return functools.partial(max, value)


class WithMethod:
    def method(self):
        return self


INSTANCE = WithMethod()
TABLE = {"a": 1}


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


def test_static_values_that_nothing_tells_apart_are_one_trace():
    def make():
        # Python 3.11 has no hash for slices, and a static field asks for one.
        values = {name: each() for name, each in INTERCHANGEABLE.items()}
        fields = tuple(value for name, value in values.items() if name != "slice")
        return Affine(jnp.ones(2), [*values.values()], mode=fields)

    assert count_traces(make(), make(), make()) == 1
    arguments = Traced(lambda *values: None)
    for _ in range(2):
        arguments(*(each() for each in INTERCHANGEABLE.values()))
    assert arguments.count == 1


def test_numpy_scalars_of_one_type_are_one_trace():
    assert count_traces(np.int64(1), np.int64(2), np.int64(3)) == 1


# Under and around other transformations: as often as `jax.jit`.

AROUND = {
    "jit": lambda f: jax.jit(f)(jnp.ones(2)),
    "grad": lambda f: jax.grad(lambda x: f(x).sum())(jnp.ones(2)),
    "vmap": lambda f: jax.vmap(f)(jnp.ones((3, 2))),
    "scan": lambda f: jax.lax.scan(lambda c, x: (f(c), x), jnp.ones(2), None, length=3),
    "cond": lambda f: jax.lax.cond(True, f, lambda x: x, jnp.ones(2)),
    "filter_vmap": lambda f: filter_vmap(f)(jnp.ones((3, 2))),
    "filter_grad": lambda f: filter_grad(lambda x: f(x).sum())(jnp.ones(2)),
    "filter_jit": lambda f: filter_jit(lambda x: f(f(x)))(jnp.ones(2)),
}


def test_function_under_another_transformation_is_traced_as_often_as_by_jax():
    def count(jit, transform):
        calls = []
        jitted = jit(lambda x: calls.append(1) or 3.0 * x)
        for _ in range(2):
            transform(jitted)
        return len(calls)

    for name, transform in AROUND.items():
        assert count(filter_jit, transform) <= count(jax.jit, transform), name


# --- calls that differ only in spelling are one trace ---------------------------------------------


def weigh(a, b=2, /, c=3, *, d=4, e=None):
    return a * b * c * d


SPELLINGS = {
    "by-place": lambda f, x: f(x, 2, 3, d=4, e=None),
    "defaults": lambda f, x: f(x),
    "some-defaults": lambda f, x: f(x, 2),
    "by-keyword": lambda f, x: f(x, c=3),
    "keywords-in-another-order": lambda f, x: f(x, e=None, d=4, c=3),
}


def test_calls_that_differ_only_in_spelling_are_one_trace():
    traced = Traced(weigh)
    x = jnp.arange(2.0)
    for spelling in SPELLINGS.values():
        assert jnp.array_equal(spelling(traced, x), 24 * x)
    assert traced.count == 1


def test_spelling_of_variadic_functions_is_one_trace():
    traced = Traced(lambda x, *rest, scale=1, **named: x * scale)
    x = jnp.ones(2)
    for call in (
        lambda: traced(x, 1, 2, a=3, b=4),
        lambda: traced(x, 1, 2, b=4, a=3),
        lambda: traced(x, 1, 2, scale=1, a=3, b=4),
        lambda: traced(x, 1, 2, b=4, scale=1, a=3),
    ):
        call()
    assert traced.count == 1


@pytest.mark.parametrize("kind", ["module", "partial", "transformed"])
def test_spelling_of_a_call_of_what_wraps_a_function_is_one_trace(kind):
    traces, w, x = [], jnp.ones(2), jnp.ones(2)

    def function(w, x, scale=2):
        traces.append(1)
        return (w * x * scale).sum()

    class Model(Module):
        weight: object

        def __call__(self, x, scale=2):
            return function(self.weight, x, scale)

    wrapped = {
        "module": Model(w),
        "partial": functools.partial(function, w),
        "transformed": filter_value_and_grad(functools.partial(function, w)),
    }[kind]
    call = filter_jit(wrapped)
    call(x)
    call(x, scale=2)
    if kind != "transformed":
        call(x=x)
        call(scale=2, x=x)
    else:
        call(x, 2)
    assert len(traces) == 1


def test_default_that_would_be_traced_is_left_to_the_function():
    two = np.int32(2)
    traced = Traced(lambda x, y=two, z=3: x[:y] * z)
    for call in (lambda: traced(jnp.ones(4)), lambda: traced(jnp.ones(4), z=3)):
        assert call().shape == (2,)
    assert traced.count == 1


def test_default_that_is_not_hashable_is_left_to_the_function():
    default = []
    traced = Traced(lambda x, y=default: x if y is default else 2 * x)
    assert traced(jnp.ones(())) == 1


def test_array_in_the_place_of_a_default_is_one_trace_however_it_is_passed():
    default = jnp.ones(2)
    traced = Traced(lambda x, y=default: x + y)
    traced(jnp.ones(2), jnp.zeros(2))
    traced(jnp.ones(2), y=jnp.zeros(2))
    assert traced.count == 1


# --- wrappers of one function share its traces, and so do lowering and calling --------------------


def test_wrappers_share_the_trace_of_a_function_unless_their_options_differ():
    count = []

    def function(x):
        count.append(1)
        return 2 * x

    wrapper = filter_jit(function)
    for same in (
        wrapper,
        filter_jit(function),
        copy.copy(wrapper),
        jtu.tree_map(lambda leaf: leaf, wrapper),
    ):
        same(jnp.ones(2))
    assert len(count) == 1
    filter_jit(function, donate="all")(jnp.ones(2))
    assert len(count) == 2


def test_modules_of_one_class_share_a_trace_of_their_call():
    count = []

    class Model(Module):
        weight: object

        def __call__(self, x):
            count.append(1)
            return self.weight * x

    for index in range(5):
        filter_jit(Model(jnp.full(2, index)))(jnp.ones(2, jnp.int32))
    assert len(count) == 1


def test_lowering_from_shapes_and_checking_mode_take_no_second_trace():
    traced = Traced(lambda module: 2 * module.scale)
    traced.jitted.lower(Affine(jax.ShapeDtypeStruct((2,), jnp.float32)))
    traced(Affine(jnp.ones(2)))
    with checking_partitions():
        traced(Affine(jnp.ones(2)))
    assert traced.count == 1


def test_in_shardings_take_no_second_trace():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    traced = Traced(lambda x: 2 * x, in_shardings=sharding)
    traced(jnp.ones(2))
    traced(jnp.ones(2))
    assert traced.count == 1


# --- outputs that come back as arguments are one trace --------------------------------------------


def test_returned_model_fed_back_is_one_trace_donated_or_not():
    for donate in ("none", "all"):
        traced = Traced(
            lambda model: jtu.tree_map(lambda w: 0.9 * w if is_array(w) else w, model),
            donate=donate,
        )
        model = Affine([jnp.ones(2), {"a": jnp.ones(3)}], "b")
        for _ in range(5):
            model = traced(model)
        assert traced.count == 1


def test_training_step_of_5_turns_is_one_trace():
    optimiser = optax.sgd(1e-3, momentum=0.9)

    @Traced
    def step(model, state, x, y):
        def loss(model):
            return jnp.mean((jax.vmap(model)(x) - y) ** 2)

        value, gradients = filter_value_and_grad(loss)(model)
        updates, state = optimiser.update(gradients, state)
        return apply_updates(model, updates), state, value

    model = nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    state = optimiser.init(filter(model, is_array))
    for index in range(5):
        model, state, _ = step(model, state, jnp.full((3, 2), index / 100), jnp.ones((3, 1)))
    assert step.count == 1
