"""What `filter_jit` offers: everything callable, in every place, with JAX's own stages."""

import copy
import dataclasses
import functools
import inspect
import pickle
import sys
import warnings

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

from eqxlike import (
    Module,
    checking_partitions,
    clear_caches,
    field,
    filter_eval_shape,
    filter_grad,
    filter_jit,
    filter_value_and_grad,
    filter_vmap,
    is_array,
)


class Affine(Module):
    scale: object
    shift: object = 0.0
    mode: object = field(static=True, default="plain")

    def __call__(self, x):
        return self.scale * x + self.shift

    def apply(self, x, factor=1.0):
        return factor * self(x)

    @filter_jit
    def jitted(self, x):
        return self(x)

    @filter_jit(donate="none")
    def jitted_with_options(self, x):
        return self(x)

    @classmethod
    @filter_jit
    def of_class(cls, x):
        return cls(x)

    @staticmethod
    @filter_jit
    def static(x):
        return 2 * x

    @property
    @filter_jit
    def doubled(self):
        return 2 * self.scale


def double(x, /, how="double"):
    """Twice the argument."""
    return 2 * x


X = np.arange(3.0, dtype=np.float32)


def equal(first, second):
    return bool(jnp.array_equal(first, second))


# Decorating.


def test_decorator_without_arguments():
    @filter_jit
    def function(x):
        return x + 1

    assert equal(function(X), X + 1)


def test_decorator_with_arguments():
    @filter_jit(donate="none", keep_unused=True)
    def function(x, y):
        return x + 1

    assert equal(function(X, X), X + 1)


def test_decorator_with_no_arguments_in_brackets():
    @filter_jit()
    def function(x):
        return x + 1

    assert equal(function(X), X + 1)


@pytest.mark.parametrize("name", ["jitted", "jitted_with_options"])
def test_method_of_a_module(name):
    assert equal(getattr(Affine(jnp.ones(3)), name)(X), X)


def test_method_of_a_module_called_on_the_class():
    assert equal(Affine.jitted(Affine(jnp.ones(3)), X), X)


def test_method_of_a_module_traces_the_arrays_of_self():
    tracers = []

    class Model(Module):
        weight: object

        @filter_jit
        def apply(self):
            tracers.append(self.weight)
            return self.weight

    Model(jnp.ones(2)).apply()
    assert isinstance(tracers[0], jax.core.Tracer)


def test_method_of_a_plain_class():
    class Counter:
        def __init__(self, start):
            self.start = start

        @filter_jit
        def add(self, x):
            return x + self.start

    assert equal(Counter(1.0).add(X), X + 1)
    assert equal(Counter(2.0).add(X), X + 2)


def test_class_method():
    assert equal(Affine.of_class(X).scale, X)


def test_static_method():
    assert equal(Affine.static(X), 2 * X)
    assert equal(Affine(1.0).static(X), 2 * X)


def test_property():
    assert equal(Affine(jnp.ones(2)).doubled, 2 * jnp.ones(2))


def test_inherited_method():
    class Child(Affine):
        def __call__(self, x):
            return x + 5

    assert equal(Child(1.0).jitted(X), X + 5)


def test_method_that_calls_super():
    class Child(Affine):
        @filter_jit
        def jitted(self, x):
            return super().jitted(x) + 1

    assert equal(Child(jnp.ones(3)).jitted(X), X + 1)


def test_function_in_a_field():
    class Holds(Module):
        function: object

    assert equal(Holds(filter_jit(lambda x: x + 1)).function(X), X + 1)


def test_jitted_default_of_a_field():
    class Holds(Module):
        function: object = filter_jit(lambda x: x + 1)

    assert equal(Holds().function(X), X + 1)


# Wrapping what is callable.


class PlainCallable:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return self.factor * x

    def apply(self, x):
        return self.factor * x


class SlottedCallable:
    __slots__ = ()

    def __call__(self, x):
        return 2 * x


def with_key(function):
    """A decorator that changes the signature, as `functools.wraps` cannot tell."""

    @functools.wraps(function)
    def inner(x):
        return function(x, 2.0)

    return inner


def with_default(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        kwargs.setdefault("scale", 3.0)
        return function(*args, **kwargs)

    return inner


def scaled(x, scale=1.0):
    return x * scale


@jax.custom_jvp
def custom(x):
    return 2 * x


custom.defjvp(lambda primals, tangents: (custom(*primals), 3 * tangents[0]))

CALLABLES = {
    "function": double,
    "lambda": lambda x: 2 * x,
    "closure": (lambda y: lambda x: y * x)(jnp.array(2.0)),
    "module": Affine(jnp.array(2.0)),
    "module-method": Affine(jnp.array(2.0)).apply,
    "module-class": Affine,
    "plain-callable": PlainCallable(2.0),
    "plain-callable-with-array": PlainCallable(jnp.array(2.0)),
    "plain-method": PlainCallable(2.0).apply,
    "slotted-callable": SlottedCallable(),
    "partial": functools.partial(scaled, scale=2.0),
    "partial-with-array": functools.partial(scaled, scale=jnp.array(2.0)),
    "partial-by-place": functools.partial(jnp.multiply, jnp.array(2.0)),
    "partial-of-partial": functools.partial(functools.partial(scaled), scale=2.0),
    "partial-of-module": functools.partial(Affine(jnp.array(2.0)).apply, factor=2.0),
    "jax-partial": jtu.Partial(scaled, scale=jnp.array(2.0)),
    "jax-function": jnp.sin,
    "jax-ufunc": jnp.negative,
    "numpy-vectorize": jnp.vectorize(lambda x: 2 * x),
    "jit": jax.jit(double),
    "grad": jax.grad(lambda x: (x**2).sum()),
    "value_and_grad": jax.value_and_grad(lambda x: (x**2).sum()),
    "vmap": jax.vmap(lambda x: 2 * x),
    "checkpoint": jax.checkpoint(lambda x: 2 * x),
    "jacfwd": jax.jacfwd(lambda x: x**2),
    "custom_jvp": custom,
    "filter_jit": filter_jit(double),
    "filter_grad": filter_grad(lambda x: (x**2).sum()),
    "filter_value_and_grad": filter_value_and_grad(lambda x: (x**2).sum()),
    "filter_vmap": filter_vmap(lambda x: 2 * x),
    "wraps": functools.wraps(double)(lambda *args, **kwargs: double(*args, **kwargs)),
    "wraps-that-changes-the-signature": with_key(scaled),
    "wraps-that-adds-a-default": with_default(scaled),
    "module-of-jitted": Affine(jnp.array(2.0)).jitted,
}


def outcomes_equal(first, second):
    same = jtu.tree_map(equal, first, second)
    return all(jtu.tree_leaves(same))


@pytest.mark.parametrize("name", CALLABLES)
def test_gives_what_the_plain_callable_gives(name):
    function = CALLABLES[name]
    jitted = filter_jit(function)
    for _ in range(3):  # The first call, and warm ones.
        assert outcomes_equal(jitted(jnp.asarray(X)), function(jnp.asarray(X)))


@pytest.mark.parametrize("name", CALLABLES)
def test_gives_what_the_plain_callable_gives_in_checking_mode(name):
    function = CALLABLES[name]
    with checking_partitions():
        assert outcomes_equal(filter_jit(function)(jnp.asarray(X)), function(jnp.asarray(X)))


def test_builtin_function_of_python():
    assert equal(filter_jit(max)(1, 2), 2)


def test_built_in_method_of_a_dict():
    assert equal(filter_jit({"a": X}.get)("a"), X)


def test_array_bound_by_partial_is_no_constant():
    jitted = filter_jit(functools.partial(scaled, scale=jnp.array(2.0)))
    assert "2.0" not in jitted.lower(X).as_text()


def test_array_of_a_module_is_no_constant():
    assert "7.0" not in filter_jit(Affine(jnp.array(7.0))).lower(X).as_text()


def test_array_of_the_instance_of_a_method_is_no_constant():
    assert "7.0" not in filter_jit(Affine(jnp.array(7.0)).apply).lower(X).as_text()


def test_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="3 is not a callable object"):
        filter_jit(3)


def test_two_callables_that_are_equal_are_told_apart():
    @dataclasses.dataclass(frozen=True)
    class Constant:
        value: object

        def __call__(self):
            return jnp.asarray(self.value)

    integer, floating = filter_jit(Constant(2)), filter_jit(Constant(2.0))
    assert integer().dtype == jnp.int32
    assert floating().dtype == jnp.float32


def test_callable_outlives_an_equal_one():
    jitted = filter_jit(functools.partial(PlainCallable(2.0)))
    assert equal(jitted(X), 2 * X)
    first, second = PlainCallable(2.0), PlainCallable(2.0)
    jitted_first, jitted_second = filter_jit(first), filter_jit(second)
    jitted_first(X)
    del first, jitted_first
    assert equal(jitted_second(X[:2]), 2 * X[:2])


# What is returned.

OUTCOMES = {
    "array": lambda x: x + 1,
    "nothing": lambda x: None,
    "static": lambda x: "text",
    "tuple": lambda x: (x, "text", None),
    "empty-tuple": lambda x: (),
    "list": lambda x: [x, [x + 1]],
    "dict": lambda x: {"a": x, "b": 1.5},
    "module": lambda x: Affine(x, "b"),
    "class": lambda x: Affine,
    "function": lambda x: (double, x),
    "number": lambda x: 3,
    "numpy": lambda x: np.ones(2, np.float32),
    "method": lambda x: Affine(x).apply,
}


def is_same(first, second):
    return equal(first, second) if is_array(first) else first is second


@pytest.mark.parametrize("name", OUTCOMES)
def test_outcome_is_that_of_the_plain_function(name):
    function = OUTCOMES[name]
    expected = function(jnp.asarray(X))
    jitted = filter_jit(function)
    for _ in range(3):
        outcome = jitted(jnp.asarray(X))
        assert jtu.tree_structure(outcome) == jtu.tree_structure(expected)
        assert all(map(is_same, jtu.tree_leaves(outcome), jtu.tree_leaves(expected)))


def test_static_outcome_that_is_not_hashable_comes_back():
    assert filter_jit(lambda x: (x, {1, 2}))(X)[1] == {1, 2}


def test_static_outcome_may_depend_on_the_shape():
    jitted = filter_jit(lambda x: (x, f"{x.shape}", [x] * x.shape[0]))
    for size in (1, 2, 3, 1, 2, 3):
        _, text, copies = jitted(jnp.ones(size))
        assert (text, len(copies)) == (f"({size},)", size)


def functions_called(function):
    """The names of the functions, in Python and in C, that `function` calls."""
    names = []

    def note(frame, event, called):
        if event in ("call", "c_call"):
            names.append(frame.f_code.co_name if event == "call" else called.__name__)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return names


def test_call_does_not_wait_for_its_result():
    jitted = filter_jit(lambda x: Affine(x + 1))
    names = [name for _ in range(3) for name in functions_called(lambda: jitted(X))]
    assert names
    assert not [name for name in names if "block_until_ready" in name or name == "__array__"]


# Under and around other transformations.

AROUND = {
    "jit": lambda f: jax.jit(f)(X),
    "grad": lambda f: jax.grad(lambda x: f(x).sum())(X),
    "grad-of-grad": lambda f: jax.grad(lambda x: jax.grad(lambda x: f(x).sum())(x).sum())(X),
    "jvp": lambda f: jax.jvp(f, (X,), (X,)),
    "vjp": lambda f: jax.vjp(f, X)[1](X),
    "linearize": lambda f: jax.linearize(f, X)[1](X),
    "hessian": lambda f: jax.hessian(lambda x: f(x).sum())(X),
    "jacfwd": lambda f: jax.jacfwd(f)(X),
    "vmap": lambda f: jax.vmap(f)(np.stack([X, X])),
    "vmap-of-vmap": lambda f: jax.vmap(jax.vmap(f))(np.stack([X, X])[None]),
    "vmap-of-grad": lambda f: jax.vmap(jax.grad(f))(X),
    "grad-of-vmap": lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum())(X),
    "scan": lambda f: jax.lax.scan(lambda c, x: (f(c), f(x)), jnp.float32(1), X),
    "map": lambda f: jax.lax.map(f, X),
    "while": lambda f: jax.lax.while_loop(lambda x: x < 9, f, jnp.float32(1.5)),
    "cond": lambda f: jax.lax.cond(True, f, lambda x: x, X),
    "checkpoint": lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).sum())(X),
    "eval_shape": lambda f: jax.eval_shape(f, X).shape,
    "make_jaxpr": lambda f: jax.make_jaxpr(f)(X).out_avals[0].shape,
    "disable_jit": lambda f: with_context(jax.disable_jit(), f),
    "debug_nans": lambda f: with_context(jax.debug_nans(True), f),
    "checking_leaks": lambda f: with_context(jax.checking_leaks(), f),
    "filter_grad": lambda f: filter_grad(lambda x: f(x).sum())(jnp.asarray(X)),
    "filter_vmap": lambda f: filter_vmap(f)(np.stack([X, X])),
    "filter_jit": lambda f: filter_jit(lambda x: f(f(x)))(X),
    "filter_eval_shape": lambda f: filter_eval_shape(f, X).shape,
}


def with_context(context, f):
    with context:
        return f(X)


@pytest.mark.parametrize("name", AROUND)
def test_under_another_transformation_it_gives_what_the_plain_function_gives(name):
    def plain(x):
        return x * x + jnp.sin(x)

    jitted = filter_jit(plain)
    expected = jtu.tree_map(np.asarray, jtu.tree_leaves(AROUND[name](plain)))
    for _ in range(2):
        outcome = jtu.tree_map(np.asarray, jtu.tree_leaves(AROUND[name](jitted)))
        jtu.tree_map(functools.partial(np.testing.assert_allclose, rtol=1e-5), outcome, expected)


@pytest.mark.parametrize("name", ["jit", "vmap", "grad", "scan", "cond"])
def test_static_outcome_passes_through_another_transformation(name):
    jitted = filter_jit(lambda x: (x * x, "text"))
    seen = []

    def function(x):
        square, text = jitted(x)
        seen.append(text)
        return square

    AROUND[name](function)
    assert set(seen) == {"text"}


@pytest.mark.parametrize("name", ["jit", "vmap", "grad", "scan", "cond", "vmap-of-grad"])
def test_module_made_inside_passes_through_another_transformation(name):
    jitted = filter_jit(lambda model, x: Affine(model(x), model.shift))
    plain = lambda x: 2 * x + 1

    def function(x):
        return jitted(Affine(jnp.float32(2) + 0 * x, 1.0), x).scale

    outcome = jtu.tree_map(np.asarray, jtu.tree_leaves(AROUND[name](function)))
    expected = jtu.tree_map(np.asarray, jtu.tree_leaves(AROUND[name](plain)))
    jtu.tree_map(functools.partial(np.testing.assert_allclose, rtol=1e-5), outcome, expected)


def test_value_dependent_function_runs_where_jit_is_disabled():
    jitted = filter_jit(lambda x: x if x > 0 else -x)
    with jax.disable_jit():
        assert equal(jitted(jnp.array(-2.0)), 2.0)


def test_nan_is_found_where_jax_looks_for_it():
    jitted = filter_jit(jnp.log)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        jitted(jnp.array(-1.0))


def test_filter_vmap_leaks_no_tracer():
    with jax.checking_leaks():
        assert equal(filter_jit(filter_vmap(lambda x: 2 * x))(X), 2 * X)


def test_filter_grad_leaks_no_tracer():
    with jax.checking_leaks():
        assert equal(filter_jit(filter_grad(lambda x: (2 * x).sum()))(jnp.asarray(X)), 2 + 0 * X)


def test_recursive_function_is_right():
    @filter_jit
    def power(x, n):
        return x if n == 1 else x * power(x, n - 1)

    assert equal(power(X, 4), X**4)


def test_x64_switched_on_and_off_is_seen():
    jitted = filter_jit(lambda x: x * 2)
    dtypes = []
    for _ in range(2):
        with jax.enable_x64(True):
            dtypes.append(jitted(np.ones(2)).dtype)
        dtypes.append(jitted(np.ones(2)).dtype)
    assert dtypes == [jnp.float64, jnp.float32] * 2


# The wrapper is a pytree.


def test_wrapper_of_a_module_has_its_arrays_as_leaves():
    model = Affine(jnp.ones(2), jnp.zeros(2))
    leaves = jtu.tree_leaves(filter_jit(model))
    assert [*map(id, leaves)] == [id(model.scale), id(model.shift)]


def test_wrapper_of_a_method_has_the_arrays_of_its_instance_as_leaves():
    model = Affine(jnp.ones(2), jnp.zeros(2))
    leaves = [leaf for leaf in jtu.tree_leaves(filter_jit(model.apply)) if is_array(leaf)]
    assert [*map(id, leaves)] == [id(model.scale), id(model.shift)]


def test_wrapper_of_a_partial_has_the_arrays_bound_to_it_as_leaves():
    x, y = jnp.ones(2), jnp.zeros(2)
    wrapper = filter_jit(functools.partial(scaled, x, scale=y))
    assert {id(leaf) for leaf in jtu.tree_leaves(wrapper) if is_array(leaf)} == {id(x), id(y)}


def test_wrapper_with_other_leaves_computes_with_them():
    wrapper = filter_jit(Affine(jnp.ones(3), 0.0))
    wrapper(X)
    doubled = jtu.tree_map(lambda leaf: 2 * leaf if is_array(leaf) else leaf, wrapper)
    assert equal(doubled(X), 2 * X)
    assert equal(wrapper(X), X)


def test_wrapper_passes_through_jax_jit():
    wrapper = filter_jit(Affine(jnp.ones(3), jnp.zeros(3)))
    assert equal(jax.jit(lambda wrapper, x: wrapper(x))(wrapper, X), X)


def test_wrapper_passes_through_filter_jit():
    wrapper = filter_jit(Affine(jnp.ones(3)))
    assert equal(filter_jit(lambda wrapper, x: wrapper(x))(wrapper, X), X)


def test_wrapper_is_returned_from_filter_jit():
    wrapper = filter_jit(lambda x: filter_jit(Affine(x)))(X)
    assert equal(wrapper(X), X * X)


def test_gradient_in_a_wrapper_is_that_in_its_module():
    wrapper = filter_jit(Affine(jnp.ones(3), jnp.zeros(3)))
    gradient = filter_grad(lambda wrapper: wrapper(X).sum())(wrapper)
    assert equal(jtu.tree_leaves(gradient)[0], X)


@pytest.mark.parametrize(
    "clone", [copy.copy, copy.deepcopy, lambda wrapper: pickle.loads(pickle.dumps(wrapper))]
)
def test_wrapper_is_cloned(clone):
    wrapper = filter_jit(double)
    wrapper(X)
    assert equal(clone(wrapper)(X), 2 * X)


def test_wrappers_of_one_function_are_equal():
    assert filter_jit(double) == filter_jit(double)


# Metadata.


def test_wrapped_is_the_function():
    assert filter_jit(double).__wrapped__ is double


def test_name_is_that_of_the_function():
    assert filter_jit(double).__name__ == "double"


def test_doc_is_that_of_the_function():
    assert filter_jit(double).__doc__ == "Twice the argument."


def test_signature_is_that_of_the_function():
    assert inspect.signature(filter_jit(double)) == inspect.signature(double)


def test_signature_of_a_wrapped_module_is_that_of_its_call():
    assert str(inspect.signature(filter_jit(Affine(1.0)))) == "(x)"


def test_signature_of_a_jitted_method_has_no_self():
    assert str(inspect.signature(Affine(1.0).jitted)) == "(x)"


def test_signature_of_a_wrapped_partial_lacks_what_is_bound():
    assert list(inspect.signature(filter_jit(functools.partial(scaled, 1.0))).parameters) == [
        "scale"
    ]


def test_name_of_a_jitted_method_is_that_of_the_function():
    assert Affine(1.0).jitted.__name__ == "jitted"


def test_name_stands_in_what_is_lowered():
    assert "jit_double" in filter_jit(double).lower(X).as_text()


def test_wrapper_refuses_arguments_that_the_function_does_not_take():
    with pytest.raises(TypeError, match=r"double\(\)"):
        filter_jit(double)(X, unknown=1)


def test_wrapper_refuses_too_few_arguments():
    with pytest.raises(TypeError, match=r"double\(\).*x"):
        filter_jit(double)()


# Stages.


def test_lowered_is_compiled_and_called():
    compiled = filter_jit(double).lower(X).compile()
    assert equal(compiled(X), 2 * X)


def test_lowered_is_not_called():
    runs = []

    def function(x):
        jax.debug.callback(lambda: runs.append(1))
        return x

    filter_jit(function).lower(X)
    jax.effects_barrier()
    assert runs == []


def test_compiled_takes_the_same_arguments_in_another_spelling():
    def function(x, y=2, *, z=3):
        return x * y * z

    compiled = filter_jit(function).lower(X, 2).compile()
    assert equal(compiled(x=X, z=3), 6 * X)


def test_compiled_module_takes_the_arguments_of_its_call():
    compiled = filter_jit(Affine(jnp.ones(3))).lower(X).compile()
    assert equal(compiled(X), X)


def test_compiled_method_takes_the_arguments_of_its_call():
    compiled = Affine(jnp.ones(3)).jitted.__func__.lower(Affine(jnp.ones(3)), X).compile()
    assert equal(compiled(Affine(2 * jnp.ones(3)), X), 2 * X)


def test_compiled_returns_the_same_tree():
    compiled = filter_jit(lambda x: Affine(x, "b")).lower(X).compile()
    assert compiled(X).shift == "b"


def test_compiled_with_another_static_is_an_error():
    compiled = filter_jit(double).lower(X, "a").compile()
    with pytest.raises(TypeError, match="compiled for"):
        compiled(X, "b")


def test_compiled_with_another_shape_is_an_error():
    compiled = filter_jit(double).lower(X).compile()
    with pytest.raises(TypeError, match="compiled"):
        compiled(X[:2])


def test_compiled_outlives_clear_caches():
    compiled = filter_jit(double).lower(X).compile()
    clear_caches()
    assert equal(compiled(X), 2 * X)


def test_compiled_outlives_the_function():
    compiled = filter_jit(lambda x: 2 * x).lower(X).compile()
    assert equal(compiled(X), 2 * X)


def test_compiled_runs_after_the_function_failed_for_other_arguments():
    def function(x):
        if x.shape == (2,):
            raise ValueError("boom")
        return 2 * x

    jitted = filter_jit(function)
    compiled = jitted.lower(X).compile()
    with pytest.raises(ValueError, match="boom"):
        jitted(X[:2])
    assert equal(compiled(X), 2 * X)


def test_lowered_from_shapes_is_compiled_and_called():
    lowered = filter_jit(double).lower(jax.ShapeDtypeStruct((3,), jnp.float32))
    assert equal(lowered.compile()(X), 2 * X)


def test_lowered_from_the_shape_of_a_module_is_compiled_and_called():
    shape = filter_eval_shape(lambda: Affine(jnp.ones(3)))
    compiled = filter_jit(lambda model, x: model(x)).lower(shape, X).compile()
    assert equal(compiled(Affine(jnp.ones(3)), X), X)


def test_lowered_from_a_shape_that_was_a_static_argument_before():
    shape = Affine(jax.ShapeDtypeStruct((3,), jnp.float32))
    assert filter_jit(lambda shape: shape.scale.shape)(shape) == (3,)
    lowered = filter_jit(lambda model: 2 * model.scale).lower(shape)
    assert equal(lowered.compile()(Affine(X)), 2 * X)


def test_shape_is_a_static_argument_of_a_call():
    shape = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    assert filter_jit(lambda shape: jnp.zeros(shape.shape))(shape).shape == (2, 3)


def test_text_of_lowered_is_that_of_jax():
    def function(x):
        return jnp.sin(x) + 1

    text = filter_jit(function).lower(jnp.asarray(X)).as_text()
    assert "stablehlo.sine" in text


def test_cost_of_lowered_is_that_of_jax():
    function = lambda x: x @ x
    x = jnp.ones((4, 4))
    ours, jax_own = filter_jit(function).lower(x), jax.jit(function).lower(x)
    assert ours.cost_analysis() == jax_own.cost_analysis()


def test_cost_of_compiled_is_that_of_jax():
    function = lambda x: x @ x
    x = jnp.ones((4, 4))
    ours, jax_own = (jit(function).lower(x).compile() for jit in (filter_jit, jax.jit))
    assert ours.cost_analysis()["flops"] == jax_own.cost_analysis()["flops"]


def test_memory_of_compiled_is_that_of_jax():
    function = lambda x: x @ x
    x = jnp.ones((4, 4))
    ours, jax_own = (jit(function).lower(x).compile() for jit in (filter_jit, jax.jit))
    sizes = [it.memory_analysis().argument_size_in_bytes for it in (ours, jax_own)]
    assert sizes[0] == sizes[1] == 64


def test_text_of_compiled_is_hlo():
    assert "HloModule" in filter_jit(double).lower(X).compile().as_text()


def test_compiler_options_reach_the_compiler():
    with pytest.raises(Exception, match="no_such_option"):
        filter_jit(double).lower(X).compile({"no_such_option": 1})


# Keyword arguments of `jax.jit`.


@pytest.mark.parametrize(
    "name",
    ["static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "abstracted_axes"],
)
def test_keyword_that_makes_no_sense_is_refused_by_name(name):
    with pytest.raises(ValueError, match=name):
        filter_jit(double, **{name: 0})


@pytest.mark.parametrize(
    "name",
    ["static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "abstracted_axes"],
)
def test_keyword_that_makes_no_sense_is_refused_whatever_its_value(name):
    with pytest.raises(ValueError, match=name):
        filter_jit(double, **{name: None})


def test_keyword_unknown_to_jax_is_an_error_at_decoration():
    with pytest.raises(TypeError, match="no_such_keyword"):
        filter_jit(double, no_such_keyword=1)


def test_keep_unused_reaches_jax():
    function = lambda x, y: x
    num_inputs = [
        filter_jit(function, keep_unused=keep).lower(X, X).as_text().count("%arg")
        for keep in (False, True)
    ]
    assert num_inputs[0] < num_inputs[1]


def test_inline_reaches_jax():
    def parameters(jit, inline):
        # JAX either writes what is inlined into the outer function, or says so in a parameter.
        jaxpr = jax.make_jaxpr(jit(lambda x: x + 1, inline=inline))(X)
        return [(each.primitive.name, each.params.get("inline")) for each in jaxpr.eqns]

    assert parameters(filter_jit, True) == parameters(jax.jit, True)
    assert parameters(filter_jit, True) != parameters(filter_jit, False)


def test_compiler_options_may_be_a_dict():
    jitted = filter_jit(double, compiler_options={"xla_cpu_enable_fast_math": True})
    assert equal(jitted(X), 2 * X)


# Donation.


def donated(jit, donate, call):
    """Which of the arrays in a call are gone afterwards."""
    model = Affine(jnp.ones(3), jnp.ones(3))
    x, y = jnp.ones(3), jnp.ones(3)

    def function(model, x, y):
        return model.scale + 1, model.shift + 1, x + 1, y + 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call(jit(function, donate=donate), model, x, y)
    return [array.is_deleted() for array in (model.scale, model.shift, x, y)]


BY_PLACE = lambda f, model, x, y: f(model, x, y)
BY_NAME = lambda f, model, x, y: f(y=y, x=x, model=model)
MIXED = lambda f, model, x, y: f(model, y=y, x=x)

WORDS = ["all", "all-except-first", "warn", "warn-except-first", "none"]


@pytest.mark.parametrize("word", WORDS)
def test_word_donates_what_it_donates_in_equinox(word):
    assert donated(filter_jit, word, BY_PLACE) == donated(equinox.filter_jit, word, BY_PLACE)


@pytest.mark.parametrize("word", WORDS)
def test_word_donates_the_arrays_of_a_wrapped_module_as_in_equinox(word):
    class Theirs(equinox.Module):
        weight: object

        def __call__(self, x, y):
            return self.weight + 1, x + 1, y + 1

    class Ours(Module):
        weight: object

        def __call__(self, x, y):
            return self.weight + 1, x + 1, y + 1

    def gone(kind, jit):
        weight, x, y = jnp.ones(3), jnp.ones(3), jnp.ones(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            jit(kind(weight), donate=word)(x, y)
        return [array.is_deleted() for array in (weight, x, y)]

    assert gone(Ours, filter_jit) == gone(Theirs, equinox.filter_jit)


@pytest.mark.parametrize("call", [BY_PLACE, BY_NAME, MIXED])
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("model",), [True, True, False, False]),
        (("x",), [False, False, True, False]),
        (("model", "y"), [True, True, False, True]),
        (("y", "x"), [False, False, True, True]),
        ((), [False, False, False, False]),
        ("x", [False, False, True, False]),
        (["x"], [False, False, True, False]),
    ],
)
def test_names_donate_their_arguments_however_the_call_is_spelled(names, expected, call):
    assert donated(filter_jit, names, call) == expected


def test_name_of_a_keyword_only_argument_donates_it():
    x, y = jnp.ones(3), jnp.ones(3)
    filter_jit(lambda x, *, y: (x + 1, y + 1), donate="y")(x, y=y)
    assert [x.is_deleted(), y.is_deleted()] == [False, True]


def test_name_of_an_argument_of_a_method_donates_it():
    class Trainer(Module):
        rate: object

        @filter_jit(donate="state")
        def step(self, state):
            return self.rate * state

    trainer, state = Trainer(jnp.ones(3)), jnp.ones(3)
    trainer.step(state)
    assert [trainer.rate.is_deleted(), state.is_deleted()] == [False, True]


def test_name_of_self_donates_the_instance():
    class Counter(Module):
        count: object

        @filter_jit(donate="self")
        def step(self):
            return Counter(self.count + 1)

    counter = Counter(jnp.ones(3))
    counter.step()
    assert counter.count.is_deleted()


def test_name_of_an_argument_of_a_wrapped_module_donates_it():
    model, x = Affine(jnp.ones(3)), jnp.ones(3)
    filter_jit(model, donate="x")(x)
    assert [model.scale.is_deleted(), x.is_deleted()] == [False, True]


def test_name_of_an_argument_of_a_function_with_variadic_ones_donates_it():
    state, x = jnp.ones(3), jnp.ones(3)
    filter_jit(lambda state, *rest: (state + 1, *rest), donate="state")(state, x)
    assert [state.is_deleted(), x.is_deleted()] == [True, False]


@pytest.mark.parametrize(
    ("transform", "reduce"), [(filter_value_and_grad, jnp.sum), (filter_jit, jnp.negative)]
)
def test_name_of_an_argument_of_a_transformed_function_donates_it(transform, reduce):
    def loss(model, x):
        return reduce(model * x)

    model, x = jnp.ones(3), jnp.ones(3)
    filter_jit(transform(loss), donate="x")(model, x)
    assert [model.is_deleted(), x.is_deleted()] == [False, True]


@pytest.mark.parametrize("donate", ["unknown", ("x", "unknown"), "al", "ALL", ("all",), ("none",)])
def test_unknown_name_or_word_is_an_error_at_decoration(donate):
    with pytest.raises(ValueError, match="donate"):
        filter_jit(scaled, donate=donate)


def test_error_for_an_unknown_name_lists_the_names_there_are():
    with pytest.raises(ValueError, match=r"'unknown'.*'x', 'scale'"):
        filter_jit(scaled, donate="unknown")


def test_unknown_name_is_an_error_of_the_decorator_with_arguments():
    with pytest.raises(ValueError, match="'unknown'"):
        filter_jit(donate=("unknown",))(scaled)


@pytest.mark.parametrize("word", ["warn", "warn-except-first"])
def test_buffer_that_was_not_usable_is_warned_of(word):
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        filter_jit(lambda x, y: y.sum(), donate=word)(1, jnp.ones(3))


@pytest.mark.parametrize("word", ["all", "all-except-first"])
def test_buffer_that_was_not_usable_is_passed_over_in_silence(word):
    assert filter_jit(lambda x, y: y.sum(), donate=word)(1, jnp.ones(3)) == 3


@pytest.mark.parametrize("stage", ["call", "warm-call", "lower", "compile", "failure", "new-shape"])
def test_filters_of_warnings_are_as_before(stage):
    def function(x):
        if x.shape == (4,):
            raise ValueError("boom")
        return x.sum()

    jitted = filter_jit(function, donate="all")
    if stage in ("warm-call", "new-shape"):
        jitted(jnp.ones(3))
    before = list(warnings.filters)
    match stage:
        case "call" | "warm-call":
            jitted(jnp.ones(3))
        case "new-shape":
            jitted(jnp.ones(5))
        case "lower":
            jitted.lower(jnp.ones(3))
        case "compile":
            jitted.lower(jnp.ones(3)).compile()
        case "failure":
            with pytest.raises(ValueError, match="boom"):
                jitted(jnp.ones(4))
    assert list(warnings.filters) == before


# Shardings.


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


def test_one_out_sharding_is_for_all_of_the_outcome():
    jitted = filter_jit(lambda x: {"a": x, "b": (x + 1, "text")}, out_shardings=split())
    outcome = jitted(jnp.ones(4))
    assert is_split(outcome["a"])
    assert is_split(outcome["b"][0])
    assert outcome["b"][1] == "text"


def test_out_shardings_are_given_for_each_part_of_the_outcome():
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


def test_out_sharding_holds_for_an_outcome_whose_length_depends_on_the_shape():
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
