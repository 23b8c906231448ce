"""What may move: hidden copies and programs that leave the device are refused, by path and line."""

import pathlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import eqxlike as eqx

HOST = np.ones(3, np.float32)


@pytest.fixture
def x():
    return jnp.ones(3)


@pytest.fixture
def double():
    return eqx.filter_jit(lambda model, x: model["weight"] * x)


def _line(text):
    """The line of this file that ends so, as in an error."""
    lines = pathlib.Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(at for at, line in enumerate(lines, 1) if line.endswith(text))}"


def _notes(caught):
    return "\n".join(caught.value.__notes__)


def test_explicit_names_path_and_line_of_an_array_of_numpy(double, x):
    double({"weight": x}, HOST)
    with (
        pytest.raises(RuntimeError, match="Disallowed host-to-device") as caught,
        eqx.transfers("explicit"),
    ):
        double({"weight": HOST}, x)  # an array
    notes = _notes(caught)
    assert "arrays of NumPy, which each call copies to the device: model['weight']. Put" in notes
    assert f"{_line('# an array')} copies between host and device" in notes


def test_explicit_names_the_line_of_a_number(x):
    with (
        pytest.raises(RuntimeError, match="Disallowed host-to-device") as caught,
        eqx.transfers("explicit"),
    ):
        x * 2.0  # a number
    assert f"{_line('# a number')} copies between host and device" in _notes(caught)
    with (
        pytest.raises(RuntimeError) as caught,
        eqx.transfers("explicit"),
        eqx.transfers("explicit"),
    ):
        x * 2.0
    assert _notes(caught).count("copies between host and device") == 1


def test_explicit_takes_what_was_asked_for(double, x):
    with eqx.transfers("explicit"):
        output = double({"weight": jax.device_put(HOST)}, x)
        assert jax.device_get(output).tolist() == [1.0, 1.0, 1.0]
        # A number in a step is part of the program.
        assert eqx.filter_jit(lambda x, rate: x * rate)(x, 0.5).tolist() == [0.5] * 3


def test_transparent_lets_all_pass_within_another(double, x):
    with eqx.transfers("explicit"), eqx.transfers("transparent"):
        assert double({"weight": HOST}, x).tolist() == [1.0] * 3
    with eqx.transfers("exclusive"), eqx.transfers("transparent"):
        eqx.filter_jit(_show)(x)
    with pytest.raises(RuntimeError, match="Disallowed host-to-device"), eqx.transfers("exclusive"):
        double({"weight": HOST}, x)


def test_modes_and_devices_that_are_none_are_refused():
    first = jax.devices()[0]
    for args, device, error, message in [
        ("strict", None, ValueError, "'transparent', 'explicit', 'exclusive', got 'strict'"),
        ("explicit", first, ValueError, "a `device` with 'exclusive' alone"),
        ("exclusive", "cpu", TypeError, r"one device, as in `device=jax\.devices\(\)\[0\]`"),
        ("exclusive", 0, TypeError, r"one device, as in `device=jax\.devices\(\)\[0\]`"),
    ]:
        with pytest.raises(error, match=message), eqx.transfers(args, device=device):
            pass


def _pure(x):
    return eqx.filter_pure_callback(np.sin, x, result_shape_dtypes=x)


def _pure_of_jax(x):
    return jax.lax.cond(x.sum() > 0, lambda x: jax.pure_callback(np.sin, x, x), lambda x: x, x)


def _show(x):
    jax.debug.print("{}", x)
    return x


def _store(x):
    io_callback(lambda x: None, None, x)
    return x


def _check(x):
    return eqx.error_if(x, x.sum() < 0, "negative")


def _move(x):
    return jax.device_put(x, jax.devices()[1])


LEAVING = {
    "pure_callback": _pure_of_jax,
    "jax.debug.print": _show,
    "io_callback": _store,
    "error_if": _check,
    "jax.device_put to ": _move,
}


def test_exclusive_refuses_a_program_that_leaves(x):
    for name, function in LEAVING.items():
        with eqx.transfers("exclusive"), pytest.raises(eqx.TransferError) as caught:
            eqx.filter_jit(function)(x)
        message = str(caught.value)
        assert f"{function.__name__} would leave the device inside transfers('excl" in message
        assert f"it calls {name}" in message
        assert f" at {__file__}:" in message


def test_exclusive_refuses_a_filtered_callback_where_it_is_called(x):
    with eqx.transfers("exclusive"):
        with pytest.raises(eqx.TransferError, match="filter_pure_callback calls the host"):
            eqx.filter_jit(_pure)(x)
        with pytest.raises(eqx.TransferError, match="filter_pure_callback calls the host"):
            jax.jit(_pure)(x)


def test_exclusive_knows_the_device_of_a_sharding(x):
    here, away = map(jax.sharding.SingleDeviceSharding, jax.devices())
    with eqx.transfers("exclusive", device=jax.devices()[0]):
        put = eqx.filter_jit(lambda x: jax.device_put(x, here) + x)
        np.testing.assert_array_equal(put(x), [2.0, 2.0, 2.0])
        with pytest.raises(eqx.TransferError, match=r"it calls jax\.device_put to "):
            eqx.filter_jit(lambda x: jax.device_put(x, away) + x)(x)


def test_exclusive_refuses_what_was_compiled_before(x):
    show = eqx.filter_jit(_show)
    show(x)
    for each in (show, show.lower(x).compile()):
        with eqx.transfers("exclusive"), pytest.raises(eqx.TransferError, match="_show would lea"):
            each(x)
        assert each(x).tolist() == [1.0] * 3


def test_exclusive_refuses_what_another_thread_compiles_meanwhile(x):
    is_traced, is_open = threading.Event(), threading.Event()

    @eqx.filter_jit
    def show(x):
        is_traced.set()
        is_open.wait(60)
        return _show(x)

    thread = threading.Thread(target=show, args=(x,))
    thread.start()
    assert is_traced.wait(60)
    with eqx.transfers("exclusive"):
        is_open.set()
        thread.join(60)
        with pytest.raises(eqx.TransferError, match="show would leave"):
            show(x)


def test_exclusive_runs_what_stays_and_traces_it_once(x):
    traced = []

    @eqx.filter_jit
    def step(x):
        traced.append(x)
        return x / 3

    with eqx.transfers("exclusive"):
        for _ in range(3):
            x = step(x)
    assert len(traced) == 1
    np.testing.assert_allclose(x, 1 / 27, rtol=1e-6)


def test_exclusive_names_arrays_that_lie_elsewhere(double, x):
    second = jax.devices()[1]
    away = jax.device_put(x, second)
    message = r"got model\['weight'\] on .*1.*device_put"
    with eqx.transfers("exclusive"), pytest.raises(eqx.TransferError, match=message):
        double({"weight": away}, x)
    with eqx.transfers("exclusive", device=second):
        assert double({"weight": away}, away).devices() == {second}
        assert jnp.arange(3).devices() == {second}


def test_exclusive_is_for_the_thread_that_opens_it(x):
    show, failures = eqx.filter_jit(_show), []

    def other():
        try:
            show(x)
        except Exception as error:
            failures.append(error)

    with eqx.transfers("exclusive"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(60)
        assert failures == []
        # What the other thread has called is looked at here all the same.
        with pytest.raises(eqx.TransferError):
            show(x)


@pytest.mark.usefixtures("plain_dispatch")
def test_after_exclusive_calls_are_fast_again(x):
    step = eqx.filter_jit(lambda x: x + 1)
    with eqx.transfers("exclusive"):
        step(step(x))
        assert step._eqxlike_dispatch[0].recent == ()
    step(x)
    assert len(step._eqxlike_dispatch[0].recent) == 1
