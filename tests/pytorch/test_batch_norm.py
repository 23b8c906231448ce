import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from eqxlike import nn
from tests.pytorch.compare import Counterpart, assert_computes_the_same

AFFINE = {"0.weight": "weight", "0.bias": "bias"}


def make(**options):
    return lambda key, dtype: nn.make_with_state(nn.BatchNorm)(
        3, dtype=dtype, mode="batch", **options
    )


def one_by_one(pair, x):
    norm, state = pair
    return jax.vmap(norm, in_axes=(0, None), out_axes=(0, None), axis_name="batch")(x, state)[0]


def at_once(pair, x):
    norm, state = pair
    return norm(x, state)[0]


COUNTERPARTS = {
    "batch": Counterpart(
        make(axis_name="batch"),
        lambda: torch.nn.BatchNorm1d(3),
        ((5, 3),),
        AFFINE,
        call_ours=one_by_one,
    ),
    "space": Counterpart(
        make(axis_name="batch", eps=0.1),
        lambda: torch.nn.BatchNorm2d(3, eps=0.1),
        ((5, 3, 2, 4),),
        AFFINE,
        call_ours=one_by_one,
    ),
    "plain": Counterpart(
        make(axis_name="batch", channelwise_affine=False),
        lambda: torch.nn.BatchNorm1d(3, affine=False),
        ((5, 3, 4),),
        call_ours=one_by_one,
    ),
    "batched": Counterpart(
        make(batched=True), lambda: torch.nn.BatchNorm3d(3), ((5, 3, 2, 1, 2),), AFFINE, at_once
    ),
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", COUNTERPARTS)
def test_training_computes_what_pytorch_does(name, dtype):
    assert_computes_the_same(COUNTERPARTS[name], dtype)


# Exact in float32, the dtype of PyTorch's running averages.
MEAN, VARIANCE = np.array([1.0, -2.0, 0.5]), np.array([0.25, 2.0, 5.0])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_inference_computes_what_pytorch_does(dtype):
    def pytorch():
        layer = torch.nn.BatchNorm1d(3).eval()
        layer.running_mean += torch.tensor(MEAN)
        layer.running_var *= torch.tensor(VARIANCE)
        return layer

    def ours(key, dtype):
        norm, state = nn.make_with_state(nn.BatchNorm)(
            3, "batch", mode="batch", momentum=0.5, inference=True, dtype=dtype
        )
        # After one batch, half of each running average is the initial mean 0 or variance 1.
        running = jnp.asarray(0.5 * MEAN, dtype), jnp.asarray(0.5 * VARIANCE + 0.5, dtype)
        return norm, state.set(norm.batch_state_index, running).set(norm.batch_counter, 1)

    counterpart = Counterpart(ours, pytorch, ((5, 3),), AFFINE, call_ours=one_by_one)
    assert_computes_the_same(counterpart, dtype)


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("momentum", [0.9, 0.5])
def test_running_averages_equal_averages_of_pytorch(momentum, unbiased):
    # PyTorch's momentum is `1 - momentum`. PyTorch divides the variance by n - 1.
    theirs = torch.nn.BatchNorm1d(3, momentum=1 - momentum)
    norm, state = nn.make_with_state(nn.BatchNorm)(
        3, "batch", mode="batch", momentum=momentum, unbiased=unbiased
    )
    random = np.random.default_rng(0)
    for _ in range(3):
        x = random.normal(2, 3, size=(8, 3)).astype("float32")
        theirs(torch.tensor(x))
        _, state = jax.vmap(norm, (0, None), (0, None), axis_name="batch")(jnp.asarray(x), state)
    mean, variance = state.get(norm.batch_state_index)
    from_start = momentum**3
    share = 1 if unbiased else 7 / 8
    their_variance = (theirs.running_var.numpy() - from_start) * share + from_start
    np.testing.assert_allclose(mean, theirs.running_mean.numpy(), rtol=1e-5)
    np.testing.assert_allclose(variance, their_variance, rtol=1e-5)


def test_training_continues_from_imported_statistics_as_in_pytorch():
    theirs = torch.nn.BatchNorm1d(3)
    theirs.running_mean += torch.tensor(MEAN)
    theirs.running_var *= torch.tensor(VARIANCE)
    norm, state = nn.make_with_state(nn.BatchNorm)(
        3, mode="batch", momentum=0.9, batched=True, unbiased=True
    )
    running = (jnp.asarray(each, jnp.float32) for each in (MEAN, VARIANCE))
    state = state.set(norm.batch_state_index, tuple(running))
    random = np.random.default_rng(0)
    for _ in range(3):
        x = random.normal(2, 3, size=(8, 3)).astype("float32")
        theirs.train()(torch.tensor(x))
        _, state = norm(jnp.asarray(x), state)
        found, _ = norm(jnp.asarray(x), state, inference=True)
        expected = theirs.eval()(torch.tensor(x)).detach().numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
