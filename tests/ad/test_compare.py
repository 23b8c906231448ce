import dataclasses
import functools
import gc
import importlib.util
import io
import json
import re
import sys
import weakref

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import matplotlib.image
import matplotlib.text
import numpy as np
import pytest
import rich.console

import eqxlike as eqx
from eqxlike import _timing, ad, nn
from eqxlike.ad._compare._accuracy import default_tolerance, leaf_errors
from eqxlike.ad._compare._named_modes import as_written, named_modes
from eqxlike.ad._compare._reference import Reference
from eqxlike.ad._measuring import Pace, Times, _timed, compiled_anew, time_beside
from eqxlike.ad._measuring._jaxprs import num_equations, work

compare = functools.partial(ad.compare, rounds=1)


def loss(parameters, power):
    return jnp.sum(jnp.sin(parameters["w"]) ** power) + jnp.sum(parameters["b"] * 3)


PARAMETERS = {"b": jnp.array([0.5, -1.0]), "n": jnp.arange(2), "w": jnp.array([1.0, 2.0, 3.0])}


class Broken(ad.Mode):
    """Reverse mode, but for what `change` does to the gradient."""

    change: object = eqx.field(static=True)

    def value_and_grad(self, function, arrays):
        output, gradient = ad.Reverse().value_and_grad(function, arrays)
        return output, self.change(gradient)


class Elsewhere(ad.Mode):
    """Looks at another point than it is asked about."""

    def value_and_grad(self, function, arrays):
        return ad.Reverse().value_and_grad(function, [array + 1 for array in arrays])


def refuse(gradient):
    error = ValueError("no rule for this")
    error.add_note("Use another mode.")
    raise error


def interrupt(gradient):
    raise KeyboardInterrupt


MODES = {
    "right": ad.Reverse(),
    "off": Broken(lambda found: [found[0], found[1] * 1.253]),
    "nan": Broken(lambda found: [found[0], found[1].at[1].set(jnp.nan)]),
    "inf": Broken(lambda found: [found[0] / 0, found[1]]),
    "raises": Broken(refuse),
    "shape": Broken(lambda found: [found[0], found[1][None]]),
    "dtype": Broken(lambda found: [found[0].astype(jnp.float16), found[1]]),
    "missing": Broken(lambda found: [None, found[1]]),
    "structure": Broken(lambda found: [found[0], (found[1], found[1])]),
    "elsewhere": Elsewhere(),
    "also right": ad.Forward(),
}


@pytest.fixture(scope="module")
def comparison():
    return compare(loss, PARAMETERS, 2, modes=MODES)


def row_of(comparison, name):
    (row,) = (row for row in comparison.rows if row.mode == name)
    return row


# Verdicts


def test_each_mode_has_a_row_in_the_order_given(comparison):
    assert [row.mode for row in comparison.rows] == list(MODES)


@pytest.mark.parametrize(
    ("name", "verdict"),
    {
        "right": "ok",
        "off": "wrong",
        "nan": "nan",
        "inf": "nan",
        "raises": "error",
        "shape": "wrong",
        "dtype": "wrong",
        "missing": "wrong",
        "structure": "wrong",
        "elsewhere": "wrong",
        "also right": "ok",
    }.items(),
)
def test_verdict(comparison, name, verdict):
    assert row_of(comparison, name).verdict == verdict


@pytest.mark.parametrize(
    ("name", "path", "explanation"),
    [
        (
            "off",
            "args[0]['w']",
            "The gradient by args[0]['w'] is off by 2.5e-01 of its size. The tolerance is 4.9e-03; "
            "2.6e-01 would have passed.",
        ),
        ("nan", "args[0]['w']", "Not finite: 1 of the 3 derivatives by args[0]['w']."),
        ("inf", "args[0]['b']", "Not finite: 2 of the 2 derivatives by args[0]['b']."),
        ("raises", None, "ValueError: no rule for this\nUse another mode."),
        (
            "shape",
            "args[0]['w']",
            "The gradient by args[0]['w'] is an array of shape (1, 3) and dtype float32, and the "
            "array is an array of shape (3,) and dtype float32.",
        ),
        (
            "dtype",
            "args[0]['b']",
            "The gradient by args[0]['b'] is an array of shape (2,) and dtype float16, and the "
            "array is an array of shape (2,) and dtype float32.",
        ),
        (
            "missing",
            "args[0]['b']",
            "The gradient by args[0]['b'] is None, and the array is an array of shape (2,) and "
            "dtype float32.",
        ),
        (
            "structure",
            "args[0]['w']",
            "The gradient by args[0]['w'] is a tuple of length 2, and the array is an array of "
            "shape (3,) and dtype float32.",
        ),
        ("right", "args[0]['w']", ""),
    ],
)
def test_verdict_is_explained(comparison, name, path, explanation):
    row = row_of(comparison, name)
    assert (row.explanation, row.worst_path) == (explanation, path)


def test_value_of_another_point_is_wrong(comparison):
    row = row_of(comparison, "elsewhere")
    assert row.worst_path == "the value"
    pattern = r"The value is (\S+); that of the function, called alone, is (\S+)\."
    found, expected = map(float, re.fullmatch(pattern, row.explanation).groups())
    there = jax.tree.map(lambda x: x + 1, PARAMETERS)
    assert found == pytest.approx(float(loss(there, 2)), rel=1e-4)
    assert expected == pytest.approx(float(loss(PARAMETERS, 2)), rel=1e-4)


def test_tolerance_that_would_have_passed_passes(comparison):
    (needed,) = re.findall(r"(\S+) would have passed", row_of(comparison, "off").explanation)
    modes = {"off": MODES["off"]}
    assert (
        compare(loss, PARAMETERS, 2, modes=modes, tolerance=float(needed)).rows[0].verdict == "ok"
    )
    assert compare(loss, PARAMETERS, 2, modes=modes, tolerance=0.24).rows[0].verdict == "wrong"


@pytest.mark.parametrize("name", [name for name in MODES if name != "raises"])
def test_mode_is_measured_whatever_the_others_do(comparison, name):
    row = row_of(comparison, name)
    assert row.rounds == 1
    for number in (row.primal_us, row.primal_dispatch_us, row.first_call_ms, row.ratio):
        assert number > 0
    assert row.gradient_us > 0
    assert row.gradient_dispatch_us > 0


def test_mode_that_fails_has_no_times(comparison):
    row = row_of(comparison, "raises")
    assert (row.rounds, row.gradient_us, row.ratio, row.first_call_ms) == (0, None, None, None)


def test_interrupt_passes_with_what_was_found_until_then():
    modes = {"right": ad.Reverse(), "stops": Broken(interrupt), "last": ad.Reverse()}
    with pytest.raises(KeyboardInterrupt) as caught:
        compare(loss, PARAMETERS, 2, modes=modes)
    (row,) = caught.value.comparison.rows
    assert (row.mode, row.verdict, row.rounds) == ("right", "ok", 0)
    assert "sys.last_value.comparison" in caught.value.__notes__[0]


# The reference


def test_error_is_that_of_the_worst_leaf(comparison):
    assert row_of(comparison, "off").max_relative_error == pytest.approx(0.253, rel=1e-4)
    assert row_of(comparison, "right").max_relative_error < 1e-6


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_gradient_in_any_dtype_is_compared_in_double_precision(dtype):
    def energy(x):
        return jnp.sum(jnp.abs(jnp.sin(x)) ** 2)

    x = jnp.array([0.3, 0.7, 1.1]).astype(dtype)
    (row,) = compare(energy, x, modes=[ad.Reverse()]).rows
    assert row.verdict == "ok"
    assert 0 < row.max_relative_error < 4 * float(jnp.finfo(dtype).eps)


def test_gradient_in_float64_needs_to_be_good_to_five_digits():
    with jax.enable_x64(True):
        modes = {"right": ad.Reverse(), "off": Broken(lambda found: [found[0] * (1 + 1e-4)])}
        comparison = compare(lambda x: jnp.sum(jnp.sin(x)), jnp.array([0.3, 0.7]), modes=modes)
    assert [row.verdict for row in comparison.rows] == ["ok", "wrong"]


def test_double_precision_is_switched_off_again():
    compare(jnp.sum, jnp.ones(2), modes=[ad.Reverse()])
    assert jnp.ones(2).dtype == jnp.float32


def test_function_that_is_a_module_is_cast_too():
    model = nn.MLP(2, "scalar", 4, 1, key=jax.random.key(0))
    (row,) = compare(model, jnp.array([0.3, 0.7]), modes=[ad.Reverse()]).rows
    assert (row.verdict, row.max_relative_error < 1e-6) == ("ok", True)


def test_function_without_a_derivative_in_float64_is_an_error_that_says_so():
    def stuck(x):
        return jax.lax.scan(lambda carry, _: (carry * x, None), jnp.float32(1), None, 2)[0]

    with pytest.raises(
        ValueError, match=r"has no gradient in float64: TypePromotionError: "
    ) as caught:
        compare(stuck, jnp.array(2.0))
    assert "what a plain function closes over is not.) Way out: another `ref" in str(caught.value)
    (row,) = compare(stuck, jnp.array(2.0), modes=[ad.Reverse()], reference=None).rows
    assert (row.verdict, row.max_relative_error) == ("ok", None)


def test_reference_that_is_not_finite_is_an_error_that_names_the_leaf():
    def barrier(x):
        return jnp.sum(jnp.log(x["a"][0])) + jnp.sum(x["b"])

    x = {"a": [jnp.array([1.0, 0.0])], "b": jnp.ones(2)}
    with pytest.raises(ValueError, match="is not finite in float64") as caught:
        compare(barrier, x)
    assert "FiniteDifference(order=4)" in str(caught.value)
    assert "2 of the 2 derivatives by args[0]['a'][0]" in str(caught.value)
    assert "`reference=None`" in str(caught.value)


def test_without_a_reference_a_gradient_must_be_finite():
    modes = {"off": MODES["off"], "nan": MODES["nan"]}
    rows = compare(loss, PARAMETERS, 2, modes=modes, reference=None).rows
    assert [(row.verdict, row.max_relative_error) for row in rows] == [("ok", None), ("nan", None)]


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: jnp.sum(jax.nn.relu(x) * 2), jnp.array([0.0, 1.0, -1.0])),
        (lambda x: jnp.sum(jnp.abs(x)), jnp.zeros(2)),
        (lambda x: jnp.sum((x.astype(jnp.bfloat16) ** 2).astype(x.dtype)), jnp.arange(1.0, 4)),
        (lambda x: jnp.sum((jnp.exp(x) - 2) ** 2), jnp.log(jnp.array([2.0, 2.0]))),
    ],
    ids=["kink", "only kinks", "rounds inside", "minimum"],
)
def test_mode_is_not_wrong_for_what_the_reference_does_not_know(function, x):
    (row,) = compare(function, x, modes=[ad.Reverse()]).rows
    assert row.verdict == "ok"
    assert row.max_relative_error > default_tolerance(jnp.float32)
    assert "the reference is as uncertain" in row.explanation


def test_look_at_the_reference_that_fails_blames_no_mode():
    far = Reference("", [np.ones(2)], None, [1e-7], ad.FiniteDifference(4))
    np.testing.assert_array_equal(far._apart(lambda: 1 / 0, ad.Reverse()), [[np.inf, np.inf]])


def test_mode_is_wrong_beside_a_kink():
    modes = [Broken(lambda found: [found[0] * 2])]
    x = jnp.array([0.0, 1.0, -1.0])
    (row,) = compare(lambda x: jnp.sum(jax.nn.relu(x) * 2), x, modes=modes).rows
    assert row.verdict == "wrong"


def test_another_mode_may_be_the_reference():
    def through(x):
        return jnp.sum(x**2 * jax.lax.stop_gradient(x))

    x = jnp.arange(1.0, 4)
    by_reverse = compare(through, x, modes=[ad.Forward()], reference=ad.Reverse())
    assert (by_reverse.reference, by_reverse.rows[0].verdict) == ("Reverse()", "ok")
    assert compare(through, x, modes=[ad.Forward()]).rows[0].verdict == "wrong"


# Errors of leaves

numbers = st.floats(-10, 10, allow_subnormal=False).filter(lambda number: abs(number) > 1e-3)
leaves = st.lists(numbers, min_size=1, max_size=3).map(np.array)


def errors_of(gradients, expected, doubts=None, dtype="float32"):
    dtypes = [(jnp.dtype(dtype), jnp.dtype(dtype))] * len(expected)
    doubts = doubts or [0.0] * len(expected)
    return [each.error for each in leaf_errors(gradients, expected, doubts, dtypes, None)]


@hypothesis.given(expected=st.lists(leaves, min_size=1, max_size=3), factor=st.floats(1e-6, 1e6))
def test_error_does_not_depend_on_the_unit_of_the_value(expected, factor):
    gradients = [each * 1.5 for each in expected]
    scaled = errors_of([each * factor for each in gradients], [each * factor for each in expected])
    assert scaled == pytest.approx(errors_of(gradients, expected))


@hypothesis.given(leaf=leaves, off=st.floats(1e-6, 10))
def test_error_of_a_leaf_is_relative_to_its_largest_derivative(leaf, off):
    leaf = np.append(leaf, 0.0)
    found = leaf.copy()
    found[-1] += off * np.max(np.abs(leaf))
    assert errors_of([found], [leaf]) == pytest.approx([off])


def test_what_rounding_leaves_of_a_zero_is_no_error():
    gradients = [np.array([1e-7, -1e-7]), np.array([1.0])]
    (error, _) = errors_of(gradients, [np.zeros(2), np.array([1.0])])
    assert error < default_tolerance(jnp.float32)


def test_error_is_absolute_where_all_is_zero():
    assert errors_of([np.array([0.5])], [np.zeros(1)]) == [0.5]


# What is measured


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

    jaxpr = jax.make_jaxpr(steps)(1.0).jaxpr
    assert num_equations(jaxpr) == 3
    assert work(jaxpr) == 1 + 5 * 2


def test_each_mode_traces_the_function_anew():
    num_calls = 0

    def counted(x):
        nonlocal num_calls
        num_calls += 1
        return jnp.sum(x**2)

    numbers = []
    for _ in range(2):
        num_calls = 0
        compare(counted, jnp.ones(2), modes=[ad.Reverse()])
        numbers.append(num_calls)
    assert numbers[0] == numbers[1]


def test_rounds_are_as_many_as_asked_for():
    rows = ad.compare(jnp.sum, jnp.ones(2), modes=[ad.Reverse()] * 2, rounds=3).rows
    assert [row.rounds for row in rows] == [3, 3]


def test_time_of_a_program_is_predicted_by_what_it_computes():
    pace = Pace(call_s=1e-3, work=10, budget_s=1.0)
    program = compiled_anew(jnp.sum, (jnp.ones(2),))
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


def test_nothing_is_held():
    def of_array(x):
        return jnp.sum(x**2)

    compare(of_array, jnp.ones(2), modes=[ad.Reverse()])
    alive = weakref.ref(of_array)
    del of_array
    gc.collect()
    assert alive() is None


def test_one_disturbed_call_does_not_decide_how_many_fill_a_round(monkeypatch):
    times_us = iter([50_000.0, 10.0, 10.0])
    monkeypatch.setattr(_timed, "completion_us", lambda *_: next(times_us, 10.0))
    contestant = _timed._contestant(lambda: jnp.ones(()), Times())
    assert contestant.count == _timing.calls_for(_timed._TARGET_S, 10e-6)


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
    time_beside("base", calls, times, rounds=3, budget_s=10)
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
        time_beside("base", calls, times, rounds=5, budget_s=10)
    assert len(times["interrupted"].completion_us) >= 1


# What may be differentiated


class Scale(eqx.Module):
    weight: jax.Array
    frozen: jax.Array
    count: jax.Array
    name: str = eqx.field(static=True)
    label: object = "label"

    def __call__(self, x):
        assert self.label == "label"
        return jnp.sum(self.weight * x) ** 2


def scale():
    model = Scale(jnp.array([1.0, 2.0]), jnp.ones(3), jnp.arange(2), "name")
    return nn.freeze(model, lambda model: model.frozen)


@pytest.mark.parametrize("has_aux", [False, True])
def test_every_mode_of_ours_is_ok_on_a_tree_of_all_kinds(has_aux):
    def squared(model, x, options):
        assert options == {"how": "fast"}
        value = model(x)
        return (value, {"x": x, "how": "fast"}) if has_aux else value

    rows = compare(squared, scale(), jnp.ones(2), {"how": "fast"}, has_aux=has_aux).rows
    assert {row.verdict for row in rows} == {"ok"}
    assert {row.worst_path for row in rows} == {"args[0].weight"}


class Weighted(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return jnp.sum(self.weight * jnp.sin(x))

    def total(self, x):
        return self(x)


@pytest.mark.parametrize(
    "bind",
    [
        lambda model: model,
        lambda model: model.__call__,
        lambda model: model.total,
        lambda model: functools.partial(model),
        lambda model: functools.partial(model.total),
        lambda model: functools.partial(Weighted.total, model),
        eqx.filter_jit,
    ],
)
def test_arrays_that_a_function_is_bound_to_are_no_constants(bind):
    # A constant would stay in single precision, which strict promotion refuses to mix with double.
    (row,) = compare(bind(Weighted(jnp.ones(2))), jnp.ones(2), modes=[ad.Reverse()]).rows
    assert (row.verdict, row.max_relative_error < 1e-6) == ("ok", True)


def test_default_modes_leave_out_what_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert list(named_modes(None, "")) == [
        "Reverse()",
        "Checkpointed()",
        "Forward(chunk=64)",
        "FiniteDifference()",
        "Auto()",
    ]


def test_what_may_end_the_process_is_not_tried_unasked(monkeypatch):
    def steps(x):
        return jax.lax.scan(lambda x, _: (jnp.sin(x), None), x, None, 2)[0]

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "installed")
    comparison = compare(steps, jnp.array(1.0))
    row = row_of(comparison, "Enzyme()")
    assert (row.verdict, row.first_call_ms) == ("error", None)
    assert row.explanation == (
        "Not run: Enzyme may end the process where a function has a loop. Name it among the "
        "`modes` to try all the same."
    )
    assert {row.verdict for row in comparison.rows if row.mode != "Enzyme()"} == {"ok"}


def test_mode_that_stands_twice_is_named_apart():
    assert list(named_modes([ad.Reverse(), ad.Forward(2), ad.Reverse()], "")) == [
        "Reverse()",
        "Forward(chunk=2)",
        "Reverse() #2",
    ]


def test_mode_of_another_library_has_the_name_of_its_class():
    class Foreign:
        def value_and_grad(self, function, arrays):
            return ad.Reverse().value_and_grad(function, arrays)

    assert as_written(Foreign()) == "Foreign"
    (row,) = compare(jnp.sum, jnp.ones(2), modes=[Foreign()]).rows
    assert (row.mode, row.verdict) == ("Foreign", "ok")


# Bad input

X = jnp.ones(2)


@pytest.mark.parametrize(
    ("error", "message", "args", "options"),
    [
        (TypeError, "3 is not a callable object: `ad.compare` expects a function.", (3, X), {}),
        (TypeError, "of which the first is the one that is differentiated by", (jnp.sum,), {}),
        (ValueError, "args[0] holds no floating-point or complex", (jnp.sum, (1, 2.0)), {}),
        (TypeError, "must be a real floating-point scalar, and is an array of", (jnp.sin, X), {}),
        (TypeError, "and is an array of shape () and dtype int32", (jnp.argmax, X), {}),
        (
            TypeError,
            "and is an array of shape () and dtype complex64",
            (jnp.sum, X.astype("complex64")),
            {},
        ),
        (TypeError, "return the scalar alone, or pass `has_aux=True`", (lambda x: (x, x), X), {}),
        (TypeError, "must return a pair (value, aux)", (jnp.sum, X), {"has_aux": True}),
        (ValueError, "`ad.compare` expects at least one mode", (jnp.sum, X), {"modes": []}),
        (
            TypeError,
            "or a mapping from names to modes; got Rev",
            (jnp.sum, X),
            {"modes": ad.Reverse()},
        ),
        (
            TypeError,
            "a mapping from names to modes; got 'Reverse'",
            (jnp.sum, X),
            {"modes": "Reverse"},
        ),
        (TypeError, "call it, `Reverse()`", (jnp.sum, X), {"modes": [ad.Reverse]}),
        (
            TypeError,
            "the names of modes to be strings, and not empty; got 1",
            (jnp.sum, X),
            {"modes": {1: ad.Reverse()}},
        ),
        (TypeError, "and not empty; got ''", (jnp.sum, X), {"modes": {"": ad.Reverse()}}),
        (TypeError, "call it, `Reverse()`", (jnp.sum, X), {"reference": ad.Reverse}),
        (
            ValueError,
            "tolerance must be positive and finite, got 0",
            (jnp.sum, X),
            {"tolerance": 0},
        ),
        (TypeError, "tolerance must be a number, got '1'", (jnp.sum, X), {"tolerance": "1"}),
        (ValueError, "rounds must be an integer of at least 1", (jnp.sum, X), {"rounds": 0}),
        (ValueError, "budget_s must be positive and finite", (jnp.sum, X), {"budget_s": 0}),
    ],
)
def test_bad_input_is_an_error_before_anything_is_measured(error, message, args, options):
    with pytest.raises(error, match=re.escape(message)):
        ad.compare(*args, **options)


def test_donated_array_is_an_error_that_names_it():
    donated = jnp.ones(2)
    donated.delete()
    with pytest.raises(ValueError, match=re.escape("donated to a call: args[0]['x'].")):
        ad.compare(lambda tree: jnp.sum(tree["x"]), {"x": donated})


def test_traced_array_is_an_error_that_names_it():
    with pytest.raises(TypeError, match=re.escape("args[0]['x'] is traced. Call it outside.")):
        eqx.filter_jit(lambda x: ad.compare(lambda tree: tree["x"], {"x": x}))(jnp.ones(()))


# As text, JSON and a picture

KNOWN = ad.Comparison(
    rows=(
        ad.ComparisonRow(
            mode="Reverse()",
            verdict="ok",
            primal_us=36.25,
            primal_dispatch_us=11.5,
            gradient_us=54.31,
            gradient_dispatch_us=22.75,
            ratio=1.4982,
            rounds=30,
            first_call_ms=131.4,
            traced_operations=54,
            compiled_operations=2139,
            peak_bytes=2640,
            max_relative_error=1.1e-7,
            worst_path="args[0].weight",
        ),
        ad.ComparisonRow(
            mode="[Forward]",
            verdict="wrong",
            explanation="The gradient by args[0] is off.",
            gradient_us=1234.5,
            peak_bytes=0,
            max_relative_error=0.5,
        ),
        ad.ComparisonRow(mode="None", verdict="error", explanation="ValueError: no\nand more"),
    ),
    reference="FiniteDifference(order=4)",
    tolerance=0.125,
    machine={"cpu": "A processor", "device": "cpu", "jax": "0.10.2"},
)


def test_text_is_a_table_with_explanations():
    assert str(KNOWN) == (
        "Mode       Primal us  Gradient us  Ratio  Dispatch us  First call ms  Operations  "
        "Peak bytes    Error  Verdict\n"
        "Reverse()       36.2         54.3   1.50  11.5 / 22.8            131  54 / 2,139  "
        "     2,640  1.1e-07  ok\n"
        "[Forward]          -        1,234      -  - / -                    -  - / -       "
        "         0  5.0e-01  wrong\n"
        "None               -            -      -  - / -                    -  - / -       "
        "         -        -  error\n"
        "[Forward]: The gradient by args[0] is off.\n"
        "None: ValueError: no [...]\n"
        "Dispatch: of primal / gradient. Operations: traced / compiled.\n"
        "cpu; jax 0.10.2; error: relative to FiniteDifference(order=4) in float64"
    )


def test_text_needs_no_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.table", None)
    assert str(KNOWN).startswith("Mode")
    with pytest.raises(ImportError, match=re.escape("pip install 'eqxlike[train]'")):
        KNOWN.table()


def test_rich_shows_the_same_cells():
    stream = io.StringIO()
    rich.console.Console(file=stream, width=200).print(KNOWN)
    shown = stream.getvalue()
    for row in KNOWN.rows:
        for cell in row.cells:
            assert cell in shown


def test_json_is_read_back(comparison):
    for each in (KNOWN, comparison):
        assert ad.Comparison.from_json(each.to_json()) == each


def test_json_has_the_fields_by_their_names(comparison):
    def refuse_constant(name):
        raise AssertionError(f"{name} is no JSON")

    row, *_ = json.loads(comparison.to_json(), parse_constant=refuse_constant)["rows"]
    assert row.keys() == {field.name for field in dataclasses.fields(ad.ComparisonRow)}
    assert row.keys() >= {"mode", "primal_us", "gradient_us", "ratio", "first_call_ms"}
    assert row.keys() >= {"peak_bytes", "max_relative_error", "verdict"}


@pytest.mark.parametrize(
    "text", ["", "3", "[]", "{}", '{"rows": 3}', '{"rows": [{"mode": 1}]}', '{"rows": [], "a": 1}']
)
def test_other_json_is_an_error(text):
    with pytest.raises(ValueError, match=re.escape("expects what Comparison.to_json wrote")):
        ad.Comparison.from_json(text)


def test_comparison_knows_its_machine(comparison):
    assert comparison.machine["jax"] == jax.__version__


def test_best_is_the_fastest_that_is_ok():
    rows = (
        ad.ComparisonRow("slow", "ok", gradient_us=2.0),
        ad.ComparisonRow("fast", "ok", gradient_us=1.0),
        ad.ComparisonRow("wrong", "wrong", gradient_us=0.5),
        ad.ComparisonRow("not timed", "ok"),
    )
    assert ad.Comparison(rows).best is rows[1]
    assert ad.Comparison(rows[2:]).best is None


def test_plot_has_a_point_and_a_label_for_each_mode_that_was_measured():
    (axes,) = KNOWN.plot().axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "symlog")
    points = np.concatenate([each.get_offsets() for each in axes.collections])
    np.testing.assert_allclose(points, [[54.31, 2640], [1234.5, 0]])
    assert [each.get_text() for each in axes.texts] == ["Reverse()", "[Forward]"]


def test_labels_of_equal_modes_do_not_overlap(tmp_path):
    rows = tuple(
        ad.ComparisonRow(f"Mode{number}()", "ok", gradient_us=50.0, peak_bytes=2640)
        for number in range(5)
    )
    figure = ad.Comparison(rows).plot()
    figure.savefig(tmp_path / "plot.png")
    boxes = [matplotlib.text.Text.get_window_extent(each) for each in figure.axes[0].texts]
    overlaps = [a.overlaps(b) for a in boxes for b in boxes if a is not b]
    assert len(overlaps) == 20
    assert not any(overlaps)


def test_plot_can_be_written_to_a_file(tmp_path):
    KNOWN.plot().savefig(tmp_path / "plot.png")
    height, width, _ = matplotlib.image.imread(tmp_path / "plot.png").shape
    assert height > 100
    assert width > 100


def test_plot_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="no mode was measured, so there is nothing to draw"):
        ad.Comparison(KNOWN.rows[2:]).plot()


def test_plot_without_matplotlib_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'eqxlike[plot]'")):
        KNOWN.plot()
