"""Laws of all layers, for each configuration in `cases.py`.

One compiled program for each configuration tests most laws.
"""

import functools
import io
import operator

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from tests.nn.arrays import filled
from tests.nn.cases import CASES


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


WITHOUT_CASE = {
    "FusedLinear",  # It returns a tuple: see `test_fuse.py`.
    "MixedPrecision",  # It wraps a model: see `test_precision.py`.
    "Sampler",  # It draws tokens, without a gradient: see `test_generate.py`.
    "Shared",  # It wraps a model: see `test_composition.py`.
}


def owner_of_call(cls):
    """The class that defines `__call__`. `Conv2d` and `Conv` share it, and need one case."""
    return next((base for base in cls.__mro__ if "__call__" in vars(base)), None)


def test_every_public_layer_has_a_case():
    modules = {cls for cls in vars(nn).values() if isinstance(cls, type(eqx.Module))}
    layers = [blank(case) for case in CASES.values()]
    layers = [each[0] if type(each) is tuple else each for each in layers]
    covered = {owner_of_call(type(layer)) for layer in layers} | {None}
    assert {cls.__name__ for cls in modules if owner_of_call(cls) not in covered} == WITHOUT_CASE


def build_again(case, dtype=jnp.float32):
    return case.make(key=jr.key(0), dtype=dtype)


@functools.cache
def blank(case):
    """A layer with shapes instead of arrays."""
    return eqx.filter_eval_shape(build_again, case)


@functools.cache
def build(case):
    return filled(build_again, case)


def inputs(case, dtype=jnp.float32):
    return [jnp.asarray(x) for x in numpy_inputs(case, dtype)]


def numpy_inputs(case, dtype=jnp.float32):
    generator = np.random.default_rng(1)
    return [generator.normal(size=shape).astype(dtype) for shape in case.in_shapes]


def call_on_batch(case, layer, batch, keys):
    def call(key, *xs):
        return case.call(layer, *xs, key=key)

    return jax.vmap(call, axis_name=case.batch_axis)(keys, *batch)


def call(case, layer, xs, key):
    """Calls the layer on one example, or on a batch of one if the layer needs a batch."""
    if case.batch_axis is None:
        return case.call(layer, *xs, key=key)
    return call_on_batch(case, layer, [x[None] for x in xs], key[None])[0]


def floating(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if eqx.is_inexact_array(leaf)]


def is_finite(array):
    return bool(np.isfinite(np.asarray(array, np.float32)).all())


def with_numpy(tree):
    """`tree` with NumPy arrays, because comparing them compiles nothing."""
    return jax.tree.map(
        lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, tree
    )


def is_state(node):
    return isinstance(node, nn.State)


def without_state(tree):
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_state) if not is_state(leaf)]


def test_batch_equals_a_loop_with_finite_gradients_and_layers_are_built_under_vmap(case):
    """One program tests the laws of a call. The second example is zero. Layers built under `vmap`
    have half precision and are only evaluated abstractly. No key is reused. Another layer has the
    same structure and hash, so that it would share the trace.
    """

    @eqx.filter_jit
    def program(layer, batch, batch_key):
        def loss(layer_and_batch):
            out = call_on_batch(case, *layer_and_batch, jr.split(batch_key, 2))
            return jnp.sum(out**2), out

        one = call(case, layer, [x[0] for x in batch], jr.split(jr.clone(batch_key), 2)[0])
        (_, out), gradient = eqx.filter_value_and_grad(loss, has_aux=True)((layer, batch))
        return one, out, gradient

    def build_and_call(key):
        build_key, call_key = jr.split(key)
        layer = case.make(key=build_key, dtype=jnp.bfloat16)
        out = call(case, layer, inputs(case, dtype=jnp.bfloat16), call_key)
        return out, floating(without_state(layer))

    batch = [np.stack([x, x * 0]) for x in numpy_inputs(case)]
    one, out, gradient = program(build(case), batch, jr.key(0))
    structures = [jax.tree.structure(each) for each in (build(case), blank(case))]
    assert structures[0] == structures[1]
    assert hash(structures[0]) == hash(structures[1])
    assert (one.shape, one.dtype) == (case.out_shape, jnp.float32)
    # The output of a layer that needs a batch depends on the whole batch.
    if case.batch_axis is None:
        np.testing.assert_allclose(np.asarray(out)[0], one, rtol=1e-5, atol=1e-6)
    assert all(map(is_finite, floating(gradient)))
    halves, arrays = jax.eval_shape(
        lambda key: jax.vmap(build_and_call)(jr.split(key, 2)), jr.key(2)
    )
    assert out.shape == halves.shape == (2, *case.out_shape)
    assert halves.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in arrays} <= {jnp.dtype(jnp.bfloat16)}


# Only some layers, because eager calls compile many small programs.
@pytest.mark.parametrize("name", ["MultiheadAttention", "BayesianLinear", "BatchNorm"])
def test_jit_computes_the_same_as_eager_calls(name, getkey):
    case, key = CASES[name], getkey()
    layer, xs = build(case), inputs(case)
    eager = call(case, layer, xs, key)
    jitted = eqx.filter_jit(functools.partial(call, case))(layer, xs, jr.clone(key))
    np.testing.assert_allclose(jitted, eager, rtol=1e-5, atol=1e-6)


def test_layer_is_restored_from_a_file_and_from_inference_mode(case):
    layer, file = build(case), io.BytesIO()
    eqx.tree_serialise_leaves(file, layer)
    file.seek(0)
    restored = eqx.tree_deserialise_leaves(file, blank(case))
    assert eqx.tree_equal(with_numpy(restored), with_numpy(layer))
    there = nn.inference_mode(layer)
    assert all(map(operator.is_, floating(there), floating(layer)))
    back = nn.inference_mode(there, value=False)
    assert eqx.tree_equal(with_numpy(back), with_numpy(layer))
