"""Laws that hold for every layer."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from eqxlike import filter_grad, filter_jit, filter_vmap, is_inexact_array, nn, tree_equal


@dataclasses.dataclass(frozen=True)
class Case:
    make: Callable[..., Any]  # make(key=, dtype=)
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]


def plain(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda key, dtype: make()


CASES = {
    "Linear": Case(lambda **options: nn.Linear(3, 4, **options), (3,), (4,)),
    "Linear-no-bias": Case(lambda **options: nn.Linear(3, 4, False, **options), (3,), (4,)),
    "Linear-scalar": Case(lambda **options: nn.Linear("scalar", "scalar", **options), (), ()),
    "Identity": Case(plain(nn.Identity), (3,), (3,)),
    "MLP": Case(lambda **options: nn.MLP(3, 4, 5, 2, **options), (3,), (4,)),
    "MLP-scan": Case(lambda **options: nn.MLP(3, 4, 5, 3, scan=True, **options), (3,), (4,)),
    "MLP-scalar": Case(lambda **options: nn.MLP("scalar", "scalar", 5, 1, **options), (), ()),
    "Dropout": Case(plain(nn.Dropout), (3, 4), (3, 4)),
    "Lambda": Case(plain(lambda: nn.Lambda(jnp.tanh)), (3,), (3,)),
    "Sequential": Case(
        lambda **options: nn.Sequential(
            [nn.Linear(3, 4, **options), nn.Lambda(jax.nn.relu), nn.Dropout(0.1)]
        ),
        (3,),
        (4,),
    ),
    "BayesianLinear": Case(lambda **options: nn.BayesianLinear(3, 4, **options), (3,), (4,)),
    "BayesianLinear-no-bias": Case(
        lambda **options: nn.BayesianLinear(3, 4, False, **options), (3,), (4,)
    ),
    "BayesianLinear-scalar": Case(
        lambda **options: nn.BayesianLinear("scalar", "scalar", **options), (), ()
    ),
    "BayesianMLP": Case(lambda **options: nn.BayesianMLP(3, 4, 5, 2, **options), (3,), (4,)),
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def build(case, dtype=jnp.float32):
    return case.make(key=jr.key(0), dtype=dtype)


def inputs(case, batch=(), dtype=jnp.float32):
    return jr.normal(jr.key(1), batch + case.in_shape, dtype)


def test_output_has_the_shape_promised(case, getkey):
    assert build(case)(inputs(case), key=getkey()).shape == case.out_shape


def test_jit_computes_what_eager_does(case, getkey):
    layer, x, key = build(case), inputs(case), getkey()
    jitted = filter_jit(lambda layer, x, key: layer(x, key=key))(layer, x, key)
    np.testing.assert_allclose(jitted, layer(x, key=key), rtol=1e-5, atol=1e-6)


def test_vmap_computes_what_a_loop_does(case, getkey):
    layer, x, keys = build(case), inputs(case, (6,)), jr.split(getkey(), 6)
    batched = jax.vmap(lambda x, key: layer(x, key=key))(x, keys)
    looped = jnp.stack([layer(x[i], key=keys[i]) for i in range(6)])
    np.testing.assert_allclose(batched, looped, rtol=1e-5, atol=1e-6)


def test_repeated_calls_are_traced_once(case, getkey):
    traces = []

    @filter_jit
    def call(layer, x, key):
        traces.append(None)
        return layer(x, key=key)

    for _ in range(3):
        call(build(case), inputs(case), getkey())
    assert len(traces) == 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_dtype_is_kept(case, dtype, getkey):
    layer = build(case, dtype)
    assert layer(inputs(case, dtype=dtype), key=getkey()).dtype == dtype
    assert {leaf.dtype for leaf in jax.tree.leaves(layer) if is_inexact_array(leaf)} <= {
        jnp.dtype(dtype)
    }


def test_gradient_is_finite_at_zero_and_elsewhere(case, getkey):
    layer, key = build(case), getkey()
    for x in (inputs(case), jnp.zeros(case.in_shape)):
        gradient = filter_grad(lambda layer, x: jnp.sum(layer(x, key=key) ** 2))(layer, x)
        leaves = [leaf for leaf in jax.tree.leaves(gradient) if is_inexact_array(leaf)]
        assert all(bool(jnp.isfinite(leaf).all()) for leaf in leaves)


def test_same_key_builds_the_same_layer(case):
    assert tree_equal(build(case), build(case))


def test_layers_can_be_built_and_called_under_vmap(case, getkey):
    layers = filter_vmap(lambda key: case.make(key=key, dtype=jnp.float32))(jr.split(getkey(), 4))
    keys, x = jr.split(getkey(), 4), inputs(case)
    outputs = filter_vmap(lambda layer, key: layer(x, key=key))(layers, keys)
    assert outputs.shape == (4, *case.out_shape)
