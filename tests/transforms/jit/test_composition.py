"""`filter_jit` under and around other transformations."""

import functools

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

from eqxlike import filter_eval_shape, filter_grad, filter_jit, filter_vmap
from tests.transforms.jit.models import Affine, X, equal

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
        output = jtu.tree_map(np.asarray, jtu.tree_leaves(AROUND[name](jitted)))
        jtu.tree_map(functools.partial(np.testing.assert_allclose, rtol=1e-5), output, expected)


@pytest.mark.parametrize("name", ["jit", "vmap", "grad", "scan", "cond"])
def test_static_output_passes_through_another_transformation(name):
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

    output = jtu.tree_map(np.asarray, jtu.tree_leaves(AROUND[name](function)))
    expected = jtu.tree_map(np.asarray, jtu.tree_leaves(AROUND[name](plain)))
    jtu.tree_map(functools.partial(np.testing.assert_allclose, rtol=1e-5), output, expected)


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
