"""What `ad.compare` measures beside the gradient, and how long it may take."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from eqxlike import _timing, ad
from eqxlike.ad._measuring import (
    Pace,
    Times,
    freshly_compiled,
    time_interleaved,
    work,
)
from tests.ad.broken_modes import PARAMETERS, compare, loss, row_of


def test_program_is_that_of_jax(comparison):
    def flat(b, w):
        return loss({"b": b, "w": w}, 2)

    b, w = PARAMETERS["b"], PARAMETERS["w"]
    compiled = jax.jit(jax.value_and_grad(flat, (0, 1))).lower(b, w).compile()
    row = row_of(comparison, "right")
    assert row.peak_bytes == compiled.memory_analysis().temp_size_in_bytes
    assert row.compiled_operations > 0


def test_operations_inside_of_operations_count():
    def steps(x):
        return jax.lax.scan(lambda x, _: (jnp.sin(x) * 2, None), x, None, 5)[0]

    program = freshly_compiled(steps, (jnp.float32(1.0),))
    assert program.traced_operations == 3
    assert work(jax.make_jaxpr(steps)(1.0).jaxpr) == program.work == 1 + 5 * 2


def test_rounds_are_as_many_as_asked_for():
    rows = ad.compare(jnp.sum, jnp.ones(2), modes=[ad.Reverse()] * 2, rounds=3, reference=None).rows
    assert [row.rounds for row in rows] == [3, 3]


def test_time_of_a_program_is_predicted_by_what_it_computes():
    pace = Pace(call_s=1e-3, work=10, budget_s=1.0)
    program = freshly_compiled(jnp.sum, (jnp.ones(2),))
    assert pace.complaint(dataclasses.replace(program, work=10 * 20_000)) is None
    assert pace.complaint(dataclasses.replace(program, work=10 * 40_000)) == (
        "it computes about 40,000 times as much as the function alone, which is about 40 s a call"
    )


def test_what_would_take_hours_is_not_run():
    def of_many(x):
        return jnp.sum(x**2)

    modes = [ad.FiniteDifference()]
    x = jnp.ones(100_000)
    (row,) = compare(of_many, x, modes=modes, reference=None, budget_s=1e-9).rows
    assert row.verdict == "error"
    assert re.match(r"Not run: it computes about 1,[0-9,]* times as much as", row.explanation)
    assert row.explanation.endswith("Where that is wanted, give a larger `budget_s`.")


def test_reference_that_would_take_hours_is_an_error_that_says_so():
    with pytest.raises(ValueError, match="would take too long: it computes about") as caught:
        compare(jnp.sum, jnp.ones(100_000), budget_s=1e-9)
    assert "such as `ad.Reverse()`, or none, `reference=None`." in str(caught.value)


def test_one_disturbed_call_does_not_decide_how_many_fill_a_round(monkeypatch):
    times_us = iter([50_000.0, 10.0, 10.0])
    monkeypatch.setattr(_timing, "completion_us", lambda *_: next(times_us, 10.0))
    timed = _timing.Timed(lambda: jnp.ones(()), warm_up=1)
    assert timed.count == _timing.calls_for(_timing.TARGET_S, 10e-6)


def test_function_that_fails_while_it_is_timed_stops_no_other():
    num_left = 6

    def failing():
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise RuntimeError("out of luck")
        return jnp.ones(())

    calls = {"base": lambda: jnp.ones(()), "fails": failing, "other": lambda: jnp.ones(())}
    times = {name: Times() for name in calls}
    time_interleaved("base", calls, times, rounds=3, budget_s=10)
    assert str(times["fails"].failure) == "out of luck"
    assert len(times["other"].completion_us) == 3


def test_interrupt_while_timing_leaves_the_rounds_before():
    turns = 0

    def interrupted():
        nonlocal turns
        turns += 1
        if len(times["base"].completion_us) == 2:
            raise KeyboardInterrupt
        return jnp.ones(())

    calls = {"base": lambda: jnp.ones(()), "interrupted": interrupted}
    times = {name: Times() for name in calls}
    with pytest.raises(KeyboardInterrupt):
        time_interleaved("base", calls, times, rounds=5, budget_s=10)
    assert len(times["interrupted"].completion_us) >= 1
