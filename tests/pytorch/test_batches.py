"""Training on batches from PyTorch's `DataLoader`."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from eqxlike import nn, train

X = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)


def test_training_with_a_loader_equals_training_with_arrays_and_traces_once():
    traced, optimiser = [], optax.sgd(0.1)

    def loss(model, batch, key):
        traced.append(batch)
        return jnp.mean(jax.vmap(model)(batch["x"].astype(jnp.float32)) ** 2)

    step = train.make_step(loss, optimiser)
    model = nn.Linear(3, 2, key=jax.random.key(0))
    state = train.TrainState.create(model, optimiser, key=jax.random.key(1))
    arrays = [{"x": x} for x in X.reshape(3, 4, 3)] * 2
    expected = train.fit(state, step, arrays, num_steps=6).history
    for change, rtol in [
        (lambda x: x, 1e-6),
        (lambda x: x.requires_grad_(), 1e-6),
        (lambda x: x.bfloat16(), 2e-2),
    ]:
        data = [{"x": change(torch.tensor(x)), "index": i} for i, x in enumerate(X)]
        loader = torch.utils.data.DataLoader(data, 4)
        traced.clear()
        found = train.fit(state, step, train.repeat(loader), num_steps=6, steps_per_call=2)
        assert found.stopped == "finished"
        assert len(traced) <= 2
        np.testing.assert_allclose(found.history, expected, rtol=rtol)
    result = train.fit(state, step, loader, num_steps=6)
    assert (result.stopped, len(result.history)) == ("exhausted", 3)
    with pytest.raises(TypeError, match=r"batch\['x'\] is a Tensor that NumPy cannot read: .*meta"):
        train.fit(state, step, [{"x": torch.zeros(2, device="meta")}], num_steps=1)
    with pytest.raises(TypeError, match=r"batch\['x'\] is a Tensor, so the step would be"):
        step(state, {"x": torch.tensor(X)})

    def measure(model, batch):
        return {"mean": jnp.mean(batch["x"])}

    batches = torch.utils.data.DataLoader([{"x": torch.tensor(x)} for x in X], 5)
    found = train.make_evaluate(measure, batches)(state)
    np.testing.assert_allclose(found["mean"], X.mean(), rtol=1e-5)


def test_shuffled_loader_resumes_in_the_middle_of_an_epoch(tmp_path):
    optimiser = optax.sgd(0.1)

    def loss(model, x, key):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    def batches():
        data = [{"x": torch.tensor(x), "name": "a"} for x in X]
        shuffle = torch.Generator().manual_seed(0)
        loader = torch.utils.data.DataLoader(data, 4, shuffle=True, generator=shuffle)
        return train.batches_from(loader, columns=["x"], convert=lambda batch: batch["x"])

    step = train.make_step(loss, optimiser)
    model = nn.Linear(3, 2, key=jax.random.key(0))
    state = train.TrainState.create(model, optimiser, key=jax.random.key(1))
    whole = train.fit(state, step, batches(), num_steps=8)
    # Each epoch has three batches, in a new order.
    assert len({round(loss, 4) for loss in whole.history}) == 8
    train.fit(state, step, batches(), num_steps=5, callbacks=[train.Checkpoint(tmp_path, every=5)])
    resumed = train.fit(state, step, batches(), num_steps=8, resume_from=tmp_path)
    assert resumed.history == whole.history[5:]
    assert type(next(batches())) is np.ndarray


class Stateful(torch.utils.data.DataLoader):
    """Has a state that contains tensors, like torchdata's `StatefulDataLoader`."""

    drawn, start = 0, 0

    def state_dict(self):
        return {"drawn": self.drawn, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.loaded = state["generator"]
        self.start = state["drawn"]

    def __iter__(self):
        self.drawn, self.start = self.start, 0
        for batch in list(super().__iter__())[self.drawn :]:
            self.drawn += 1
            yield batch


def test_state_of_a_loader_may_contain_tensors():
    loaders = [Stateful(X, 4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    first, second = map(train.batches_from, loaders)
    next(first)
    second.seek(json.loads(json.dumps(first.position)))
    np.testing.assert_array_equal(next(second), next(first))
    assert loaders[1].loaded.equal(loaders[0].generator.get_state())


def test_seeded_loader_resumes_after_earlier_use():
    seeded = torch.Generator().manual_seed(0)
    loader = torch.utils.data.DataLoader(X, 4, shuffle=True, generator=seeded)
    batches = train.batches_from(loader)
    for _ in range(4):
        next(batches)
    position = json.loads(json.dumps(batches.position))
    expected = [next(batches) for _ in range(6)]
    for again in (train.batches_from(loader), batches):
        again.seek(position)
        np.testing.assert_array_equal([next(again) for _ in range(6)], expected)
    unseeded = train.batches_from(torch.utils.data.DataLoader(X, 4, shuffle=True))
    next(unseeded)
    with pytest.warns(UserWarning, match="DataLoader shuffles without a seed"):
        unseeded.seek(unseeded.position)
