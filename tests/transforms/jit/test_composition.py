"""`filter_jit` inside other transformations."""

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from eqxlike import filter_grad, filter_jit, filter_vmap
from tests.transforms.jit.models import Affine, X

AROUND = {
    "jit": lambda f: jax.jit(f)(X),
    "grad": lambda f: jax.grad(lambda x: f(x).sum())(X),
    "jvp": lambda f: jax.jvp(f, (X,), (X,)),
    "vmap": lambda f: jax.vmap(f)(np.stack([X, X])),
    "vmap-of-grad": lambda f: jax.vmap(jax.grad(f))(X),
    "scan": lambda f: jax.lax.scan(lambda c, x: (f(c), f(x)), jnp.float32(1), X),
    "cond": lambda f: jax.lax.cond(True, f, lambda x: x, X),
    "disable_jit": lambda f: with_context(jax.disable_jit(), f),
    "debug_nans": lambda f: with_context(jax.debug_nans(True), f),
    "checking_leaks": lambda f: with_context(jax.checking_leaks(), f),
    "filter_grad": lambda f: filter_grad(lambda x: f(x).sum())(jnp.asarray(X)),
    "filter_vmap": lambda f: filter_vmap(f)(np.stack([X, X])),
    "filter_jit": lambda f: filter_jit(lambda x: f(f(x)))(X),
}


def with_context(context, f):
    with context:
        return f(X)


def assert_close(output, expected):
    for one, other in zip(*map(jtu.tree_leaves, (output, expected)), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5)


def test_output_under_another_transformation_equals_the_output_of_jax_jit():
    def plain(x):
        return x * x + 3 * x

    ours, theirs = [], []
    jitted = filter_jit(lambda x: ours.append(1) or plain(x))
    by_jax = jax.jit(lambda x: theirs.append(1) or plain(x))
    for name, transform in AROUND.items():
        for _ in range(2):
            assert_close(transform(jitted), transform(by_jax))
        assert len(ours) <= len(theirs), name


def test_static_and_module_outputs_pass_through_another_transformation():
    jitted = filter_jit(lambda model, x: (Affine(model(x), model.shift), "text"))
    seen = []

    def function(x):
        output, text = jitted(Affine(jnp.float32(2) + 0 * x, 1.0), x)
        seen.append(text)
        return output.scale

    for name in ("vmap", "scan", "cond", "vmap-of-grad"):
        assert_close(AROUND[name](function), AROUND[name](lambda x: 2 * x + 1))
    assert set(seen) == {"text"}
