"""Progress meters inside compiled programs."""

import sys
import types
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest

from eqxlike import internal


def solve(meter, num_steps):
    """A function whose steps report progress, multiplied by `x`."""

    def of_x(x):
        def step(state, number):
            return meter.step(state, (number + 1) * x / num_steps), None

        state, _ = jax.lax.scan(step, meter.init(), jnp.arange(float(num_steps)))
        meter.close(state)
        return x**2

    return of_x


WAYS = {
    "jit": lambda of_x: jax.jit(of_x)(1.0),
    "eager": lambda of_x: of_x(1.0),
    "vmap, different": lambda of_x: jax.jit(jax.vmap(of_x))(jnp.array([2.0, 1.0, 3.0])),
    "grad": lambda of_x: jax.jit(jax.grad(of_x))(1.0),
}


def printed(capfd, way, meter):
    WAYS[way](solve(meter, 8))
    jax.effects_barrier()
    return capfd.readouterr()


def test_text_meter_prints_after_each_minimum_increase(capfd):
    for way in ("jit", "vmap, different"):
        out, _ = printed(capfd, way, internal.TextProgressMeter(0.2))
        assert out.split() == ["0.00%", "25.00%", "50.00%", "75.00%", "100.00%"]


def test_differentiated_and_repeated_solves_print_their_own_progress(capfd):
    out, _ = printed(capfd, "grad", internal.TextProgressMeter(0.4))
    assert out.split() == ["0.00%", "50.00%", "100.00%"]
    of_x = jax.jit(solve(internal.TextProgressMeter(0.6), 8))
    for _ in range(2):
        of_x(1.0)
        jax.effects_barrier()
    assert capfd.readouterr().out.split() == ["0.00%", "62.50%", "100.00%"] * 2


def test_no_progress_meter_prints_nothing(capfd):
    assert printed(capfd, "grad", internal.NoProgressMeter()) == ("", "")


class FakeBar:
    """The methods of a tqdm bar that a meter uses."""

    made: ClassVar[list[Any]] = []

    def __init__(self, *, total, **options):
        self.n, self.total, self.shown, self.is_closed = 0, total, [], False
        FakeBar.made.append(self)

    def update(self, increase):
        self.n += increase
        self.shown.append(self.n)

    def close(self):
        self.is_closed = True


@pytest.fixture
def tqdm(monkeypatch):
    FakeBar.made.clear()
    module = types.ModuleType("tqdm")
    vars(module)["tqdm"] = FakeBar
    monkeypatch.setitem(sys.modules, "tqdm", module)


def test_bar_is_updated_after_every_refresh_steps(tqdm):
    for way in ("eager", "vmap, different", "grad"):
        WAYS[way](solve(internal.TqdmProgressMeter(refresh_steps=4), 8))
        jax.effects_barrier()
    assert [(bar.shown, bar.is_closed) for bar in FakeBar.made] == [([12.5, 62.5, 100.0], True)] * 3


def test_missing_tqdm_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    message = "TqdmProgressMeter needs tqdm: `pip install tqdm`, or use TextProgressMeter."
    with pytest.raises(ImportError, match=message):
        internal.TqdmProgressMeter()
