"""How often a function is traced: counted, for each way of calling it."""

import copy
import dataclasses
import enum
import functools
import inspect
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
    clear_caches,
    field,
    filter,
    filter_grad,
    filter_jit,
    filter_value_and_grad,
    filter_vmap,
    is_array,
    nn,
    tree_at,
)


class Traced:
    """A filtered function, and how often it was traced."""

    def __init__(self, function, **options):
        self.count = 0

        @functools.wraps(function)
        def counting(*args, **kwargs):
            self.count += 1
            return function(*args, **kwargs)

        # Said outright: `functools.wraps` alone tells nothing of how a decorator may be called.
        counting.__signature__ = inspect.signature(function)
        self.jitted = filter_jit(counting, **options)

    def __call__(self, *args, **kwargs):
        return self.jitted(*args, **kwargs)


class Affine(Module):
    scale: object
    shift: object = None
    mode: object = field(static=True, default="plain")

    def __call__(self, x):
        return self.scale * x


class Colour(enum.Enum):
    RED = 1
    GREEN = 2


class Rank(enum.IntEnum):
    FIRST = 1


@dataclasses.dataclass(frozen=True)
class Config:
    size: object


class InheritedConfig(Config):
    pass


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


# Outcomes that come back as arguments.


def test_returned_model_fed_back_100_times_is_one_trace():
    traced = Traced(lambda model: jtu.tree_map(lambda w: 0.9 * w if is_array(w) else w, model))
    model = nn.MLP(2, 2, 4, 2, key=jax.random.key(0))
    for _ in range(100):
        model = traced(model)
    assert traced.count == 1


def test_returned_model_with_a_list_inside_fed_back_100_times_is_one_trace():
    traced = Traced(lambda model: jtu.tree_map(lambda w: 0.9 * w if is_array(w) else w, model))
    model = Affine([jnp.ones(2), {"a": jnp.ones(3)}], "b")
    for _ in range(100):
        model = traced(model)
    assert traced.count == 1


def test_training_step_of_100_turns_is_one_trace():
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
    for index in range(100):
        model, state, _ = step(model, state, jnp.full((3, 2), index / 100), jnp.ones((3, 1)))
    assert step.count == 1


def test_donated_model_fed_back_100_times_is_one_trace():
    traced = Traced(lambda model: jtu.tree_map(lambda w: w + 1, model), donate="all")
    model = Affine(jnp.zeros(2), (jnp.zeros(3),))
    for _ in range(100):
        model = traced(model)
    assert traced.count == 1


def test_model_passed_between_two_functions_is_one_trace_of_each():
    grow = Traced(lambda model: jtu.tree_map(lambda w: w + 1, model))
    shrink = Traced(lambda model: jtu.tree_map(lambda w: w - 1, model))
    model = Affine(jnp.zeros(2), (jnp.zeros(3),))
    for _ in range(10):
        model = shrink(grow(model))
    assert (grow.count, shrink.count) == (1, 1)


def test_optax_state_made_anew_is_one_trace():
    traced = Traced(lambda state: jtu.tree_map(lambda leaf: leaf + 1, state))
    for _ in range(3):
        state = optax.adam(1e-3).init({"a": jnp.ones(2), "b": jnp.ones(3)})
        traced(traced(state))
    assert traced.count == 1


def test_six_statics_in_turn_are_six_traces():
    traced = Traced(lambda x, how: x)
    for _ in range(5):
        for how in "abcdef":
            traced(jnp.ones(2), how)
    assert traced.count == 6


# Spelling.


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
    for spelling in SPELLINGS.values():
        spelling(traced, jnp.ones(2))
    assert traced.count == 1


@pytest.mark.parametrize("name", SPELLINGS)
def test_outcome_is_the_same_whatever_the_spelling(name):
    traced = Traced(weigh)
    x = jnp.arange(2.0)
    assert jnp.array_equal(SPELLINGS[name](traced, x), 24 * x)


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


def test_spelling_of_a_module_is_one_trace():
    count = 0

    class Model(Module):
        weight: object

        def __call__(self, x, scale=2):
            nonlocal count
            count += 1
            return self.weight * x * scale

    call = filter_jit(Model(jnp.ones(2)))
    call(jnp.ones(2))
    call(x=jnp.ones(2))
    call(jnp.ones(2), scale=2)
    call(scale=2, x=jnp.ones(2))
    assert count == 1


def test_spelling_of_a_partial_is_one_trace():
    count = 0

    def function(x, y, scale=2):
        nonlocal count
        count += 1
        return x * y * scale

    x = jnp.ones(2)
    call = filter_jit(functools.partial(function, x))
    call(x)
    call(y=x)
    call(x, scale=2)
    call(scale=2, y=x)
    assert count == 1


@pytest.mark.parametrize("transform", [filter_grad, filter_value_and_grad])
def test_spelling_of_a_transformed_function_is_one_trace(transform):
    count = 0

    @transform
    def loss(x, scale=2):
        nonlocal count
        count += 1
        return (x * scale).sum()

    gradient = filter_jit(loss)
    gradient(jnp.ones(2))
    gradient(jnp.ones(2), 2)
    gradient(jnp.ones(2), scale=2)
    assert count == 1


def test_array_default_left_out_is_one_trace():
    default = jnp.ones(2)
    traced = Traced(lambda x, y=default: x + y)
    traced(jnp.ones(2))
    traced(jnp.ones(2), jnp.zeros(2))
    traced(jnp.ones(2), y=jnp.zeros(2))
    assert traced.count == 1


# Wrappers.


def test_wrapping_a_function_again_is_no_new_trace():
    count = 0

    def function(x):
        nonlocal count
        count += 1
        return 2 * x

    for _ in range(5):
        filter_jit(function)(jnp.ones(2))
    assert count == 1


def test_wrapping_a_function_with_other_options_is_a_new_trace():
    count = 0

    def function(x):
        nonlocal count
        count += 1
        return 2 * x

    filter_jit(function)(jnp.ones(2))
    filter_jit(function, donate="all")(jnp.ones(2))
    assert count == 2


def test_modules_of_one_class_share_a_trace_of_their_call():
    count = 0

    class Model(Module):
        weight: object

        def __call__(self, x):
            nonlocal count
            count += 1
            return self.weight * x

    for index in range(5):
        filter_jit(Model(jnp.full(2, index)))(jnp.ones(2, jnp.int32))
    assert count == 1


def test_methods_of_modules_of_one_class_share_a_trace():
    count = 0

    class Model(Module):
        weight: object

        @filter_jit
        def apply(self, x):
            nonlocal count
            count += 1
            return self.weight * x

    for index in range(5):
        Model(jnp.full(2, index)).apply(jnp.ones(2, jnp.int32))
    assert count == 1


def test_wrapper_that_was_copied_shares_the_trace():
    count = 0

    def function(x):
        nonlocal count
        count += 1
        return 2 * x

    wrapper = filter_jit(function)
    wrapper(jnp.ones(2))
    copy.copy(wrapper)(jnp.ones(2))
    jtu.tree_map(lambda leaf: leaf, wrapper)(jnp.ones(2))
    assert count == 1


def test_clear_caches_is_one_trace_more():
    traced = Traced(lambda x: 2 * x)
    traced(jnp.ones(2))
    clear_caches()
    traced(jnp.ones(2))
    traced(jnp.ones(2))
    assert traced.count == 2


def test_lowering_compiling_and_calling_is_one_trace():
    traced = Traced(lambda x: 2 * x)
    traced.jitted.lower(jnp.ones(2)).compile()
    traced(jnp.ones(2))
    traced(jnp.ones(2))
    assert traced.count == 1


def test_lowering_from_shapes_and_calling_is_one_trace():
    traced = Traced(lambda module: 2 * module.scale)
    traced.jitted.lower(Affine(jax.ShapeDtypeStruct((2,), jnp.float32)))
    traced(Affine(jnp.ones(2)))
    assert traced.count == 1


def test_out_shardings_take_no_second_trace():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    traced = Traced(lambda x: 2 * x, out_shardings=sharding)
    traced(jnp.ones(2))
    traced(jnp.ones(2))
    assert traced.count == 1


def test_in_shardings_take_no_second_trace():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    traced = Traced(lambda x: 2 * x, in_shardings=sharding)
    traced(jnp.ones(2))
    traced(jnp.ones(2))
    assert traced.count == 1


def test_checking_mode_takes_no_second_trace():
    traced = Traced(lambda module: module.scale)
    traced(Affine(jnp.ones(2)))
    with checking_partitions():
        traced(Affine(jnp.ones(2)))
    traced(Affine(jnp.ones(2)))
    assert traced.count == 1


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
