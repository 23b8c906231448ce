"""A part of a checkpoint: the model alone, or a state of another optimiser."""

import shutil

import jax
import jax.numpy as jnp
import optax
import pytest

import eqxlike as eqx
from eqxlike import nn, train


def make_state(seed, optimiser, **options):
    model = nn.MLP(2, 1, 3, 1, key=jax.random.key(seed))
    return train.TrainState.create(model, optimiser, key=jax.random.key(seed), **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint, and the state that it is of."""
    path = tmp_path_factory.mktemp("part") / "checkpoint"
    state = make_state(0, optax.adam(0.1))
    train.save(path, state, "data")
    return path, state


REST = ("optimiser_state", "step", "key", "is_halted")


def test_the_model_comes_back_alone_and_the_rest_of_a_state_stays(saved):
    path, state = saved
    other = make_state(5, optax.sgd(0.1, momentum=0.9))
    struct = eqx.filter_eval_shape(lambda: other.model)
    for like, options in [(other.model, {}), (struct, {}), (other.model, {"only": "model"})]:
        restored = train.restore(path, like, **options)
        model, data = restored
        assert eqx.tree_equal(model, state.model)
        assert (data, restored.left_out) == ("data", REST)
    restored = train.restore(path, other, only="model")
    assert eqx.tree_equal(restored.state.model, state.model)
    assert restored.left_out == REST
    assert restored.state.optimiser_state is not state.optimiser_state
    for name in REST:
        assert eqx.tree_equal(getattr(restored.state, name), getattr(other, name))
    restored = train.restore(path, other, only=("model", "key"))
    assert eqx.tree_equal(restored.state.key, state.key)
    assert train.restore(path, state).left_out == ()


def test_arrays_take_the_sharding_of_like(saved):
    path, state = saved
    device = jax.devices()[-1]
    like = jax.tree.map(lambda x: jax.device_put(x, device) if eqx.is_array(x) else x, state.model)
    assert train.restore(path, like).state.layers[0].weight.devices() == {device}


def test_a_part_of_any_pytree_and_the_newest_of_a_folder(tmp_path):
    with train.CheckpointFolder(tmp_path) as folder:
        folder.save(1, {"w": jnp.ones(2), "rest": [jnp.ones(3)]})
        like = {"w": jnp.zeros(2), "rest": None}
        restored = folder.restore_newest(like, only="w")
    assert eqx.tree_equal(restored.state, {"w": jnp.ones(2), "rest": None})
    assert restored.left_out == ("rest",)


def test_what_does_not_fit_is_named(saved, tmp_path):
    path, state = saved
    path = shutil.copytree(path, tmp_path / "copy")
    other = make_state(5, optax.sgd(0.1, momentum=0.9))
    wide = nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    for like, options, message in [
        (other, {}, r"optimiser_state\[0\]\.trace.*the model alone: `train\.restore"),
        (other, {"only": "modle"}, "has no part named 'modle'; its parts are 'model', 'opt"),
        ({"a": 1}, {"only": ("step",)}, "`like` has no part named 'step'; its parts are 'a'"),
        (wide, {}, r"like\.model\.layers\[0\]\.weight is .*\(4, 2\).*was .*\(3, 2\)"),
        (nn.freeze(state.model, lambda model: model.layers[0]), {}, "weight is Frozen, and was no"),
    ]:
        with pytest.raises(ValueError, match=message):
            train.restore(path, like, **options)
    # All files are checked, including the files of parts that are not read.
    (file,) = path.glob("arrays-*/*.optimiser_state.0.mu.layers.0.weight/0*")
    file.write_bytes(b"1" * file.stat().st_size)
    with pytest.raises(train.CheckpointError, match=r"state\.optimiser_state\[0\]\.mu\.layers"):
        train.restore(path, state.model)


def test_a_model_without_its_statistics_is_warned_of(tmp_path):
    norm, start = nn.make_with_state(nn.BatchNorm)(3, "batch", mode="batch")
    key = jax.random.key(0)
    state = train.TrainState.create(norm, optax.adam(0.1), key=key, model_state=start)
    train.save(tmp_path / "one", state)
    with pytest.warns(UserWarning, match=r'`only=\("model", "model_state"\)`'):
        train.restore(tmp_path / "one", norm)
    like = train.TrainState.create(norm, optax.sgd(0.1), key=key, model_state=start)
    restored = train.restore(tmp_path / "one", like, only=("model", "model_state"))
    assert restored.left_out == REST
