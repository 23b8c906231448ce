"""Training over batches of PyTorch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from eqxlike import nn, train

X = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)


def test_a_loader_trains_as_arrays_do_over_epochs_and_is_traced_once():
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
    with pytest.raises(TypeError, match=r"batch\['x'\] is a Tensor, and the step would be"):
        step(state, {"x": torch.tensor(X)})

    def measure(model, batch):
        return {"mean": jnp.mean(batch["x"])}

    batches = torch.utils.data.DataLoader([{"x": torch.tensor(x)} for x in X], 5)
    found = train.make_evaluate(measure, batches)(state)
    np.testing.assert_allclose(found["mean"], X.mean(), rtol=1e-5)
