"""Outputs that come back as arguments are one trace."""

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax

from eqxlike import apply_updates, filter, filter_value_and_grad, is_array, nn
from tests.transforms.jit.traced import Affine, Traced


def test_returned_model_fed_back_100_times_is_one_trace():
    traced = Traced(lambda model: jtu.tree_map(lambda w: 0.9 * w if is_array(w) else w, model))
    model = nn.MLP(2, 2, 4, 2, key=jax.random.key(0))
    for _ in range(100):
        model = traced(model)
    assert traced.count == 1


def test_returned_model_with_a_list_inside_fed_back_100_times_is_one_trace():
    traced = Traced(lambda model: jtu.tree_map(lambda w: 0.9 * w if is_array(w) else w, model))
    model = Affine([jnp.ones(2), {"a": jnp.ones(3)}], "b")
    for _ in range(100):
        model = traced(model)
    assert traced.count == 1


def test_training_step_of_100_turns_is_one_trace():
    optimiser = optax.sgd(1e-3, momentum=0.9)

    @Traced
    def step(model, state, x, y):
        def loss(model):
            return jnp.mean((jax.vmap(model)(x) - y) ** 2)

        value, gradients = filter_value_and_grad(loss)(model)
        updates, state = optimiser.update(gradients, state)
        return apply_updates(model, updates), state, value

    model = nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    state = optimiser.init(filter(model, is_array))
    for index in range(100):
        model, state, _ = step(model, state, jnp.full((3, 2), index / 100), jnp.ones((3, 1)))
    assert step.count == 1


def test_donated_model_fed_back_100_times_is_one_trace():
    traced = Traced(lambda model: jtu.tree_map(lambda w: w + 1, model), donate="all")
    model = Affine(jnp.zeros(2), (jnp.zeros(3),))
    for _ in range(100):
        model = traced(model)
    assert traced.count == 1


def test_model_passed_between_two_functions_is_one_trace_of_each():
    grow = Traced(lambda model: jtu.tree_map(lambda w: w + 1, model))
    shrink = Traced(lambda model: jtu.tree_map(lambda w: w - 1, model))
    model = Affine(jnp.zeros(2), (jnp.zeros(3),))
    for _ in range(10):
        model = shrink(grow(model))
    assert (grow.count, shrink.count) == (1, 1)


def test_optax_state_made_anew_is_one_trace():
    traced = Traced(lambda state: jtu.tree_map(lambda leaf: leaf + 1, state))
    for _ in range(3):
        state = optax.adam(1e-3).init({"a": jnp.ones(2), "b": jnp.ones(3)})
        traced(traced(state))
    assert traced.count == 1


def test_six_statics_in_turn_are_six_traces():
    traced = Traced(lambda x, how: x)
    for _ in range(5):
        for how in "abcdef":
            traced(jnp.ones(2), how)
    assert traced.count == 6
