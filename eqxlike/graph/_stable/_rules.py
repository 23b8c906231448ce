"""The table of rules: which formulas lose digits, for which inputs, and their replacements."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

from ..._compat import scan_counts
from ._branches import branch_not_taken
from ._differences import difference_from_one, difference_of_squares, excess_of_exponential
from ._expressions import (
    Step,
    Value,
    constant_of,
    seen_through,
    terms_of,
    unbroadcast,
)
from ._logarithms import is_probability, log_of, log_rule
from ._norms import (
    direction_of_zero,
    hypotenuse,
    norm_at_zero,
    power_by_logarithm,
    product_with_own_log,
    quotient_of_itself,
)
from ._quotients import quotient_at_zero, quotient_of_exponentials
from ._rewrite import Rewrite, Rule


def guarded_probability(step: Step) -> Rewrite | None:
    """Matches log(p + 1e-8), log(1 - p + 1e-8) and log(max(p, 1e-8)) for a probability p."""
    (x,) = step.inputs
    if (value := _limited(x)) is not None:
        return Rewrite() if _has_logarithm(value) else None
    total = terms_of(x)
    if step.kind == "log1p":
        total = dataclasses.replace(total, constant=total.constant + 1)
    if len(total.parts) != 1:
        return None
    (part,) = total.parts
    if part.number > 0:
        is_guarded = 0 < total.constant < GUARD and _has_logarithm(part.value)
    else:
        p = _limited(part.value) or part.value
        is_guarded = 0 < total.constant + part.number < GUARD and is_probability(p)
    return Rewrite() if is_guarded else None


GUARD = 1e-2
"""A smaller constant in a logarithm is assumed to be a guard, which keeps the logarithm finite."""


def _limited(value: Value) -> Value | None:
    """Returns `x` if `value` is `x` with a small lower limit, such as `jnp.clip(x, 1e-8, 1)`."""
    limit = None
    while (step := unbroadcast(value)[0].step).kind in ("max", "min", "clamp"):
        index = 1 if step.kind == "clamp" or constant_of(step.inputs[0]) is not None else 0
        least = constant_of(step.inputs[0 if index else 1])
        if step.kind != "min":
            limit = least
        value = step.inputs[index]
    return value if limit is not None and 0 < limit < GUARD else None


def _has_logarithm(value: Value) -> bool:
    log = log_of(value)
    return log is not None and not log.is_near_one


def low_precision_sum(step: Step) -> Rewrite | None:
    """Matches a sum of at least 256 terms of a 16-bit dtype, in one operation or in a scan."""
    if step.kind == "scan":
        return Rewrite() if step.params["length"] >= 256 and _adds_to_a_carry(step) else None
    (x,) = step.inputs
    axes = step.params["axes"] if step.kind == "reduce_sum" else (step.params["axis"],)
    return Rewrite() if _is_low(x) and math.prod(x.shape[axis] for axis in axes) >= 256 else None


def _is_low(value: Any) -> bool:
    return jnp.issubdtype(value.aval.dtype, jnp.floating) and value.aval.dtype.itemsize < 4


def _adds_to_a_carry(step: Step) -> bool:
    jaxpr, (skipped, num_carry) = step.params["jaxpr"].jaxpr, scan_counts(step.params)
    sources = {each: eqn for eqn in jaxpr.eqns for each in eqn.outvars}
    carried = jaxpr.invars[skipped : skipped + num_carry]
    for before, after in zip(carried, jaxpr.outvars, strict=False):
        eqn = None if isinstance(after, Literal) else sources.get(after)
        is_sum = eqn is not None and eqn.primitive.name == "add" and before in eqn.invars
        if is_sum and _is_low(before):
            return True
    return False


def overflowing_cast(step: Step) -> Rewrite | None:
    """Matches a cast to float16 of a value that probably exceeds 65504, the maximum of float16."""
    (x,) = step.inputs
    is_wide = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize >= 4
    if step.output.dtype != jnp.float16 or not is_wide:
        return None
    number = constant_of(x)
    if number is not None:
        return Rewrite() if 65504 < abs(number) < math.inf else None
    return Rewrite() if seen_through(x).step.kind in LARGE else None


LARGE = ("exp", "exp2", "expm1", "sinh", "cosh", "square", "integer_pow")

RULES = (
    Rule(
        "logarithm of exponentials or probabilities",
        ("log", "log2", "log1p"),
        log_rule,
        "where an exponential overflows or underflows (88 in float32, 709 in float64)",
        "jax.nn.log_softmax, log_sigmoid, softplus or logsumexp, jnp.log1p, jnp.linalg.slogdet",
    ),
    Rule(
        "logarithm of a probability kept from zero",
        ("log", "log2", "log1p"),
        guarded_probability,
        "where the probability is less than the constant: its gradient is lost",
        "jax.nn.log_softmax or jax.nn.log_sigmoid, without the probability",
    ),
    Rule(
        "difference from one",
        ("sub", "add"),
        difference_from_one,
        "where the function is near one: all digits cancel",
        "jnp.expm1, jax.nn.sigmoid(-x), jax.scipy.special.erfc",
    ),
    Rule(
        "difference of squares",
        ("sub", "add"),
        difference_of_squares,
        "where the squares are nearly equal: all digits cancel; or where they overflow",
        "(a - b) * (a + b), (a - b) ** 2, jnp.var",
    ),
    Rule(
        "divergence near zero",
        ("sub", "add"),
        excess_of_exponential,
        "where t - 1 - log(t) is near zero: t is near one, and all digits cancel",
        "jnp.expm1(y) - y, with y = log(t), and its Taylor series near zero",
    ),
    Rule(
        "quotient of two zeros",
        ("div", "mul"),
        quotient_at_zero,
        "at zero: 0 / 0, and in the gradient near zero: all digits cancel",
        "a Taylor series near zero",
    ),
    Rule(
        "quotient of exponentials",
        ("div", "integer_pow", "mul", "pow", "rsqrt"),
        quotient_of_exponentials,
        "above 88 in float32: inf / inf, in the value or in the gradient",
        "jax.nn.sigmoid, jax.nn.softmax, jnp.tanh",
    ),
    Rule(
        "norm at zero",
        ("sqrt", "pow"),
        norm_at_zero,
        "in the gradient at zero: 0 * inf",
        "jnp.where around the square root and also inside it",
        is_of_jax=True,
        is_of_gradient=True,
    ),
    Rule(
        "hypotenuse",
        ("sqrt", "pow"),
        hypotenuse,
        "above 1e19 and below 1e-19 in float32: squares overflow",
        "jnp.hypot",
    ),
    Rule(
        "direction of zero",
        ("div",),
        direction_of_zero,
        "at zero: 0 / 0",
        "x / jnp.where(norm == 0, 1, norm)",
        is_of_jax=True,
    ),
    Rule(
        "branch that is not taken",
        ("select_n",),
        branch_not_taken,
        "in the gradient, where the branch that is not taken has an infinite derivative: 0 * inf",
        "jnp.where inside the function too: jnp.where(c, f(jnp.where(c, x, 1)), 0)",
        is_of_gradient=True,
    ),
    Rule("quotient of itself", ("div",), quotient_of_itself, "at zero: 0 / 0", "1"),
    Rule(
        "sum in low precision",
        ("reduce_sum", "cumsum", "scan"),
        low_precision_sum,
        "where the sum is at least 256 times a term: the term is lost",
        "jnp.sum(x, dtype=jnp.float32)",
    ),
    Rule(
        "cast to float16",
        ("convert_element_type",),
        overflowing_cast,
        "above 65504",
        "jnp.bfloat16",
    ),
    Rule(
        "x log(x)",
        ("mul",),
        product_with_own_log,
        "at zero: 0 * inf",
        "jax.scipy.special.xlogy(x, x)",
    ),
    Rule(
        "power by a logarithm",
        ("exp",),
        power_by_logarithm,
        "at zero: 0 * inf; in large powers: digits of the exponent are lost",
        "x ** y",
    ),
)
"""The rules of `stabilise` and `unstable`, in order of priority.

A rule matches a step of a program if its `kinds` contain the step's primitive and its `match`
returns a `Rewrite` (see `_rewrite`). If several rules match a step, the first rule is used.
"""
