import functools
import gc
import re
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import ad, nn
from eqxlike.ad import _choose
from tests.ad.broken_modes import MODES, Broken

choose = functools.partial(ad.choose, rounds=1)


RIGHT = ad.Reverse()
NOTHING = Broken(lambda gradient: [each * 0 for each in gradient])
NAN = Broken(lambda gradient: [each * jnp.nan for each in gradient])
RAISES = MODES["raises"]


def energy(x):
    return jnp.sum(jnp.sin(x) ** 2)


# What is chosen


def test_mode_that_is_not_right_is_not_chosen():
    assert choose(energy, jnp.arange(3.0), modes=[NOTHING, NAN, RAISES, RIGHT]) is RIGHT


def test_default_modes_serve_in_every_place():
    mode = choose(energy, jnp.arange(3.0))
    assert type(mode) in (ad.Reverse, ad.Checkpointed, ad.Forward)
    found = jax.jit(jax.vmap(eqx.filter_grad(energy, mode=mode)))(np.ones((2, 3), "f"))
    np.testing.assert_allclose(found, np.full((2, 3), np.sin(2.0)), rtol=1e-6)


def test_modes_that_differ_at_a_kink_are_both_right():
    x = jnp.array([0.0, 1.0])
    modes = [RIGHT, ad.FiniteDifference()]
    assert choose(lambda x: jnp.sum(jax.nn.relu(x)), x, modes=modes) in modes


def test_nothing_but_wrong_modes_is_an_error_that_says_what_each_did():
    message = (
        "`ad.choose`: no mode has a gradient that is right.\n"
        "nan: Not finite: 3 of the 3 derivatives by args[0].\n"
        "raises: ValueError: no rule for this"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        choose(energy, jnp.arange(3.0), modes={"nan": NAN, "raises": RAISES})


def test_modes_that_disagree_where_nothing_decides_are_an_error():
    def stuck(x):
        return jax.lax.scan(lambda carry, _: (carry * x, None), jnp.float32(1), None, 2)[0]

    with pytest.raises(ValueError, match="the gradients by right, nothing do not agree") as caught:
        choose(stuck, jnp.array(2.0), modes={"right": RIGHT, "nothing": NOTHING})
    assert "has no gradient in float64" in str(caught.value)
    assert str(caught.value).endswith("Way out: `modes` that agree.")


X = jnp.ones(2)


def test_bad_input_is_an_error():
    for error, message, args, options in [
        (TypeError, "`ad.choose` expects a function", (3, X), {}),
        (TypeError, "must return a pair (value, aux)", (jnp.sum, X), {"has_aux": True}),
        (ValueError, "`ad.choose` expects at least one mode", (jnp.sum, X), {"modes": []}),
        (ValueError, "ad.choose: rounds must be", (jnp.sum, X), {"rounds": 0}),
        (ValueError, "ad.choose: budget_s must be", (jnp.sum, X), {"budget_s": 0}),
    ]:
        with pytest.raises(error, match=re.escape(message)):
            ad.choose(*args, **options)


def test_traced_array_is_an_error_that_names_it():
    with pytest.raises(TypeError, match=re.escape("args[0] is traced. Call it outside.")):
        eqx.filter_jit(lambda x: ad.choose(energy, x))(jnp.ones(3))


# What is remembered


@pytest.fixture
def measured(monkeypatch):
    """The calls that were measured, in which nothing is."""
    calls = []

    def fastest(f, args, named, *options):
        calls.append((f, args, *options))
        return next(iter(named))

    monkeypatch.setattr(_choose, "_fastest", fastest)
    eqx.clear_caches()
    yield calls
    eqx.clear_caches()


class Model(eqx.Module):
    weight: object

    def __call__(self, x):
        return jnp.sum(self.weight * x)


def test_choice_is_the_very_mode_that_was_given(measured):
    modes = {"mine": ad.Forward(3)}
    for _ in range(2):
        assert choose(energy, jnp.ones(2), modes=modes) is modes["mine"]
    assert len(measured) == 1


def test_choice_is_remembered_for_the_same_form(measured):
    for first, second in [
        ((energy, jnp.ones(2)), (energy, jnp.zeros(2))),
        ((Model(jnp.ones(2)), X), (Model(jnp.zeros(2)), X)),
        ((Model(jnp.ones(2)).__call__, X), (Model(jnp.zeros(2)).__call__, X)),
    ]:
        assert times_measured(measured, first, second) == 1


def times_measured(measured, *calls):
    """How often the calls measure from scratch."""
    eqx.clear_caches()
    measured.clear()
    for call in calls:
        choose(*call)
    return len(measured)


WEAK = jnp.asarray(1.0)


def test_choice_is_measured_anew_for_another_form(measured):
    for first, second in [
        ((energy, jnp.ones(2)), (energy, jnp.ones(3))),
        ((energy, jnp.ones(2)), (energy, jnp.ones(2, jnp.float16))),
        ((energy, WEAK), (energy, jax.lax.convert_element_type(WEAK, jnp.float32))),
        ((energy, X, 1), (energy, X, 1.0)),
        ((Model(X), X), (nn.freeze(Model(X)), X)),
    ]:
        assert times_measured(measured, first, second) == 2


def test_choice_is_measured_anew_for_other_options(measured):
    for options in [
        {"modes": [ad.Reverse()]},
        {"modes": {"Reverse()": ad.Forward(), "Checkpointed()": RIGHT, "Forward(chunk=64)": RIGHT}},
        {"modes": [ad.Checkpointed(), ad.Reverse(), ad.Forward(64)]},
        {"has_aux": True},
        {"rounds": 2},
        {"budget_s": 1.0},
    ]:
        times_measured(measured, (energy, X))
        choose(energy, X, **options)
        assert len(measured) == 2


def test_choice_is_measured_anew_in_double_precision(measured):
    array = np.ones(2, np.float32)
    choose(energy, array)
    with jax.enable_x64(True):
        choose(energy, array)
    choose(energy, array)
    assert len(measured) == 2


def test_choice_is_measured_anew_on_another_device(measured):
    for device in jax.devices()[:2] * 2:
        choose(energy, jax.device_put(jnp.ones(2), device))
    assert len(measured) == 2


def test_what_is_not_hashable_is_measured_each_time(measured):
    for _ in range(2):
        choose(energy, X, {1, 2})
    assert len(measured) == 2


def test_caches_can_be_cleared(measured):
    for clear in (eqx.clear_caches, jax.clear_caches, int):
        choose(energy, X)
        clear()
    assert len(measured) == 3


def test_measurement_that_fails_is_not_remembered(measured, monkeypatch):
    fastest = _choose._fastest

    def fail(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(_choose, "_fastest", fail)
    with pytest.raises(KeyboardInterrupt):
        choose(energy, X)
    monkeypatch.setattr(_choose, "_fastest", fastest)
    choose(energy, X)
    assert len(measured) == 1


def test_function_and_array_that_were_dropped_are_not_held(measured):
    def short_lived(x):
        return jnp.sum(x**2)

    array = jnp.ones(2)
    choose(short_lived, Model(array))
    alive = weakref.ref(short_lived), weakref.ref(array)
    del short_lived, array
    measured.clear()
    gc.collect()
    assert [each() for each in alive] == [None, None]


def test_threads_that_come_first_measure_once(measured, compiles_alone):
    start = threading.Barrier(4)
    found = []

    def run():
        start.wait()
        found.append(choose(energy, X))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [ad.Reverse()] * 4
    assert len(measured) == 1
