"""What the optimiser keeps of a parameter is split as the parameter."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from eqxlike import Module, nn, train
from eqxlike.train import Sharding

MESH = AbstractMesh((4,), ("data",))


def of_state(model, optimiser, rules):
    state = train.TrainState.create(model, optimiser, key=jax.random.key(0))
    found = Sharding(MESH, rules).of_state(state)
    return jax.tree.map(lambda sharding: sharding.spec, found)


@pytest.fixture
def linear(getkey):
    return nn.Linear(8, 4, key=getkey())


def test_moments_lie_as_their_parameters(linear):
    found = of_state(linear, optax.adam(0.1), {"weight": P(None, "data")})
    adam = found.optimiser_state[0]
    assert adam.mu.weight == adam.nu.weight == found.model.weight == P(None, "data")
    assert adam.mu.bias == adam.count == P()


def test_all_else_is_whole_on_each_device(linear):
    found = of_state(linear, optax.adam(0.1), P("data"))
    assert found.step == found.key == found.is_halted == P()


def test_optimisers_that_see_a_part_of_the_model_follow_too(linear):
    def labels(model):
        return jax.tree.map(lambda leaf: "matrix" if leaf.ndim == 2 else "rest", model)

    inner = {"matrix": optax.adam(0.1), "rest": optax.sgd(0.1, 0.9)}
    optimiser = optax.multi_transform(inner, labels)
    found = of_state(linear, optimiser, P("data"))
    states = found.optimiser_state.inner_states
    assert states["matrix"].inner_state[0].nu.weight == P("data")
    assert states["rest"].inner_state[0].trace.bias == P("data")


def test_histories_have_axes_of_their_own_before(linear):
    found = of_state(linear, optax.scale_by_lbfgs(memory_size=3), {"weight": P("data")})
    assert found.optimiser_state.diff_params_memory.weight == P(None, "data")
    assert found.optimiser_state.params.weight == P("data")


def test_factors_of_moments_are_whole(getkey):
    linear = nn.Linear(128, 128, key=getkey())
    optimiser = optax.scale_by_factored_rms()
    found = of_state(linear, optimiser, {"weight": P("data")})
    assert found.optimiser_state.v_row.weight == P()
    found = of_state(linear, optimiser, {"bias": P("data")})
    assert found.optimiser_state.v.bias == P("data")


def test_states_within_states_follow(linear):
    optimiser = optax.MultiSteps(optax.chain(optax.clip(1.0), optax.adam(0.1)), 2)
    found = of_state(linear, optimiser.gradient_transformation(), {"weight": P("data")})
    assert found.optimiser_state.acc_grads.weight == P("data")
    assert found.optimiser_state.inner_opt_state[1][0].mu.weight == P("data")


def test_parameters_with_names_of_the_optimiser_are_told_apart():
    class Inner(Module):
        weight: jax.Array

    class Confusing(Module):
        mu: Inner
        weight: jax.Array
        count: jax.Array

    model = Confusing(Inner(jnp.ones(4)), jnp.ones(4), jnp.ones(4))
    found = of_state(model, optax.adam(0.1), {"mu.weight": P("data")})
    adam = found.optimiser_state[0]
    assert (adam.mu.mu.weight, adam.mu.weight, adam.nu.weight) == (P("data"), P(), P())
    found = of_state(model, optax.adam(0.1), {"count": P("data")})
    adam = found.optimiser_state[0]
    assert (adam.count, adam.mu.count) == (P(), P("data"))


def test_model_may_be_one_array():
    found = of_state(jnp.ones(4), optax.adam(0.1), P("data"))
    assert found.optimiser_state[0].mu == P("data")
    assert found.optimiser_state[0].count == P()


def test_frozen_parameters_have_no_moments(linear):
    frozen = nn.freeze(linear, lambda linear: linear.weight)
    found = of_state(frozen, optax.adam(0.1), P("data"))
    assert jax.tree.leaves(found.optimiser_state[0].mu) == [P("data")]


def test_what_is_no_state_is_refused(linear):
    with pytest.raises(TypeError, match="Sharding expected a TrainState, and got Linear"):
        Sharding(MESH, {}).of_state(linear)
