"""`ad.compare`: verdicts on correct and wrong modes, costs, and the table."""

import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest

import eqxlike as eqx
from eqxlike import ad, nn
from eqxlike.ad._compare import _named_modes, _time_in_turn
from eqxlike.ad._reference import format_mode
from tests.ad.broken_modes import MODES, PARAMETERS, compare, loss, row_of
from tests.nn.arrays import filled

X = jnp.ones(2)


# Verdicts


def test_verdicts(comparison):
    assert [row.mode for row in comparison.rows] == list(MODES)
    assert {row.mode: row.verdict for row in comparison.rows} == {
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
    }


W_IS = (
    "The gradient with respect to args[0]['w'] is {}, but the array is an array of shape (3,) "
    "and dtype float32."
)
B_IS = W_IS.replace("'w'", "'b'").replace("(3,)", "(2,)")


def test_verdict_is_explained(comparison):
    for name, path, explanation in [
        (
            "off",
            "args[0]['w']",
            "The gradient with respect to args[0]['w'] has a relative error of 2.5e-01. "
            "The tolerance is 4.9e-03; 2.8e-01 would have passed.",
        ),
        ("nan", "args[0]['w']", "Not finite: 1 of the 3 derivatives with respect to args[0]['w']."),
        ("inf", "args[0]['b']", "Not finite: 2 of the 2 derivatives with respect to args[0]['b']."),
        ("raises", None, "ValueError: no rule for this\nUse another mode."),
        ("shape", "args[0]['w']", W_IS.format("an array of shape (1, 3) and dtype float32")),
        ("dtype", "args[0]['b']", B_IS.format("an array of shape (2,) and dtype float16")),
        ("missing", "args[0]['b']", B_IS.format("None")),
        ("structure", "args[0]['w']", W_IS.format("a tuple of length 2")),
        ("right", "args[0]['w']", ""),
    ]:
        row = row_of(comparison, name)
        assert (row.explanation, row.worst_path) == (explanation, path)


def test_value_of_another_point_is_wrong(comparison):
    row = row_of(comparison, "elsewhere")
    assert row.worst_path == "the value"
    pattern = r"The value is (\S+), but the function alone returns (\S+)\."
    found, expected = map(float, re.fullmatch(pattern, row.explanation).groups())
    there = jax.tree.map(lambda x: x + 1, PARAMETERS)
    assert found == pytest.approx(float(loss(there, 2)), rel=1e-4)
    assert expected == pytest.approx(float(loss(PARAMETERS, 2)), rel=1e-4)


def test_mode_passes_with_the_suggested_tolerance(comparison):
    (needed,) = re.findall(r"(\S+) would have passed", row_of(comparison, "off").explanation)
    options = {"modes": {"off": MODES["off"]}, "reference": ad.Reverse()}
    for tolerance, verdict in ((float(needed), "ok"), (0.24, "wrong")):
        (row,) = compare(loss, PARAMETERS, 2, tolerance=tolerance, **options).rows
        assert row.verdict == verdict


# Cost


def test_every_mode_that_runs_is_measured(comparison):
    for row in comparison.rows:
        if row.mode != "raises":
            assert min(row.primal_us, row.gradient_us, row.first_call_ms, row.ratio) > 0
    row = row_of(comparison, "raises")
    assert (row.gradient_us, row.ratio, row.first_call_ms) == (None, None, None)


def test_memory_equals_memory_of_a_program_of_jax(comparison):
    def flat(b, w):
        return loss({"b": b, "w": w}, 2)

    b, w = PARAMETERS["b"], PARAMETERS["w"]
    compiled = jax.jit(jax.value_and_grad(flat, (0, 1))).lower(b, w).compile()
    expected = compiled.memory_analysis().temp_size_in_bytes
    assert row_of(comparison, "right").peak_bytes == expected


def test_mode_is_compiled_for_each_comparison():
    traced = []

    class Counting(ad.Mode):
        def value_and_grad(self, function, arrays):
            traced.append(function)
            return ad.Reverse().value_and_grad(function, arrays)

    for number in (1, 2):
        compare(jnp.sum, X, modes=[Counting()], reference=None)
        assert len(traced) == number


def test_modes_beyond_the_budget_are_not_run():
    modes = [ad.FiniteDifference(), ad.Forward(64), ad.Reverse()]
    many = {"modes": modes, "budget_s": 1e-9}
    rows = compare(jnp.sum, jnp.ones(100_000), reference=None, **many).rows
    assert [row.verdict for row in rows] == ["error", "error", "ok"]
    assert rows[0].explanation == (
        "TimeoutError: 200,000 evaluations of the function would take too long. Pass a larger "
        "`budget_s` to allow them."
    )
    with pytest.raises(ValueError, match="400,000 evaluations of the function") as caught:
        compare(jnp.sum, jnp.ones(100_000), **many)
    assert str(caught.value).endswith("such as `ad.Reverse()`, or `reference=None`.")


def test_mode_that_fails_or_is_slow_does_not_stop_the_others():
    counts = {"": 0, "failing": 0, "other": 0}

    def call(name):
        counts[name] += 1
        if name == "failing" and counts[name] == 3:
            raise RuntimeError("out of luck")
        return jnp.ones(())

    calls = {name: functools.partial(call, name) for name in counts}
    primal = calls.pop("")
    fields = _time_in_turn(primal, calls, rounds=5, budget_s=100.0)
    assert fields["failing"] == {"verdict": "error", "explanation": "RuntimeError: out of luck"}
    assert fields["other"].keys() == {"primal_us", "gradient_us", "ratio"}
    assert counts["other"] >= 5
    # The budget is used up after the first round.
    counts |= dict.fromkeys(counts, 10)
    assert _time_in_turn(primal, calls, rounds=5, budget_s=0.0).keys() == calls.keys()
    assert set(counts.values()) == {11}


# The table


KNOWN = ad.Comparison(
    rows=(
        ad.ComparisonRow(
            mode="Reverse()",
            verdict="ok",
            primal_us=36.25,
            gradient_us=54.31,
            ratio=1.4982,
            first_call_ms=131.4,
            peak_bytes=2640,
            max_relative_error=1.1e-7,
            worst_path="args[0].weight",
        ),
        ad.ComparisonRow(
            mode="Forward()",
            verdict="wrong",
            explanation="The gradient with respect to args[0] is off.",
            gradient_us=1234.5,
            peak_bytes=0,
            max_relative_error=0.5,
        ),
        ad.ComparisonRow(mode="None", verdict="error", explanation="ValueError: no\nand more"),
    ),
    reference="FiniteDifference(order=4)",
    machine="cpu; jax 0.10.2",
)


def test_text_is_a_table_with_explanations():
    assert str(KNOWN) == (
        "Mode       Primal us  Gradient us  Ratio  First call ms  Peak bytes    Error  Verdict\n"
        "Reverse()       36.2         54.3   1.50            131       2,640  1.1e-07  ok\n"
        "Forward()          -        1,234      -              -           0  5.0e-01  wrong\n"
        "None               -            -      -              -           -        -  error\n"
        "Forward(): The gradient with respect to args[0] is off.\n"
        "None: ValueError: no\n"
        "cpu; jax 0.10.2; error: relative to FiniteDifference(order=4) in float64"
    )


def test_best_is_the_fastest_that_is_ok():
    rows = (
        ad.ComparisonRow("slow", "ok", gradient_us=2.0),
        ad.ComparisonRow("fast", "ok", gradient_us=1.0),
        ad.ComparisonRow("wrong", "wrong", gradient_us=0.5),
        ad.ComparisonRow("not timed", "ok"),
    )
    assert ad.Comparison(rows).best is rows[1]
    assert ad.Comparison(rows[2:]).best is None


# Functions and arguments


def test_every_mode_is_ok_on_a_model_with_frozen_arrays_and_aux():
    def squared(model, x):
        return model(x) ** 2, {"x": x, "how": "fast"}

    linear = filled(nn.Linear, 2, "scalar", key=jax.random.key(0))
    model = nn.freeze(linear, lambda model: model.bias)
    rows = compare(squared, model, jnp.ones(2), has_aux=True).rows
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
        lambda model: functools.partial(Weighted.total, model),
        lambda model: eqx.filter_jit(model.total),
    ],
)
def test_arrays_of_a_bound_method_are_converted_to_double_precision(bind):
    # Strict promotion would refuse a constant that stays in single precision.
    (row,) = compare(bind(Weighted(jnp.ones(2))), jnp.ones(2), modes=[ad.Reverse()]).rows
    assert (row.verdict, row.max_relative_error < 1e-6) == ("ok", True)


def test_default_modes_exclude_enzyme_if_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert list(_named_modes(None)) == [
        "Reverse()",
        "Checkpointed()",
        "Forward(chunk=64)",
        "FiniteDifference()",
        "Auto()",
    ]


def test_mode_that_may_crash_the_process_runs_only_on_request(monkeypatch):
    def steps(x):
        return jax.lax.scan(lambda x, _: (jnp.sin(x), None), x, None, 2)[0]

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "installed")
    comparison = compare(steps, jnp.array(1.0), reference=None)
    row = row_of(comparison, "Enzyme()")
    assert (row.verdict, row.first_call_ms) == ("error", None)
    assert row.explanation == (
        "Not run: Enzyme may crash the process if the function has a loop. Pass it in `modes` to "
        "run it anyway."
    )
    assert {row.verdict for row in comparison.rows if row.mode != "Enzyme()"} == {"ok"}


def test_mode_that_is_passed_twice_has_two_names():
    assert list(_named_modes([ad.Reverse(), ad.Forward(2), ad.Reverse()])) == [
        "Reverse()",
        "Forward(chunk=2)",
        "Reverse() #3",
    ]


def test_mode_of_another_library_has_the_name_of_its_class():
    class Foreign:
        def value_and_grad(self, function, arrays):
            return ad.Reverse().value_and_grad(function, arrays)

    assert format_mode(Foreign()) == "Foreign()"
    assert list(_named_modes([Foreign()])) == ["Foreign()"]


# Bad input


def test_bad_input_is_an_error_before_anything_is_measured():
    for error, message, args, options in [
        (TypeError, "3 is not a callable object: `ad.compare` expects a function.", (3, X), {}),
        (ValueError, "args[0] has no floating-point or complex", (jnp.sum,), {}),
        (ValueError, "args[0] has no floating-point or complex", (jnp.sum, (1, 2.0)), {}),
        (TypeError, "must be a real floating-point scalar, but is an array of", (jnp.sin, X), {}),
        (TypeError, "must return a pair (value, aux)", (jnp.sum, X), {"has_aux": True}),
        (ValueError, "`ad.compare` expects at least one mode", (jnp.sum, X), {"modes": []}),
        (TypeError, "such as `ad.Reverse()`; got 'R'", (jnp.sum, X), {"modes": "R"}),
        (TypeError, "call it, `Reverse()`", (jnp.sum, X), {"modes": [ad.Reverse]}),
        (TypeError, "call it, `Reverse()`", (jnp.sum, X), {"reference": ad.Reverse}),
        (ValueError, "must be positive and finite, got 0", (jnp.sum, X), {"tolerance": 0}),
        (TypeError, "tolerance must be a number, got '1'", (jnp.sum, X), {"tolerance": "1"}),
        (ValueError, "rounds must be an integer of at least 1", (jnp.sum, X), {"rounds": 0}),
        (ValueError, "budget_s must be positive and finite", (jnp.sum, X), {"budget_s": 0}),
    ]:
        with pytest.raises(error, match=re.escape(message)):
            ad.compare(*args, **options)


def test_donated_array_is_an_error_that_names_it():
    donated = jnp.ones(2)
    donated.delete()
    with pytest.raises(RuntimeError, match=re.escape("donated to a call: tree['x'].")):
        ad.compare(lambda tree: jnp.sum(tree["x"]), {"x": donated})
