"""The auxiliary outputs of a loss in the logs."""

import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqxlike as eqx
from eqxlike import train
from tests.train.event_files import scalars
from tests.train.linear import make_state

OPTIMISER = optax.sgd(0.1)
BATCHES = [np.full((4, 2), value, np.float32) for value in (1, 2, np.nan, 4, 5, 6, 7)]
# The values of the logs after 2, 4, 6 and 7 steps. The third step is skipped.
MEANS = [1.5, 4.0, 5.5, 7.0]


def loss(model, x, key):
    aux = {"mean": x.mean(), "large": x.mean() > 4.5, "count": 3}
    aux |= {"per_example": x, "nested": {"a": 1.0}, "text": "a"}
    return jnp.mean(jax.vmap(model)(x) ** 2), aux


class Told(train.Callback):
    def __init__(self):
        self.aux = []

    def on_start(self, run):
        assert run.aux == {}

    def on_log(self, run):
        self.aux.append(run.aux)


def compiled():
    return train.make_step(loss, OPTIMISER, has_aux=True, check_finite="skip")


def plain():
    step = compiled()
    return lambda state, batch: step(state, batch)


@pytest.mark.parametrize(("make", "steps_per_call"), [(compiled, 1), (compiled, 3), (plain, 1)])
def test_logs_have_the_means_of_its_numbers_since_the_last_log(make, steps_per_call, tmp_path):
    told, lines, out = Told(), train.JsonLines(tmp_path / "log"), io.StringIO()
    callbacks = [told, lines, train.TensorBoard(tmp_path / "curves"), train.Progress(stream=out)]
    options = {"num_steps": 7, "steps_per_call": steps_per_call, "log_every": 2}
    train.fit(make_state(OPTIMISER), make(), BATCHES, **options, callbacks=callbacks)
    assert [aux["mean"] for aux in told.aux] == MEANS
    assert [aux["large"] for aux in told.aux] == [0.0, 0.0, 1.0, 1.0]
    assert [sorted(aux) for aux in told.aux] == [["count", "large", "mean"]] * 4
    events = map(json.loads, lines.path.read_text().splitlines())
    assert [event["aux"]["mean"] for event in events if event["event"] == "log"] == MEANS
    assert [value for _, value in scalars(tmp_path / "curves")["train/mean"]] == MEANS
    assert "mean 5.5" in out.getvalue()


def test_a_custom_step_may_return_arrays_of_its_state():
    @eqx.filter_jit(donate=("state",))
    def advance(state):
        return eqx.tree_at(lambda state: state.step, state, state.step + 1)

    def step(state, batch):
        state = advance(state)
        return state, jnp.zeros(()), {"step": state.step}

    for steps_per_call in (1, 2):
        told = Told()
        options = {"num_steps": 6, "steps_per_call": steps_per_call, "log_every": 3}
        train.fit(make_state(OPTIMISER), step, BATCHES, **options, callbacks=[told])
        assert told.aux == [{"step": 2.0}, {"step": 5.0}]
