"""Primitives of trees under transformations. Their batching rule uses their other rules."""

from unittest import mock

import equinox.internal
import jax
import jax.numpy as jnp
import pytest
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from eqxlike import internal


@pytest.fixture(autouse=True)
def keys_are_not_checked():
    """The check for reused keys passes a parameter that Equinox's primitives also have."""
    with jax.debug_key_reuse(False):
        yield


def make_primitive(name, impl, abstract_eval, jvp=None, transpose=None):
    """A primitive of trees, and the function that binds it."""
    primitive = internal.create_vprim(
        name,
        internal.filter_primitive_def(impl),
        internal.filter_primitive_def(abstract_eval),
        jvp and internal.filter_primitive_jvp(jvp),
        transpose,
    )
    return primitive, lambda *args: internal.filter_primitive_bind(primitive, *args)


def weighted_solve():
    """`inputs["b"] / a`, which is linear only in `b`, with a static and an integer output."""

    def impl(a, inputs, name):
        return {"x": inputs["b"] / a, "name": name, "steps": jnp.arange(2)}

    def abstract_eval(a, inputs, name):
        return {"x": inputs["b"], "name": name, "steps": ShapedArray((2,), jnp.dtype("int32"))}

    def jvp(primals, tangents):
        a, inputs, name = primals
        t_a, t_inputs, _ = tangents
        output = bind(a, inputs, name)
        t_b = internal.materialise_zeros(inputs["b"], t_inputs["b"])
        if t_a is not None:
            t_b = t_b - t_a * output["x"]
        tangent = bind(a, {"b": t_b}, name)["x"]
        return output, {"x": tangent, "name": None, "steps": None}

    @internal.filter_primitive_transpose
    def transpose(inputs, cotangents):
        a, _, name = inputs
        assert cotangents["name"] is None
        return None, {"b": bind(a, {"b": cotangents["x"]}, name)["x"]}, None

    _, bind = make_primitive("weighted_solve", impl, abstract_eval, jvp, transpose)
    return lambda a, b: bind(a, {"b": b}, "static")


A, B = jnp.array(2.0), jnp.array([1.0, 3.0])
BATCH = jnp.stack([B, 2 * B, 3 * B])
AS = jnp.array([1.0, 2.0, 4.0])

PROGRAMS = {
    "call": lambda f: f(A, B),
    "jvp": lambda f: jax.jvp(f, (A, B), (A, B)),
    "jvp in b alone": lambda f: jax.jvp(lambda b: f(A, b), (B,), (B,)),
    "hessian": lambda f: jax.hessian(lambda a, b: (f(a, b) ** 2).sum(), argnums=(0, 1))(A, B),
    "vmap of a": lambda f: jax.vmap(lambda a: f(a, B * a))(AS),
    "vmap of another axis": lambda f: jax.vmap(f, in_axes=(None, 1), out_axes=1)(A, BATCH.T),
    "grad-vmap of b alone": lambda f: jax.grad(
        lambda a, b: jax.vmap(f, in_axes=(None, 0))(a, b).sum(), argnums=(0, 1)
    )(A, BATCH),
    "grad-vmap of another axis": lambda f: jax.grad(
        lambda b: (jax.vmap(f, in_axes=(None, 1))(A, b) ** 2).sum()
    )(BATCH.T),
    "grad-vmap-vmap": lambda f: jax.grad(
        lambda a, b: (jax.vmap(jax.vmap(f, in_axes=(0, None)), in_axes=(None, 0))(a, b) ** 2).sum(),
        argnums=(0, 1),
    )(AS, BATCH),
    "hessian-vmap": lambda f: jax.hessian(lambda a: (jax.vmap(f)(a, BATCH) ** 2).sum())(AS),
    "vmap with a name": lambda f: jax.vmap(
        lambda a, b: jax.lax.psum(f(a, b), "batch"), axis_name="batch"
    )(AS, BATCH),
}


def test_compiled_programs_match_the_plain_function():
    solve = weighted_solve()

    def found_of(function):
        return {name: program(function) for name, program in PROGRAMS.items()}

    found = jax.jit(lambda: found_of(lambda a, b: solve(a, b)["x"]))()
    expected = jax.jit(lambda: found_of(lambda a, b: b / a))()
    for name in PROGRAMS:
        assert jax.tree.all(jax.tree.map(jnp.allclose, found[name], expected[name])), name


def test_programs_that_are_not_compiled_match_the_plain_function():
    solve = weighted_solve()
    for name in ("call", "jvp", "vmap of a"):
        found = PROGRAMS[name](lambda a, b: solve(a, b)["x"])
        expected = PROGRAMS[name](lambda a, b: b / a)
        assert jax.tree.all(jax.tree.map(jnp.allclose, found, expected))
    names = []
    jax.jit(jax.vmap(lambda a: names.append(solve(a, B)["name"])))(AS)
    assert names == ["static"]
    # An output that does not depend on the batched input is batched too.
    assert jax.vmap(lambda a: solve(a, B)["steps"])(AS).tolist() == [[0, 1]] * 3
    assert jax.vmap(lambda a: solve(A, B)["x"], out_axes=None)(AS).shape == B.shape


def test_implementation_may_be_replaced():
    """Lineax replaces its implementation, which raises in a batch."""
    impl = mock.Mock(side_effect=lambda x: x)
    jvp = lambda primals, tangents: (primals[0], tangents[0])
    transpose = internal.filter_primitive_transpose(lambda inputs, cotangents: cotangents)
    primitive, bind = make_primitive("checked", impl, lambda x: x, jvp, transpose)
    primitive.def_impl(internal.filter_primitive_def(lambda x: 2 * x))
    assert (bind(A), *jax.vmap(bind)(AS)) == (2 * A, *AS)
    impl.assert_called_once()


def test_unhashable_values_are_static_in_compiled_programs():
    abstract_eval = lambda x, place: ShapedArray((1,), x.dtype)
    _, bind = make_primitive("sliced", lambda x, place: x[place], abstract_eval)
    assert jax.jit(lambda x: bind(x, slice(1)))(B) == bind(B, slice(1)) == B[:1]


def test_batching_rule_receives_and_returns_axes_as_trees():
    @internal.filter_primitive_batching
    def rule(inputs, axes):
        seen.append(axes)
        return internal.filter_primitive_bind(primitive, *inputs), {"x": axes[0]["x"], "name": None}

    seen = []
    of_arrays = internal.filter_primitive_def(lambda tree, name: {"x": tree["x"], "name": name})
    primitive = Primitive("identity_of_trees")
    primitive.multiple_results = True
    primitive.def_impl(of_arrays)
    primitive.def_abstract_eval(of_arrays)
    mlir.register_lowering(primitive, mlir.lower_fun(of_arrays, multiple_results=True))
    batching.primitive_batchers[primitive] = rule

    def function(x):
        return internal.filter_primitive_bind(primitive, {"x": x, "y": 1.0}, "n")["x"]

    assert jnp.array_equal(jax.jit(jax.vmap(function))(AS), AS)
    assert seen == [({"x": 0, "y": None}, None)]


@pytest.mark.parametrize("materialise_zeros", [True, False])
def test_transpose_rule_may_ask_for_zeros(materialise_zeros):
    seen = []

    @internal.filter_primitive_transpose(materialise_zeros=materialise_zeros)
    def transpose(inputs, cotangents):
        seen.append(cotangents)
        return (cotangents[0],)

    jvp = lambda primals, tangents: (bind(*primals), bind(*tangents))
    _, bind = make_primitive("twice", lambda x: (x, x), lambda x: (x, x), jvp, transpose)
    assert jax.grad(lambda x: bind(x)[0])(A) == 1
    assert seen == [(1.0, 0.0 if materialise_zeros else None)]


def test_tangents_of_another_structure_are_refused():
    jvp = lambda primals, tangents: ({"x": primals[0]}, [tangents[0]])
    _, bind = make_primitive("wrong", lambda x: {"x": x}, lambda x: {"x": x}, jvp)
    message = "The rule of a primitive returned tangent whose structure differs from the output"
    with pytest.raises(ValueError, match=message):
        jax.jvp(bind, (A,), (A,))


STRUCT = jax.ShapeDtypeStruct((2,), jnp.float32)
PRIMALS = [jnp.ones(2), jnp.asarray(1.0), jnp.arange(2), 1.0, "text", STRUCT]


def shown(value):
    return None if value is None else (jax.typeof(value), type(value).__name__)


def test_zeros_match_equinox():
    for allow_struct in (True, False):
        for primal in PRIMALS:
            ours, theirs = (
                library.materialise_zeros(primal, None, allow_struct)
                for library in (internal, equinox.internal)
            )
            assert shown(ours) == shown(theirs)
        assert internal.materialise_zeros(A, B, allow_struct) is B


def test_primitive_without_derivatives_is_mapped():
    _, double = make_primitive("double", lambda x: 2 * x, lambda x: x)
    doubled = jax.vmap(double)(AS)
    assert jnp.array_equal(doubled, 2 * AS)
    with pytest.raises(NotImplementedError, match="'double' has no rule for this derivative"):
        jax.grad(lambda x: jax.vmap(double)(x).sum())(AS)
