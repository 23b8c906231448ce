"""`filter_jit` of every kind of callable: outputs, metadata and options."""

import functools
import inspect
import pickle
import types

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

from eqxlike import checking_partitions, filter_grad, filter_jit, filter_vmap, is_array
from tests.transforms.jit.models import Affine, X, double, equal, scaled


class PlainCallable:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return self.factor * x


class SlottedCallable:
    __slots__ = ()

    def __call__(self, x):
        return 2 * x


def test_methods_of_a_module():
    class Model(Affine):
        function: object = filter_jit(lambda x: x + 1)

        @classmethod
        @filter_jit
        def of_class(cls, x):
            return cls(x)

        @staticmethod
        @filter_jit()
        def static(x):
            return 2 * x

        @property
        @filter_jit
        def doubled(self):
            return 2 * self.scale

        @filter_jit
        def jitted(self, x):
            return super().jitted(x) + 1

    model = Model(jnp.ones(3))
    assert equal(model.jitted(X), X + 1)
    assert equal(Model.jitted(model, x=X), X + 1)
    assert type(Model.of_class(X)) is Model
    assert equal(model.static(X), 2 * X)
    assert equal(model.doubled, 2 * jnp.ones(3))
    assert equal(model.function(X), X + 1)


def with_offset(function):
    """A decorator that changes the signature, although it uses `functools.wraps`."""

    @functools.wraps(function)
    def inner(x, offset):
        return function(x) + offset

    return inner


def test_decorator_is_called_by_its_own_signature():
    assert equal(filter_jit(with_offset(double))(X, X), 3 * X)
    with pytest.raises(TypeError, match="too many positional arguments"):
        equinox.filter_jit(with_offset(lambda x: 2 * x))(X, X)


def with_default(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        kwargs.setdefault("scale", 3.0)
        return function(*args, **kwargs)

    return inner


@jax.custom_jvp
def custom(x):
    return 2 * x


custom.defjvp(lambda primals, tangents: (custom(*primals), 3 * tangents[0]))

CALLABLES = {
    "function": double,
    "closure": (lambda y: lambda x: y * x)(jnp.array(2.0)),
    "module": Affine(jnp.array(2.0)),
    "module-class": Affine,
    "plain-callable": PlainCallable(2.0),
    "slotted-callable": SlottedCallable(),
    "partial": functools.partial(scaled, scale=2.0),
    "partial-with-array": functools.partial(scaled, scale=jnp.array(2.0)),
    "partial-of-partial": functools.partial(functools.partial(scaled), scale=2.0),
    "jax-partial": jtu.Partial(scaled, scale=jnp.array(2.0)),
    "jax-function": jnp.sin,
    "numpy-vectorize": jnp.vectorize(lambda x: 2 * x),
    "jit": jax.jit(double),
    "grad": jax.grad(lambda x: (x**2).sum()),
    "vmap": jax.vmap(lambda x: 2 * x),
    "custom_jvp": custom,
    "filter_jit": filter_jit(double),
    "filter_grad": filter_grad(lambda x: (x**2).sum()),
    "filter_vmap": filter_vmap(lambda x: 2 * x),
    "wraps": functools.wraps(double)(lambda *args, **kwargs: double(*args, **kwargs)),
    "wraps-that-adds-a-default": with_default(scaled),
    "module-of-jitted": Affine(jnp.array(2.0)).jitted,
}


def outputs_equal(first, second):
    return all(jtu.tree_leaves(jtu.tree_map(equal, first, second)))


def test_jitted_callable_returns_the_output_of_the_plain_callable():
    x = jnp.asarray(X)
    for name, function in CALLABLES.items():
        jitted, expected = filter_jit(function), function(x)
        for _ in range(2):  # The first call, and a warm one.
            assert outputs_equal(jitted(x), expected), name
    with checking_partitions():
        for name in ("module", "wraps-that-adds-a-default", "filter_jit"):
            assert outputs_equal(filter_jit(CALLABLES[name])(x), CALLABLES[name](x)), name
    assert equal(filter_jit(max)(1, 2), 2)


# --- the wrapper: a pytree with the metadata of the function ---


def test_wrapper_with_other_leaves_computes_with_them():
    wrapper = filter_jit(Affine(jnp.ones(3), 0.0))
    wrapper(X)
    doubled = jtu.tree_map(lambda leaf: 2 * leaf if is_array(leaf) else leaf, wrapper)
    assert equal(doubled(X), 2 * X)
    assert equal(wrapper(X), X)


def test_wrapper_passes_through_jax_jit_and_filter_grad():
    for wrapped in (Affine(jnp.ones(3), jnp.zeros(3)), functools.partial(scaled, scale=X + 1)):
        wrapper = filter_jit(wrapped)
        assert "constant" not in wrapper.lower(X).as_text()
        assert equal(jax.jit(lambda wrapper, x: wrapper(x))(wrapper, X), wrapped(X))
        gradient = filter_grad(lambda wrapper: wrapper(X).sum())(wrapper)
        assert equal(jtu.tree_leaves(gradient)[0], X)


def test_wrapper_has_the_metadata_of_the_function_and_the_signature_of_a_call():
    jitted = filter_jit(double)
    assert jitted.__wrapped__ is double
    for name in ("__name__", "__qualname__", "__doc__", "__module__"):
        assert getattr(jitted, name) == getattr(double, name)
    assert inspect.signature(jitted) == inspect.signature(double)
    assert "jit_double" in jitted.lower(X).as_text()
    assert str(inspect.signature(filter_jit(Affine(1.0)))) == "(x)"
    assert str(inspect.signature(Affine(1.0).jitted)) == "(x)"
    assert Affine(1.0).jitted.__name__ == "jitted"
    partial = filter_jit(functools.partial(scaled, 1.0))
    assert list(inspect.signature(partial).parameters) == ["scale"]


def test_error_names_an_unexpected_keyword_or_argument():
    refused = ["static_argnums", "static_argnames", "donate_argnums", "donate_argnames"]
    for name in [*refused, "abstracted_axes"]:
        for value in (0, None):
            with pytest.raises(ValueError, match=name):
                filter_jit(double, **{name: value})
    for call, message in (
        (lambda: filter_jit(double, no_such_keyword=1), "no_such_keyword"),
        (lambda: filter_jit(double)(X, unknown=1), r"double\(\)"),
        (lambda: filter_jit(double)(), r"double\(\).*x"),
    ):
        with pytest.raises(TypeError, match=message):
            call()


def test_function_pickled_by_value_drops_compiled_programs():
    def twice(x):
        return 2 * x

    filter_jit(twice)(jnp.ones(2))
    loaded = types.FunctionType(twice.__code__, globals())
    loaded.__dict__.update(pickle.loads(pickle.dumps(vars(twice))))
    assert equal(filter_jit(loaded)(jnp.ones(2)), jnp.full(2, 2.0))


def test_options_reach_jax():
    num_inputs = [
        filter_jit(lambda x, y: x, keep_unused=keep).lower(X, X).as_text().count("%arg")
        for keep in (False, True)
    ]
    assert num_inputs[0] < num_inputs[1]
    with pytest.raises(Exception, match="no_such_option"):
        filter_jit(double, compiler_options={"no_such_option": 1})(X)

    def parameters(jit, inline):
        # JAX inlines the function in the outer program, or sets a parameter of the equation.
        jaxpr = jax.make_jaxpr(jit(lambda x: x + 1, inline=inline))(X)
        return [(each.primitive.name, each.params.get("inline")) for each in jaxpr.eqns]

    assert parameters(filter_jit, True) == parameters(jax.jit, True)
    assert parameters(filter_jit, True) != parameters(filter_jit, False)
    jitted = filter_jit(double, compiler_options={"xla_cpu_enable_fast_math": True})
    assert equal(jitted(X), 2 * X)


def test_callable_outlives_an_equal_one():
    jitted = filter_jit(functools.partial(PlainCallable(2.0)))
    assert equal(jitted(X), 2 * X)
    first, second = PlainCallable(2.0), PlainCallable(2.0)
    jitted_first, jitted_second = filter_jit(first), filter_jit(second)
    jitted_first(X)
    del first, jitted_first
    assert equal(jitted_second(X[:2]), 2 * X[:2])
