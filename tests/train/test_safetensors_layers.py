"""Stacked layers have the names of a list of layers. State is named after its owner."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eqxlike as eqx
from eqxlike import nn, train


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


class Net(eqx.Module):
    blocks: nn.ScanStack | list
    head: nn.Linear

    def __init__(self, is_stacked, depth=3, *, key):
        keys = jax.random.split(key)
        make = lambda key: nn.MLP(4, 4, 5, 1, key=key)
        self.blocks = nn.ScanStack(make, depth, key=keys[0])
        if not is_stacked:
            self.blocks = list(self.blocks.unstack())
        self.head = nn.Linear(4, 2, key=keys[1])


# Transposes weights, and packs the two biases of a block in one array.
NAMES = {
    "blocks.{i}.layers.0.bias": train.Stored("h.{i}.biases", part=(0, 5, 9)),
    "blocks.{i}.layers.1.bias": train.Stored("h.{i}.biases", part=(5, 9, 9)),
    "blocks.{i}.layers.{j}.*": train.Stored("h.{i}.{j}.*", transpose=True),
}


def test_a_list_and_a_stack_are_written_to_equal_files(path, getkey):
    stack = Net(True, key=getkey())
    as_list = eqx.tree_at(lambda net: net.blocks, stack, list(stack.blocks.unstack()))
    frozen = nn.freeze(stack, lambda net: net.blocks[1:2])
    models = [stack, as_list, frozen]
    for names in (None, NAMES):
        contents = []
        for model in models:
            train.export_safetensors(model, path, names)
            contents.append(path.read_bytes())
            for other in models:
                like = eqx.filter_eval_shape(lambda model=other: model)
                assert eqx.tree_equal(train.import_safetensors(like, path, names), other)
        assert contents[0] == contents[1] == contents[2]
    blocks = [f"h.{i}.{name}" for i in range(3) for name in ("0.weight", "1.weight", "biases")]
    assert sorted(load_file(path)) == [*blocks, "head.bias", "head.weight"]


def test_each_problem_of_a_stack_names_the_layer(path, getkey):
    stack = Net(True, key=getkey())
    train.export_safetensors(stack, path)
    arrays = load_file(path)
    del arrays["blocks.1.layers.0.bias"]
    arrays["blocks.2.layers.0.bias"] = np.zeros(7, np.float32)
    save_file(arrays, path)
    with pytest.raises(ValueError, match=r"blocks\.1\.layers\.0\.bias is missing") as caught:
        train.import_safetensors(stack, path)
    name = "blocks.2.layers.0.bias"
    assert f"{name} ({name} in model.safetensors) is float32 of shape" in str(caught.value)
    # A missing row with an ignored name is unchanged.
    arrays["blocks.2.layers.0.bias"] = np.zeros(5, np.float32)
    save_file(arrays, path)
    found = train.import_safetensors(stack, path, ignore="blocks.1.*.bias")
    old, new = (net.blocks.layers.layers[0].bias for net in (stack, found))
    np.testing.assert_array_equal(new, old.at[2].set(0))


def test_stack_in_a_stack_has_a_number_for_each(path, getkey):
    make = lambda key: nn.Linear(2, 2, use_bias=False, key=key)
    outer = nn.ScanStack(lambda key: nn.ScanStack(make, 2, key=key), 3, key=getkey())
    train.export_safetensors({"outer": outer}, path)
    found = load_file(path)
    assert sorted(found) == [f"outer.{i}.{j}.weight" for i in range(3) for j in range(2)]
    np.testing.assert_array_equal(found["outer.2.1.weight"], outer[2][1].weight)
    like = eqx.filter_eval_shape(lambda: {"outer": outer})
    assert eqx.tree_equal(train.import_safetensors(like, path), {"outer": outer})


def test_an_ensemble_of_stacks_is_refused(path, getkey):
    make = lambda key: nn.ScanStack(lambda key: nn.Linear(2, 2, key=key), 3, key=key)
    ensemble = eqx.filter_vmap(make)(jax.random.split(getkey(), 2))
    message = "model.layers.weight has shape (2, 3, 2, 2); its shape must begin with the axes"
    for call in (train.export_safetensors, train.import_safetensors):
        with pytest.raises(ValueError, match=re.escape(message)):
            call(ensemble, path)


class Block(eqx.Module):
    norm: nn.BatchNorm
    spectral: nn.SpectralNorm
    count: nn.StateIndex
    pair: nn.StateIndex

    def __init__(self, mode, *, key):
        linear_key, key = jax.random.split(key)
        self.norm = nn.BatchNorm(2, batched=True, mode=mode)
        self.spectral = nn.SpectralNorm(nn.Linear(3, 4, key=linear_key), "weight", key=key)
        self.count = nn.StateIndex(jnp.zeros(()))
        self.pair = nn.StateIndex({"a": jnp.zeros(1), "b": (jnp.ones(1),)})


STATE_NAMES = ["norm.running_mean", "norm.running_var", "spectral.u", "spectral.v"]
STATE_NAMES += ["count", "pair.a", "pair.b.0"]


@pytest.mark.parametrize(
    ("mode", "own"), [("batch", "norm.batch_counter"), ("ema", "norm.ema_first_time")]
)
def test_arrays_of_a_state_are_named_after_their_owner(path, mode, own, getkey):
    both = nn.make_with_state(lambda: [Block(mode, key=getkey())])()
    train.export_safetensors(both, path)
    weights = ["norm.weight", "norm.bias", "spectral.layer.weight", "spectral.layer.bias"]
    assert sorted(load_file(path)) == sorted(f"0.0.{n}" for n in [*STATE_NAMES, own, *weights])
    model, state = both
    other = jax.tree.map(lambda array: jnp.full_like(array, 7), state)
    found = train.import_safetensors((model, other), path)
    assert eqx.tree_equal(found, both)
    # The path of the state does not matter. A state without its model has the names of its keys.
    train.export_safetensors({"a state": state, "model": model}, path)
    assert "model.0.norm.running_var" in load_file(path)
    # If there are two copies of a model, the first copy owns the state.
    train.export_safetensors({"model": model, "of": [{"average": model}], "state": state}, path)
    assert sum("running_var" in name for name in load_file(path)) == 1
    assert "model.0.norm.running_var" in load_file(path)
    train.export_safetensors(state, path)
    assert f"list[0].{own}" in load_file(path)
    assert eqx.tree_equal(train.import_safetensors(other, path), state)


def test_state_of_a_stack_has_the_numbers_of_its_layers(path, getkey):
    class Layer(nn.StatefulLayer):
        norm: nn.BatchNorm

        def __init__(self, key):
            self.norm = nn.BatchNorm(2, batched=True, mode="batch")

        def __call__(self, x, state, *, key=None):
            return self.norm(x, state)

    stack, state = nn.make_with_state(lambda key: nn.ScanStack(Layer, 3, key=key))(getkey())
    leaves, treedef = jax.tree.flatten(state)
    numbers = [jnp.arange(a.size, dtype=a.dtype).reshape(a.shape) for a in leaves]
    state = treedef.unflatten(numbers)
    before_frozen = nn.freeze(stack, lambda stack: stack[1:2])
    make = lambda key: nn.freeze(nn.ScanStack(Layer, 3, key=key), lambda stack: stack[1:2])
    frozen, other = nn.make_with_state(make)(getkey())
    for both in [(stack, state), (before_frozen, state), (frozen, other)]:
        train.export_safetensors(both, path)
        found = load_file(path)
        names = [f"0.{i}.norm.running_var" for i in range(3)]
        assert sorted(name for name in found if "running_var" in name) == names
        like = eqx.filter_eval_shape(lambda both=both: both)
        assert eqx.tree_equal(train.import_safetensors(like, path), both)
        copies = {"average": both[0], "model": both[0], "state": both[1]}
        train.export_safetensors(copies, path)
        of_first = [f"average.{i}.norm.running_var" for i in range(3)]
        assert sorted(name for name in load_file(path) if "running_var" in name) == of_first
        if both[1] is state:
            assert found[names[2]].tolist() == [4, 5]
            assert found["0.1.norm.batch_counter"].tolist() == 1


def test_names_of_earlier_versions_are_read(path, getkey):
    make = lambda key: {"net": Net(True, key=key), "norm": nn.BatchNorm(2, "batch", mode="batch")}
    both = nn.make_with_state(make)(getkey())
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(both, eqx.is_array))
    dotted = lambda keys: ".".join(jax.tree_util.keystr((key,), simple=True) for key in keys)
    arrays = {dotted(keys): np.asarray(leaf) for keys, leaf in leaves}
    assert {"0.net.blocks.layers.layers.0.weight", "1._values.1.0"} < arrays.keys()
    save_file(arrays, path)
    like = eqx.filter_eval_shape(lambda: both)
    assert eqx.tree_equal(train.import_safetensors(like, path), both)
