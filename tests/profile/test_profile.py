"""Reports of `profile`: numbers of calls and traces, and parts of times. No test uses a clock."""

import contextlib
import sys
import threading

import jax
import jax.numpy as jnp
import pytest

import eqxlike as eqx
from eqxlike._profile import FunctionTimes, Profile, Split
from eqxlike._transforms._jit._filter_jit import JitFunction

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
def test_report_names_the_function_inside_a_transformation_or_an_export():
    def first(x):
        return jnp.sum(x * x)

    def second(x):
        return jnp.sum(jnp.sin(x))

    with eqx.profile() as found:
        for function in (first, second):
            eqx.filter_jit(eqx.filter_grad(function))(X)
    assert set(by_name(found)) == {"first", "second"}
    assert all(each.name.startswith(__name__) for each in found.functions)
    exported = eqx.export(first, X)
    with eqx.profile() as found:
        exported.call(X)
    assert [each.name for each in found.functions] == ["first"]


@pytest.mark.usefixtures("plain_dispatch")
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
    with eqx.profile(wait=False) as found:
        double(X)
        double(X)
    assert found.functions[0].completion_us is None
    assert found.functions[0].dispatch_us is not None


@pytest.mark.usefixtures("plain_dispatch")
def test_calls_inside_a_trace_are_not_listed():
    eqx.clear_caches()
    with eqx.profile() as found:
        of_double(X)
        jax.jit(lambda x: double(x) + 2)(X)
        jax.grad(lambda x: double(x).sum())(X)
    assert list(by_name(found)) == ["of_double"]


def jitted_by(function):
    """The function of `jax.jit` that the fast path of `function` calls."""
    (compiled,) = function._eqxlike_dispatch[0].compiled_functions()
    return compiled.own_fast_path.__globals__["jitted"]


@pytest.mark.usefixtures("plain_dispatch")
def test_calls_are_not_timed_after_the_profile():
    plain = JitFunction.__call__
    eqx.clear_caches()
    double(X)
    jitted = jitted_by(double)
    with contextlib.suppress(RuntimeError), eqx.profile():
        double(X)
        assert jitted_by(double) is not jitted
        raise RuntimeError
    assert JitFunction.__call__ is plain
    assert jitted_by(double) is jitted


@pytest.mark.usefixtures("plain_dispatch")
def test_call_that_ends_after_the_profile_is_not_timed_again():
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
    jitted = jitted_by(slow)
    go_on.clear()
    begun.clear()
    with eqx.profile():
        thread = threading.Thread(target=slow, args=(X,))
        thread.start()
        assert begun.wait(60)
    go_on.set()
    thread.join()
    assert jitted_by(slow) is jitted


def test_error_of_a_call_is_raised_and_later_calls_are_counted():
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


def test_table_has_a_row_for_each_function_and_dashes_for_unknown_times():
    cold = FunctionTimes("first", 1, 1, 0.5, None, None, None, 0.5)
    warm = FunctionTimes("second", 10, 0, 0.0, 20.0, 35.0, Split(5.0, 15.0, 15.0), 0.25)
    assert str(Profile((cold, warm), 1.0)).splitlines() == [
        "Function  Calls  Traces  Compiling, s  Dispatch, us  Ours, us  JAX, us  Ready, us  All, s",
        "first         1       1         0.500             -         -        -          -   0.500",
        "second       10       0         0.000          20.0       5.0     15.0       35.0   0.250",
        "1.000 s, 75% of them in these calls",
    ]


def test_profile_without_calls_or_samples_has_an_empty_table_and_no_tree():
    with eqx.profile() as found:
        pass
    assert found.functions == ()
    assert "0% of them in these calls" in str(found)
    with pytest.raises(ValueError, match=r"eqxlike\.profile\(sample=True\)"):
        _ = found.tree


def test_samples_show_the_frames_of_a_call(tmp_path):
    pytest.importorskip("pyinstrument")
    double(X)  # compiled before the profile: compilation has many deep samples
    with eqx.profile(sample=True, interval_s=1e-4) as found:
        for _ in range(200):
            double(X)
    assert "JitFunction" in found.tree
    assert "<html>" in found.page
    names = {path.name for path in found.write(tmp_path / "run")}
    assert names == {"run.txt", "run.html", "run.pyisession"}
    assert names == {path.name for path in tmp_path.iterdir()}


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
def test_wrong_options_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        eqx.profile(**options).__enter__()
    with eqx.profile():
        pass


def test_xla_trace_is_written(tmp_path):
    with eqx.profile(trace=tmp_path):
        double(X)
    assert list(tmp_path.glob("**/perfetto_trace.json.gz"))
