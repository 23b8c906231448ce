"""What holds of every method of inference."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest

from eqxlike import bayes
from tests.bayes.methods.cases import METHODS, X, Y, small_target

pytestmark = [
    pytest.mark.parametrize("name", METHODS),
    pytest.mark.filterwarnings("ignore::eqxlike.bayes.InferenceWarning"),
]


@pytest.fixture(autouse=True, scope="module")
def double_precision():
    with jax.enable_x64(True):
        yield


@functools.cache
def fitted(name):
    return bayes.infer(small_target(), METHODS[name], key=jr.key(1), progress=False)


def equal(tree, other):
    jtu.tree_map(np.testing.assert_array_equal, tree, other)


def test_samples_have_the_shapes_of_the_unknowns(name):
    one = small_target().initial(key=jr.key(0))
    many = fitted(name).samples(5, key=jr.key(2))
    expected = jtu.tree_map(lambda leaf: (5, *leaf.shape), (one.model, one.likelihood, one.prior))
    found = jtu.tree_map(lambda leaf: leaf.shape, (many.model, many.likelihood, many.prior))
    assert found == expected


def test_samples_lie_in_their_support(name):
    samples = fitted(name).samples(20, key=jr.key(2))
    assert np.all(np.asarray(samples.likelihood["scale"]) > 0)
    assert all(np.all(np.isfinite(leaf)) for leaf in jtu.tree_leaves(samples.model))


def test_same_key_gives_the_same_samples(name):
    again = bayes.infer(small_target(), METHODS[name], key=jr.key(1), progress=False)
    equal(again.samples(5, key=jr.key(2)), fitted(name).samples(5, key=jr.key(2)))


def test_one_draw_is_a_network(name):
    posterior = fitted(name)
    samples = posterior.samples(3, key=jr.key(2))
    first = jtu.tree_map(lambda each: each[0], samples)
    outputs = jax.vmap(lambda sample: posterior.model(sample)(X[0]))(samples)
    np.testing.assert_allclose(posterior.model(first)(X[0]), outputs[0], rtol=1e-10)


@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
@jax.debug_key_reuse(False)
def test_a_step_is_the_same_under_jit(name):
    method, problem = METHODS[name], bayes.Problem(small_target())
    state = jax.jit(lambda states: jtu.tree_map(lambda each: each[0], states))(
        fitted(name).chains.states
    )
    step = functools.partial(method.step, problem)
    index = jnp.asarray(0)
    compiled, eager = jax.jit(step)(state, index, jr.key(3)), step(state, index, jr.key(3))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)
    jtu.tree_map(close, compiled, jtu.tree_map(jnp.asarray, eager))


def test_predictions_do_not_depend_on_the_order_of_data(name):
    x, y = X[::-1], Y[::-1]
    assert not np.array_equal(x, X)
    target = small_target(slice(None, None, -1))
    np.testing.assert_array_equal(target.data[1], y)
    other = bayes.infer(target, METHODS[name], key=jr.key(1), progress=False)
    ours, theirs = (
        bayes.predict(each, X, key=jr.key(4), num_samples=16) for each in (fitted(name), other)
    )
    assert isinstance(ours, bayes.Mixture)
    assert isinstance(theirs, bayes.Mixture)
    # Their noise is drawn for one example after another.
    atol = 0.1 if name in {"MCDropout", "MeanField"} else 1e-6
    np.testing.assert_allclose(ours.mean, theirs.mean, rtol=1e-5, atol=atol)
    np.testing.assert_allclose(ours.variance, theirs.variance, rtol=1e-5, atol=atol)


def test_what_was_saved_predicts_the_same(name, tmp_path: pathlib.Path):
    path = tmp_path / "posterior"
    fitted(name).save(path)
    loaded = bayes.load(path, small_target(), METHODS[name])
    ours, theirs = (
        bayes.predict(each, X, key=jr.key(4), num_samples=4) for each in (loaded, fitted(name))
    )
    equal(ours, theirs)


def test_every_method_is_in_the_registry(name):
    methods = {
        each
        for each, value in vars(bayes).items()
        if isinstance(value, type) and issubclass(value, bayes.Method) and value is not bayes.Method
    }
    assert methods == set(METHODS)
    assert type(METHODS[name]).__name__ == name
