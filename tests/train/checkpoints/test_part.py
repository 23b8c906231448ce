"""Restoring a part of a checkpoint: only the model, or a state of another optimiser."""

import shutil

import jax
import jax.numpy as jnp
import jax.random as jr
import optax
import pytest

import eqxlike as eqx
from eqxlike import nn, train
from tests.train.linear import BATCH, mean_square


def make_state(seed, optimiser, width=3):
    model = nn.MLP(2, 1, width, 1, key=jr.key(seed))
    return train.TrainState.create(model, optimiser, key=jr.key(seed))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint and its state."""
    path = tmp_path_factory.mktemp("part") / "checkpoint"
    state = make_state(0, optax.adam(0.1))
    train.save(path, state, "data")
    return path, state


REST = ("optimiser_state", "step", "key", "is_halted")


def test_only_the_model_is_restored_and_the_rest_of_a_state_is_unchanged(saved):
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
    for like, is_hinted in [(other, True), (make_state(4, optax.adam(0.1), 9), False)]:
        with pytest.raises(ValueError, match="does not fit") as caught:
            train.restore(path, like)
        assert ('only="model"' in str(caught.value)) == is_hinted


def test_a_part_takes_the_sharding_of_like_and_may_come_from_a_folder(saved, tmp_path):
    path, state = saved
    device = jax.devices()[-1]
    like = jax.tree.map(lambda x: jax.device_put(x, device) if eqx.is_array(x) else x, state.model)
    assert train.restore(path, like).state.layers[0].weight.devices() == {device}
    with train.CheckpointFolder(tmp_path) as folder:
        folder.save(1, {"w": jnp.ones(2), "rest": [jnp.ones(3)]})
        restored = folder.restore_newest({"w": jnp.zeros(2), "rest": None}, only="w")
    assert eqx.tree_equal(restored.state, {"w": jnp.ones(2), "rest": None})
    assert restored.left_out == ("rest",)


def test_mismatches_are_named(saved, tmp_path):
    path, state = saved
    path = shutil.copytree(path, tmp_path / "copy")
    other = make_state(5, optax.sgd(0.1, momentum=0.9))
    wide = nn.MLP(2, 1, 4, 1, key=jr.key(0))
    for like, options, message in [
        (other, {}, r"optimiser_state\[0\]\.trace.*the model alone: `train\.restore"),
        (other, {"only": "modle"}, "has no part named 'modle'; its parts are 'model', 'opt"),
        ({"a": 1}, {"only": ("step",)}, "`like` has no part named 'step'; its parts are 'a'"),
        (wide, {}, r"like\.model\.layers\[0\]\.weight is .*\(4, 2\).*was .*\(3, 2\)"),
        (nn.freeze(state.model, lambda model: model.layers[0]), {}, r"weight is missing in the ch"),
    ]:
        with pytest.raises(ValueError, match=message):
            train.restore(path, like, **options)
    # All files are checked, including files of parts that are not restored.
    (file,) = path.glob("*/arrays/*.optimiser_state.0.mu.layers.0.weight/0*")
    file.write_bytes(b"1" * file.stat().st_size)
    with pytest.raises(train.CheckpointError, match=r"state\.optimiser_state\[0\]\.mu\.layers"):
        train.restore(path, state.model)


def test_restoring_a_model_without_its_statistics_warns(tmp_path):
    norm, start = nn.make_with_state(nn.BatchNorm)(3, "batch", mode="batch")
    key = jr.key(0)
    state = train.TrainState.create(norm, optax.adam(0.1), key=key, model_state=start)
    train.save(tmp_path / "one", state)
    with pytest.warns(UserWarning, match=r'`only=\("model", "model_state"\)`'):
        train.restore(tmp_path / "one", norm)
    like = train.TrainState.create(norm, optax.sgd(0.1), key=key, model_state=start)
    restored = train.restore(tmp_path / "one", like, only=("model", "model_state"))
    assert restored.left_out == REST


# --- Without frozen arrays ---


@pytest.fixture
def adapted(getkey):
    """Two states of models with different adapters and the same weights."""
    optimiser = optax.adam(0.1)
    model = nn.MLP(2, 1, 64, 2, key=getkey())

    def make(key, model=model):
        wrap = lambda layer, key: nn.LoRALinear(layer, 2, key=key)
        model = nn.replace_layers(model, nn.Linear, wrap, key=key)
        return train.TrainState.create(model, optimiser, key=jr.key(0))

    return make(getkey()), make(getkey())


def test_a_checkpoint_without_frozen_arrays_takes_them_from_like(adapted, tmp_path):
    state, other = adapted
    for name, with_frozen in (("whole", True), ("part", False)):
        train.save(tmp_path / name, state, with_frozen=with_frozen).wait()
    of_files = lambda folder: sum(path.stat().st_size for path in folder.rglob("*"))
    assert of_files(tmp_path / "part") < of_files(tmp_path / "whole") - 4 * 64 * 64
    assert not eqx.tree_equal(other.model, state.model)
    restored = train.restore(tmp_path / "part", other).state
    assert eqx.tree_equal(restored, state)
    # The restored array is a copy, which may be donated.
    jax.tree.map(lambda leaf: leaf.delete() if eqx.is_array(leaf) else None, restored)
    assert eqx.tree_equal(train.restore(tmp_path / "part", other.model).state, state.model)
    assert train.restore(tmp_path / "part", other, only="model").left_out == REST

    # Frozen arrays of `like` must have values of the same shape.
    shapes = eqx.filter_eval_shape(lambda: state)
    with pytest.raises(ValueError, match=r"weight.* must be an array with its values, .*frozen"):
        train.restore(tmp_path / "part", shapes)
    at = lambda state: state.model.layers[0].linear.weight
    cut = eqx.tree_at(at, state, at(state)[:, :1])
    with pytest.raises(ValueError, match=r"\(64, 1\) .*, but was saved as an array of shape \(64"):
        train.restore(tmp_path / "part", cut)


def test_a_run_resumes_from_checkpoints_without_frozen_arrays(adapted, tmp_path):
    state, _ = adapted
    step, batches = train.make_step(mean_square, optax.adam(0.1)), [BATCH] * 6
    whole = train.fit(state, step, batches, num_steps=6)
    callbacks = [train.Checkpoint(tmp_path, every=4, with_frozen=False)]
    train.fit(state, step, batches, num_steps=4, callbacks=callbacks)
    resumed = train.fit(state, step, batches, num_steps=6, resume_from=tmp_path)
    assert eqx.tree_equal(resumed.state, whole.state)
    assert not state.model.layers[0].linear.weight.is_deleted()
