import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eqxlike import Module, is_array, nn, tree_equal
from eqxlike.train import TrainState


class Mixed(Module):
    weight: jax.Array
    again: jax.Array
    count: jax.Array
    constant: np.ndarray
    name: str


@pytest.fixture
def model():
    weight = jnp.asarray(1.0)
    assert weight.weak_type
    return Mixed(weight, weight, jnp.arange(3), np.ones(2, np.float32), "a leaf that is no array")


def test_starts_at_step_zero_with_the_model_it_got(model, getkey):
    key = getkey()
    state = TrainState.create(model, optax.adam(0.1), key=key)
    assert state.step == 0
    assert state.step.dtype == jnp.int32
    assert not state.is_halted
    assert state.key == key
    assert tree_equal(state.model.count, model.count)
    assert state.model.name == model.name


def test_optimiser_sees_floating_point_arrays_alone(model, getkey):
    state = TrainState.create(model, optax.adam(0.1), key=getkey())
    moments = state.optimiser_state[0].mu
    assert moments.weight == 0
    assert moments.count is None
    assert moments.name is None


@pytest.mark.parametrize("optimiser", [optax.adam(0.1), optax.lookahead(optax.sgd(0.1), 5, 0.5)])
def test_no_array_is_shared(optimiser, model, getkey):
    if "lookahead" in repr(optimiser):
        model = optax.LookaheadParams(model, model)
    key = getkey()
    state = TrainState.create(model, optimiser, key=key)
    leaves = [leaf for leaf in jax.tree.leaves(state) if is_array(leaf)]
    pointers = [
        (
            jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        ).unsafe_buffer_pointer()
        for leaf in leaves
    ]
    assert len(set(pointers)) == len(pointers)
    for leaf in leaves:
        leaf.delete()
    assert not any(
        leaf.is_deleted() for leaf in (key, *jax.tree.leaves(model)) if hasattr(leaf, "is_deleted")
    )


def test_arrays_are_strongly_typed_jax_arrays(model, getkey):
    state = TrainState.create(model, optax.adam(0.1), key=getkey())
    leaves = [leaf for leaf in jax.tree.leaves(state) if is_array(leaf)]
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert not any(jax.typeof(leaf).weak_type for leaf in leaves)
    assert state.model.weight.dtype == model.weight.dtype


def test_old_style_keys_are_taken(getkey):
    key = jax.random.PRNGKey(0)
    state = TrainState.create(nn.Linear(2, 2, key=getkey()), optax.adam(0.1), key=key)
    assert (state.key == key).all()


@pytest.mark.parametrize("key", [0, None, np.zeros(2, np.int32)])
def test_what_is_no_key_is_refused(model, key):
    with pytest.raises(
        TypeError, match=r"create expected a key, as `jax.random.key\(0\)` makes it"
    ):
        TrainState.create(model, optax.adam(0.1), key=key)


def test_several_keys_are_refused(model, getkey):
    with pytest.raises(ValueError, match=r"expected one key, of shape \(\); got .* shape \(3,\)"):
        TrainState.create(model, optax.adam(0.1), key=jax.random.split(getkey(), 3))


def test_class_in_the_place_of_a_model_is_refused(getkey):
    with pytest.raises(TypeError, match=r"got the class Linear: make one first, with `Linear\("):
        TrainState.create(nn.Linear, optax.adam(0.1), key=getkey())


def test_what_is_no_optimiser_is_refused(model, getkey):
    with pytest.raises(
        TypeError, match=r"create expected an optax.GradientTransformation .* 0\.1\."
    ):
        TrainState.create(model, 0.1, key=getkey())


def test_model_whose_arrays_were_donated_is_refused_with_their_paths(model, getkey):
    model.count.delete()
    expected = (
        r"TrainState.create expected a model whose arrays are there; .* deleted: model\.count\."
    )
    with pytest.raises(RuntimeError, match=expected):
        TrainState.create(model, optax.adam(0.1), key=getkey())
