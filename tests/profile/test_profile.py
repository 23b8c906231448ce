"""What `profile` says of a run: counts, and times whose size no test looks at."""

import contextlib
import sys
import threading

import jax
import jax.numpy as jnp
import pytest

import eqxlike as eqx
from eqxlike._profile import FunctionTimes, Profile, Split
from eqxlike._transforms import JitFunction

X = jnp.ones(3)


@eqx.filter_jit
def double(x):
    return 2 * x


@eqx.filter_jit
def of_double(x):
    return double(x) + 1


class Scale(eqx.Module):
    factor: jax.Array

    @eqx.filter_jit
    def __call__(self, x, *, by=1.0):
        return by * self.factor * x


def by_name(found):
    return {each.name.rpartition(".")[2]: each for each in found.functions}


@pytest.mark.usefixtures("plain_dispatch")
def test_calls_and_traces_of_each_function_are_counted():
    eqx.clear_caches()
    scale = Scale(X)
    with eqx.profile() as found:
        for x in (X, X, jnp.ones(4), X):
            double(x)
        scale(X)
        scale(X, by=2.0)
    counts = {name: (each.num_calls, each.num_traces) for name, each in by_name(found).items()}
    assert counts == {"double": (4, 2), "__call__": (2, 2)}


@pytest.mark.usefixtures("plain_dispatch")
def test_transformed_functions_go_by_the_names_of_those_inside():
    def first(x):
        return jnp.sum(x * x)

    def second(x):
        return jnp.sum(jnp.sin(x))

    with eqx.profile() as found:
        for function in (first, second):
            eqx.filter_jit(eqx.filter_grad(function))(jnp.ones(3))
    assert set(by_name(found)) == {"first", "second"}
    assert all(each.name.startswith(__name__) for each in found.functions)


def test_an_exported_program_goes_by_the_name_of_its_function():
    def predict(x):
        return 2 * x

    exported = eqx.export(predict, jnp.ones(3))
    with eqx.profile() as found:
        exported.call(jnp.ones(3))
    assert [each.name for each in found.functions] == ["predict"]


def test_parts_of_a_call_add_up():
    double(X)
    with eqx.profile() as found:
        for _ in range(5):
            double(X)
    (times,) = found.functions
    assert times.num_traces == 0
    assert times.split.total_us == pytest.approx(times.completion_us)
    assert times.split.ours_us + times.split.jax_us == pytest.approx(times.dispatch_us)
    assert 0 < times.split.jax_us < times.dispatch_us


@pytest.mark.usefixtures("plain_dispatch")
def test_calls_inside_a_trace_are_part_of_it():
    eqx.clear_caches()
    with eqx.profile() as found:
        of_double(X)
        jax.jit(lambda x: double(x) + 2)(X)
        jax.grad(lambda x: double(x).sum())(X)
    assert list(by_name(found)) == ["of_double"]


@pytest.mark.usefixtures("plain_dispatch")
def test_without_waiting_nobody_knows_when_results_are_ready():
    with eqx.profile(wait=False) as found:
        for _ in range(3):
            double(X)
    (times,) = found.functions
    assert times.completion_us is None
    assert times.dispatch_us is not None


@pytest.mark.usefixtures("plain_dispatch")
def test_calls_afterwards_are_what_they_were():
    plain = JitFunction.__call__
    eqx.clear_caches()
    double(X)
    (compiled,) = double._eqxlike_dispatch[0].compiled_functions()
    jitted = compiled.own_fast_path.__globals__["jitted"]
    with contextlib.suppress(RuntimeError), eqx.profile():
        double(X)
        assert compiled.own_fast_path.__globals__["jitted"] is not jitted
        raise RuntimeError
    assert JitFunction.__call__ is plain
    assert compiled.own_fast_path.__globals__["jitted"] is jitted


@pytest.mark.usefixtures("plain_dispatch")
def test_call_that_outlasts_the_profile_leaves_no_clock():
    go_on, begun = threading.Event(), threading.Event()

    def wait(x):
        begun.set()
        assert go_on.wait(60)
        return x

    @eqx.filter_jit
    def slow(x):
        return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    go_on.set()
    slow(X)
    (compiled,) = slow._eqxlike_dispatch[0].compiled_functions()
    jitted = compiled.own_fast_path.__globals__["jitted"]
    go_on.clear()
    begun.clear()
    with eqx.profile():
        thread = threading.Thread(target=slow, args=(X,))
        thread.start()
        assert begun.wait(60)
    go_on.set()
    thread.join()
    assert compiled.own_fast_path.__globals__["jitted"] is jitted


def test_error_of_a_call_passes_and_the_next_call_is_counted():
    with eqx.profile() as found:
        with pytest.raises(TypeError):
            double("x", "y")
        double(X)
    assert found.functions[0].num_calls == 1


def test_two_profiles_at_once_are_refused():
    with eqx.profile(), pytest.raises(RuntimeError, match="one `profile` at a time"):
        eqx.profile().__enter__()
    with eqx.profile():
        pass


def test_table_has_a_row_for_each_function_and_a_dash_for_what_nobody_knows():
    cold = FunctionTimes("first", 1, 1, 0.5, None, None, None, 0.5)
    warm = FunctionTimes("second", 10, 0, 0.0, 20.0, 35.0, Split(5.0, 15.0, 15.0), 0.25)
    assert str(Profile((cold, warm), 1.0)).splitlines() == [
        "Function  Calls  Traces  Compiling, s  Dispatch, us  Ours, us  JAX, us  Ready, us  All, s",
        "first         1       1         0.500             -         -        -          -   0.500",
        "second       10       0         0.000          20.0       5.0     15.0       35.0   0.250",
        "1.000 s, 75% of them in these calls",
    ]


def test_run_without_calls_has_an_empty_table():
    with eqx.profile() as found:
        pass
    assert found.functions == ()
    assert "0% of them in these calls" in str(found)


def test_samples_show_the_frames_of_a_call(tmp_path):
    pytest.importorskip("pyinstrument")
    double(X)  # is compiled here: samples of that are many, and deep
    with eqx.profile(sample=True, interval_s=1e-4) as found:
        for _ in range(200):
            double(X)
    assert "JitFunction" in found.tree
    assert "<html>" in found.page
    names = {path.name for path in found.write(tmp_path / "run")}
    assert names == {"run.txt", "run.html", "run.pyisession"}
    assert names == {path.name for path in tmp_path.iterdir()}


def test_samples_that_nobody_asked_for_are_an_error():
    with eqx.profile() as found:
        pass
    with pytest.raises(ValueError, match=r"eqxlike\.profile\(sample=True\)"):
        _ = found.tree


def test_missing_pyinstrument_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyinstrument", None)
    with pytest.raises(ImportError, match=r"eqxlike\[profile\]"), eqx.profile(sample=True):
        pass
    with eqx.profile() as found:
        double(X)
    assert found.functions[0].num_calls == 1


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"interval_s": 0}, ValueError, "interval_s must be positive"),
        ({"interval_s": "1"}, TypeError, "interval_s must be a number"),
        ({"trace": 3}, TypeError, "PathLike"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        eqx.profile(**options).__enter__()
    with eqx.profile():
        pass


def test_trace_of_xla_is_written(tmp_path):
    with eqx.profile(trace=tmp_path):
        double(X)
    assert list(tmp_path.glob("**/perfetto_trace.json.gz"))
