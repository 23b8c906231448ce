"""Neural differential equations trained on the handwritten digits of scikit-learn.

scikit-learn bundles no time series. The rows of an image serve as one: eight values at each of
eight times.
"""

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from sklearn import datasets

from tests.downstream.registry import Programs

programs = Programs()

IMAGES = 64
CLASSES = 10


def digits():
    """The first images, with pixels between 0 and 1, and their labels."""
    images, labels = datasets.load_digits(return_X_y=True)
    return jnp.asarray(images[:IMAGES] / 16), jnp.asarray(labels[:IMAGES])


class Field(eqx.Module):
    network: eqx.nn.MLP

    def __call__(self, t, y, args):
        return self.network(y)


class ContinuousDepth(eqx.Module):
    """A residual network in the limit of many thin layers (Chen et al., 2018)."""

    encoder: eqx.nn.Linear
    field: Field
    readout: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.encoder = eqx.nn.Linear(64, 8, key=keys[0])
        self.field = Field(eqx.nn.MLP(8, 8, 16, 1, activation=jnp.tanh, key=keys[1]))
        self.readout = eqx.nn.Linear(8, CLASSES, key=keys[2])

    def __call__(self, image, adjoint):
        found = dfx.diffeqsolve(
            dfx.ODETerm(self.field),
            dfx.Tsit5(),
            0.0,
            1.0,
            None,
            self.encoder(image),
            stepsize_controller=dfx.PIDController(rtol=1e-3, atol=1e-4),
            adjoint=adjoint,
            max_steps=64,
        )
        return self.readout(found.ys[-1])


class ControlledField(eqx.Module):
    network: eqx.nn.MLP

    def __call__(self, t, y, args):
        return self.network(y).reshape(8, 9)


class RowByRow(eqx.Module):
    """A neural controlled differential equation, driven by the rows (Kidger et al., 2020)."""

    field: ControlledField
    start: eqx.nn.Linear
    readout: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        network = eqx.nn.MLP(8, 72, 16, 1, final_activation=jnp.tanh, key=keys[0])
        self.field = ControlledField(network)
        self.start = eqx.nn.Linear(9, 8, key=keys[1])
        self.readout = eqx.nn.Linear(8, CLASSES, key=keys[2])

    def __call__(self, image, adjoint):
        times = jnp.linspace(0, 1, 8)
        rows = jnp.concatenate([times[:, None], image.reshape(8, 8)], axis=1)
        control = dfx.CubicInterpolation(times, dfx.backward_hermite_coefficients(times, rows))
        found = dfx.diffeqsolve(
            dfx.ControlTerm(self.field, control).to_ode(),
            dfx.Heun(),
            0.0,
            1.0,
            1 / 8,
            self.start(rows[0]),
            adjoint=adjoint,
            max_steps=16,
        )
        return self.readout(found.ys[-1])


OPTIMISER = optax.adam(3e-2)


@eqx.filter_jit
def step(model, state, adjoint, images, labels):
    """A step of Adam. Also returns the loss and the accuracy before the step."""

    def loss(model):
        logits = jax.vmap(model, (0, None))(images, adjoint)
        right = jnp.mean(jnp.argmax(logits, axis=1) == labels)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses), right

    (value, right), gradient = eqx.filter_value_and_grad(loss, has_aux=True)(model)
    updates, state = OPTIMISER.update(gradient, state)
    return eqx.apply_updates(model, updates), state, value, right


def trained(make, adjoint, steps):
    model = make(jax.random.key(11))
    state = OPTIMISER.init(eqx.filter(model, eqx.is_inexact_array))
    images, labels = digits()
    losses, shares = [], []
    for _ in range(steps):
        model, state, value, right = step(model, state, adjoint, images, labels)
        losses.append(value)
        shares.append(right)
    losses, shares = jnp.stack(losses), jnp.stack(shares)
    assert losses[-1] < losses[0]
    return {"losses": losses, "right": shares, "model": eqx.filter(model, eqx.is_array)}


@programs.sample
def network_of_continuous_depth():
    return trained(ContinuousDepth, dfx.RecursiveCheckpointAdjoint(), steps=20)


@programs.add
def network_of_continuous_depth_solved_back():
    return trained(ContinuousDepth, dfx.BacksolveAdjoint(), steps=5)


@programs.add
def network_of_continuous_depth_direct():
    return trained(ContinuousDepth, dfx.DirectAdjoint(), steps=5)


@programs.sample
def rows_that_drive_an_equation():
    return trained(RowByRow, dfx.RecursiveCheckpointAdjoint(), steps=20)
