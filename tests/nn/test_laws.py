"""Laws that hold for every layer: for each configuration in `cases/`."""

import functools
import importlib
import io
import operator
import pathlib

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn

FAMILIES = sorted(path.stem for path in (pathlib.Path(__file__).parent / "cases").glob("*.py"))
CASES = {
    name: case
    for family in FAMILIES
    for name, case in importlib.import_module(f"tests.nn.cases.{family}").CASES.items()
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def build_anew(case, dtype=jnp.float32):
    return case.make(key=jr.key(0), dtype=dtype)


build = functools.cache(build_anew)


def cast(case, dtype):
    """A layer of this dtype with the values of the one in float32, so that none are drawn."""
    leaves, treedef = jax.tree.flatten(eqx.filter_eval_shape(build_anew, case, dtype))
    values = jax.tree.leaves(build(case))
    return jax.tree.unflatten(
        treedef,
        [
            jnp.asarray(np.asarray(value).astype(leaf.dtype)) if eqx.is_array(value) else leaf
            for leaf, value in zip(leaves, values, strict=True)
        ],
    )


def inputs(case, batch=(), dtype=jnp.float32):
    generator = np.random.default_rng(1)
    return [
        jnp.asarray(generator.normal(size=batch + shape).astype(dtype)) for shape in case.in_shapes
    ]


def call_on_batch(case, layer, batch, keys):
    def call(key, *xs):
        return case.call(layer, *xs, key=key)

    return jax.vmap(call, axis_name=case.batch_axis)(keys, *batch)


def call(case, layer, xs, key):
    """On one example; as a batch of one where the layer needs a batch."""
    if case.batch_axis is None:
        return case.call(layer, *xs, key=key)
    return call_on_batch(case, layer, [x[None] for x in xs], key[None])[0]


@functools.cache
def compiled(case):
    """`call` of `case` in one compiled function for all laws, and the list of its traces."""
    traces = []

    @eqx.filter_jit
    def compiled(layer, xs, key):
        traces.append(jax.tree.leaves(xs)[0].dtype)
        return call(case, layer, xs, key)

    return compiled, traces


@functools.cache
def compiled_on_batch(case):
    return eqx.filter_jit(functools.partial(call_on_batch, case))


def floating(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if eqx.is_inexact_array(leaf)]


def is_finite(array):
    return bool(np.isfinite(np.asarray(array, np.float32)).all())


def with_numpy(tree):
    """`tree` with NumPy's arrays in place of JAX's, to compare which nothing is compiled."""
    return jax.tree.map(
        lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, tree
    )


def is_state(node):
    return isinstance(node, nn.State)


def without_state(tree):
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_state) if not is_state(leaf)]


def test_output_has_the_shape_promised(case, getkey):
    assert call(case, build(case), inputs(case), getkey()).shape == case.out_shape


def test_jit_computes_what_eager_does(case, getkey):
    layer, xs, key = build(case), inputs(case), getkey()
    jitted = compiled(case)[0](layer, xs, key)
    np.testing.assert_allclose(jitted, call(case, layer, xs, jr.clone(key)), rtol=1e-5, atol=1e-6)


# What a layer that needs a batch computes hangs on the batch: its own tests say how.
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].batch_axis is None])
def test_vmap_computes_what_a_loop_does(name, getkey):
    case = CASES[name]
    layer, xs, keys = build(case), inputs(case, (3,)), jr.split(getkey(), 3)
    batched = compiled_on_batch(case)(layer, xs, keys)
    keys = jr.clone(keys)
    looped = [compiled(case)[0](layer, [x[i] for x in xs], keys[i]) for i in range(3)]
    np.testing.assert_allclose(batched, looped, rtol=1e-5, atol=1e-6)


def test_repeated_calls_are_traced_once(case, getkey):
    function, traces = compiled(case)
    for _ in range(3):
        function(build_anew(case), inputs(case), getkey())
    assert traces.count(jnp.float32) == 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_dtype_is_kept(case, dtype, getkey):
    layer = eqx.filter_eval_shape(build_anew, case, dtype)
    xs = inputs(case, dtype=dtype)
    out = eqx.filter_eval_shape(functools.partial(call, case), layer, xs, getkey())
    assert out.dtype == dtype
    assert {leaf.dtype for leaf in floating(without_state(layer))} <= {jnp.dtype(dtype)}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_can_be_compiled(case, dtype, getkey):
    out = compiled(case)[0](cast(case, dtype), inputs(case, dtype=dtype), getkey())
    assert out.dtype == dtype
    assert is_finite(out)


def test_gradient_is_finite_at_zero_and_elsewhere(case, getkey):
    layer, key = build(case), getkey()

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(arguments, key):
        return jnp.sum(call(case, *arguments, key) ** 2)

    for xs in (inputs(case), [x * 0 for x in inputs(case)]):
        leaves = floating(gradient((layer, xs), jr.clone(key)))
        assert all(map(is_finite, leaves))


def test_no_key_is_used_twice(case, getkey):
    with jax.debug_key_reuse(True):
        compiled(case)[0](build(case), inputs(case), getkey())
        compiled_on_batch(case)(build(case), inputs(case, (3,)), jr.split(getkey(), 3))


def test_same_key_builds_the_same_layer(case):
    assert eqx.tree_equal(with_numpy(build_anew(case)), with_numpy(build(case)))


def test_layer_comes_back_from_a_file(case):
    layer, file = build(case), io.BytesIO()
    eqx.tree_serialise_leaves(file, layer)
    file.seek(0)
    blank = eqx.filter_eval_shape(build_anew, case)
    restored = eqx.tree_deserialise_leaves(file, blank)
    assert eqx.tree_equal(with_numpy(restored), with_numpy(layer))


def test_inference_mode_changes_flags_and_no_array(case):
    layer = build(case)
    there = nn.inference_mode(layer)
    assert all(map(operator.is_, floating(there), floating(layer)))
    back = nn.inference_mode(there, value=False)
    assert eqx.tree_equal(with_numpy(back), with_numpy(layer))


def test_layers_can_be_built_and_called_under_vmap(case, getkey):
    @eqx.filter_jit
    def build_and_call(keys, xs, build_keys):
        layers = eqx.filter_vmap(lambda key: case.make(key=key, dtype=jnp.float32))(build_keys)
        return eqx.filter_vmap(lambda layer, key: call(case, layer, xs, key))(layers, keys)

    keys, build_keys = jr.split(getkey(), 2), jr.split(getkey(), 2)
    outputs = build_and_call(keys, inputs(case), build_keys)
    assert outputs.shape == (2, *case.out_shape)
