"""The table of rules: what loses digits, for which inputs, and what is computed instead."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ._branches import branch_not_taken
from ._expressions import (
    Part,
    Parts,
    Rewrite,
    Step,
    Value,
    argument_of,
    broadcast,
    constant_of,
    factors_of,
    is_same,
    key_of,
    seen_through,
    terms_of,
)
from ._functions import (
    ROOT_2,
    all_axes,
    normal_cdf_of,
    shifted_by_maximum,
    sigmoid_of,
    split_exponentials,
)
from ._logarithms import finite, log_rule
from ._replacements import expm1, length, one_minus_tanh_squared, safe_sqrt, scaled, sigmoid, tanh
from ._rewrite import Rule


def difference_from_one(step: Step) -> Rewrite | None:
    """One minus an exponential, a sigmoid, tanh, tanh squared, erf, cdf or cosine near one."""
    total, shape = terms_of(step.output), step.output.shape
    if len(total.parts) != 1 or not total.constant:
        return None
    (part,) = total.parts
    c, n = total.constant, part.number
    found = _complement(part.value, -n / c)
    if found is None:
        return None
    y, complement = found
    return Rewrite((y,), lambda y: broadcast(scaled(c, complement(y)), part.axes, shape))


def _complement(value: Value, ratio: float):
    """`y` and a function of it that is 1 - ratio * value."""
    if ratio == 1:
        if (y := argument_of(value, "exp")) is not None:
            return y, lambda y: -expm1(y)
        if (y := argument_of(value, "cos")) is not None:
            return y, lambda y: 2 * jnp.square(jnp.sin(y / 2))
        if (found := sigmoid_of(value)) is not None:
            y, scale = found
            return y, lambda y: sigmoid(scaled(-scale, y))
        product = factors_of(value)
        if [part.number for part in product.parts] == [2] and product.constant == 1:
            y = argument_of(product.parts[0].value, "tanh")
            if y is not None and product.parts[0].axes == all_axes(value):
                return y, one_minus_tanh_squared
    if abs(ratio) == 1:
        if (y := argument_of(value, "tanh")) is not None:
            return y, lambda y: 2 * sigmoid(-2 * ratio * y)
        if (y := argument_of(value, "erf")) is not None:
            return y, lambda y: lax.erfc(ratio * y)
    if (found := normal_cdf_of(value)) is not None:
        y, scale, constant = found
        if math.isclose(constant * ratio, 1):
            return y, lambda y: 0.5 * lax.erfc(scale / ROOT_2 * y)
    return None


def difference_of_squares(step: Step) -> Rewrite | None:
    """a² - b² as (a - b) (a + b); E[x²] - E[x]² as the mean of (x - E[x])²."""
    total, shape = terms_of(step.output), step.output.shape
    if len(total.parts) != 2 or total.constant:
        return None
    first, second = sorted(total.parts, key=lambda part: -part.number)
    if not first.number > 0 > second.number:
        return None
    if (found := _variance(first, second)) is not None:
        x, axes, kept = found
        n = first.number
        return Rewrite((x,), lambda x: broadcast(n * _squared_deviations(x, axes), kept, shape))
    a, b = (_square_root(part.value) for part in (first, second))
    if a is None or b is None or not math.isclose(first.number, -second.number):
        return None
    places = first.axes, second.axes

    def build(*roots: Array) -> Array:
        a, b = (broadcast(root, axes, shape) for root, axes in zip(roots, places, strict=True))
        return scaled(first.number, (a - b) * (a + b))

    return Rewrite((a, b), build)


def _square_root(value: Value) -> Value | None:
    """The value that this one is the square of."""
    step = value.step
    if step.kind == "square" or (step.kind == "integer_pow" and step.params["y"] == 2):
        return step.inputs[0]
    if step.kind == "mul" and is_same(*step.inputs) and step.inputs[0].shape == value.shape:
        return step.inputs[0]
    return None


def _variance(first: Part, second: Part):
    """x, the axes of its mean, and where the mean lies, if the parts are E[x²] and -E[x]²."""
    squares = argument_of(first.value, "reduce_sum")
    if squares is None or (x := _square_root(seen_through(squares))) is None:
        return None
    axes = first.value.step.params["axes"]
    mean = factors_of(second.value)
    if [part.number for part in mean.parts] != [2]:
        return None
    other = argument_of(mean.parts[0].value, "reduce_sum")
    if other is None or not is_same(other, x) or mean.parts[0].value.step.params["axes"] != axes:
        return None
    count = math.prod(x.shape[axis] for axis in axes)
    if not math.isclose(-second.number * mean.constant * count, first.number, rel_tol=1e-6):
        return None
    inner = mean.parts[0].axes
    kept = tuple(second.axes[axis] if axis >= 0 else -1 for axis in inner)
    return (x, axes, first.axes) if kept == first.axes else None


def _squared_deviations(x: Array, axes: Sequence[int]) -> Array:
    return jnp.sum(jnp.square(x - jnp.mean(x, axis=axes, keepdims=True)), axis=axes)


def quotient_of_exponentials(step: Step) -> Rewrite | None:
    """A sigmoid, softmax or tanh that is written with exponentials."""
    value = step.output
    if (found := sigmoid_of(value)) is not None:
        y, scale = found
        return Rewrite((y,), lambda y: sigmoid(scaled(scale, y)))
    product = factors_of(value)
    above = [part for part in product.parts if part.number == 1]
    below = [part for part in product.parts if part.number == -1]
    if len(below) == 1 and argument_of(below[0].value, "reduce_sum") is not None:
        return _softmax(value, product, below[0])
    if len(below) == 1 and len(above) == len(product.parts) - 1:
        if len(above) == 1 and (found := _tanh(value, above[0], below[0], product.constant)):
            return found
        return _multiplied_sigmoid(value, above, below[0], product.constant)
    return None


def _multiplied_sigmoid(
    value: Value, above: list[Part], below: Part, constant: float
) -> Rewrite | None:
    """A / (1 + exp(-y)) and a exp(y) / (1 + exp(y))."""
    total = terms_of(below.value)
    if len(total.parts) != 1 or not total.constant == total.parts[0].number > 0:
        return None
    (part,) = total.parts
    if (y := argument_of(part.value, "exp")) is None:
        return None
    places = tuple(below.axes[axis] if axis >= 0 else -1 for axis in part.axes)
    top = [each for each in above if each.axes == places and is_same(each.value, part.value)]
    sign = 1.0 if top else -1.0
    others = [each for each in above if each not in top[:1]]
    scale, shape = constant / total.constant, value.shape

    def build(y: Array, *arrays: Array) -> Array:
        found = broadcast(sigmoid(scaled(sign, y)), places, shape)
        for part, array in zip(others, arrays, strict=True):
            found = found * broadcast(array, part.axes, shape)
        return scaled(scale, found)

    return Rewrite((y, *(each.value for each in others)), build)


def _softmax(value: Value, product: Parts, total: Part) -> Rewrite | None:
    """W exp(y) / sum(w exp(y)) with the largest y taken off, with weights w or none."""
    terms, axes = total.value.step.inputs[0], total.value.step.params["axes"]
    kept = tuple(axis for axis in range(len(value.shape)) if axis not in axes)
    if terms.shape != value.shape or tuple(each for each in total.axes if each >= 0) != kept:
        return None
    below, above = factors_of(terms), [part for part in product.parts if part is not total]
    exps, weights = split_exponentials(above)
    names = [
        {(key_of(part.value), part.axes, part.number) for part in parts}
        for parts in (above, below.parts)
    ]
    if not exps or names[0] != names[1] or not below.constant > 0:
        return None
    if any(shifted_by_maximum(part.value) for part in exps):
        return None
    scale, shape = product.constant, value.shape

    def build(*arrays: Array) -> Array:
        y = sum(
            scaled(part.number, broadcast(y, part.axes, shape))
            for part, y in zip(exps, arrays, strict=False)
        )
        w = math.prod(
            broadcast(w, part.axes, shape) ** part.number
            for part, w in zip(weights, arrays[len(exps) :], strict=True)
        )
        y = y if isinstance(w, int) else jnp.where(w == 0, -jnp.inf, y)
        terms = w * jnp.exp(y - finite(lax.stop_gradient(jnp.max(y, axis=axes, keepdims=True))))
        return scaled(scale * below.constant, terms / jnp.sum(terms, axis=axes, keepdims=True))

    return Rewrite(tuple(part.value for part in (*exps, *weights)), build)


def _tanh(value: Value, above: Part, below: Part, constant: float) -> Rewrite | None:
    """(exp(y) - exp(-y)) / (exp(y) + exp(-y)), (1 - exp(-y)) / (1 + exp(-y)), sinh(y) / cosh(y)."""
    if above.axes != all_axes(value) or below.axes != all_axes(value):
        return None
    y, other = argument_of(above.value, "sinh"), argument_of(below.value, "cosh")
    if y is not None and other is not None and is_same(y, other):
        return Rewrite((y,), lambda y: scaled(constant, tanh(y)))
    tops, bottoms = (_exponents(part.value) for part in (above, below))
    if tops is None or bottoms is None or tops.keys() != bottoms.keys() or len(tops) != 2:
        return None
    (first, (y, n)), (second, (z, m)) = tops.items()
    if n != -m or any(number != abs(n) for _, number in bottoms.values()):
        return None
    # The exponents are opposite, or one is zero.
    if first and second and first[0] == second[0] and first[1] == -second[1]:
        scale = 1.0
    elif None in (y, z):
        scale = 0.5
    else:
        return None
    y, scale = (y, math.copysign(scale, n)) if y is not None else (z, -math.copysign(scale, n))
    return y and Rewrite((y,), lambda y: scaled(constant, tanh(scaled(scale, y))))


def _exponents(value: Value) -> dict[Any, tuple[Value | None, float]] | None:
    """The terms n exp(y) of a sum: (y, n) by what y is, and (None, n) for a constant n."""
    total = terms_of(value)
    found: dict[Any, tuple[Value | None, float]] = {}
    for part in total.parts:
        y = argument_of(part.value, "exp")
        if y is None or part.axes != all_axes(value):
            return None
        inner = terms_of(y)
        if len(inner.parts) != 1 or inner.constant:
            return None
        found[key_of(inner.parts[0].value), inner.parts[0].number] = (y, part.number)
    if total.constant:
        found[()] = (None, total.constant)
    return found


def norm_at_zero(step: Step) -> Rewrite | None:
    """sqrt(sum(x²)), whose gradient at zero is zero."""
    total = _radicand(step)
    if total is None or (x := _summed_squares(total)) is None:
        return None
    return None if seen_through(x).step.kind == "stop_gradient" else Rewrite((total,), safe_sqrt)


def _radicand(step: Step) -> Value | None:
    """The value whose square root a step computes."""
    is_root = step.kind == "sqrt" or constant_of(step.inputs[-1]) == 0.5
    return seen_through(step.inputs[0]) if is_root else None


def _summed_squares(total: Value) -> Value | None:
    """x, if a value is the sum of its squares."""
    if (squares := argument_of(total, "reduce_sum")) is not None:
        return _square_root(seen_through(squares))
    step = total.step
    is_dot = step.kind == "dot_general" and not total.shape
    return step.inputs[0] if is_dot and is_same(*step.inputs) else None


def hypotenuse(step: Step) -> Rewrite | None:
    """sqrt(x² + y²), whose squares neither overflow nor underflow."""
    total = _radicand(step)
    if total is None:
        return None
    terms = terms_of(total)
    num_terms = len(terms.parts) + (terms.constant != 0)
    if num_terms < 2 or terms.constant < 0 or any(part.number != 1 for part in terms.parts):
        return None
    if len(terms.parts) == 1 and terms.constant < EPSILON:
        return None
    found = [_square_root(part.value) for part in terms.parts]
    operands = [root for root in found if root is not None]
    if len(operands) != len(found):
        return None
    places, shape = [part.axes for part in terms.parts], step.output.shape

    def build(*arrays: Array) -> Array:
        roots = [broadcast(root, axes, shape) for root, axes in zip(arrays, places, strict=True)]
        if terms.constant:
            roots.append(jnp.full_like(roots[0], math.sqrt(terms.constant)))
        return length(roots)

    return Rewrite(tuple(operands), build)


EPSILON = 1e-3
"""Smaller constants in a square root keep its gradient finite at zero."""


def direction_of_zero(step: Step) -> Rewrite | None:
    """X / |x|, which is zero at zero."""
    product, shape = factors_of(step.output), step.output.shape
    below = [part for part in product.parts if part.number == -0.5]
    above = [part for part in product.parts if part.number == 1]
    if len(below) != 1 or len(above) != 1 or len(product.parts) != 2:
        return None
    x, total = _summed_squares(below[0].value), below[0].value
    if x is None or not is_same(x, above[0].value):
        return None

    def build(x: Array, total: Array) -> Array:
        norm = broadcast(jnp.sqrt(jnp.where(total == 0, 1, total)), below[0].axes, shape)
        return scaled(product.constant, broadcast(x, above[0].axes, shape) / norm)

    return Rewrite((above[0].value, total), build)


def product_with_own_log(step: Step) -> Rewrite | None:
    """X log(x), which is zero at zero."""
    product = factors_of(step.output)
    logs = [part for part in product.parts if argument_of(part.value, "log") is not None]
    if len(logs) != 1 or logs[0].number != 1:
        return None
    x = seen_through(logs[0].value).step.inputs[0]
    inside = {(key_of(part.value), part.number, part.axes) for part in factors_of(x).parts}
    others = {
        (key_of(part.value), part.number, part.axes) for part in product.parts if part not in logs
    }
    if inside != others or not inside or logs[0].axes != all_axes(step.output):
        return None
    scale = product.constant / factors_of(x).constant
    if logs[0].value.rewrite is not None:
        return Rewrite(
            (x, logs[0].value), lambda x, log: scaled(scale, x * jnp.where(x == 0, 0, log))
        )

    def build(x: Array) -> Array:
        is_zero = x == 0
        safe = jnp.where(is_zero, 1, x)
        return scaled(scale, safe * jnp.log(safe))

    return Rewrite((x,), build)


def quotient_of_itself(step: Step) -> Rewrite | None:
    """X / x, which is one at zero."""
    x, y = step.inputs
    if constant_of(x) is not None or x.shape != y.shape or not is_same(x, y):
        return None
    return Rewrite((x,), lambda x: jnp.where(jnp.isnan(x), x, 1))


def low_precision_sum(step: Step) -> Rewrite | None:
    """A sum of 256 terms or more, added in 16 bits."""
    (x,) = step.inputs
    is_low = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    count = math.prod(x.shape[axis] for axis in step.params["axes"])
    return Rewrite() if is_low and count >= 256 else None


def overflowing_cast(step: Step) -> Rewrite | None:
    """A cast to float16 of what easily exceeds 65504."""
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
        "jax.nn.log_softmax, jax.nn.log_sigmoid, jax.nn.softplus or jax.nn.logsumexp",
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
        "where both are nearly equal, or large",
        "(a - b) * (a + b), jnp.var",
    ),
    Rule(
        "quotient of exponentials",
        ("div", "integer_pow", "mul"),
        quotient_of_exponentials,
        "above 88 in float32: inf / inf, in the value or in the gradient",
        "jax.nn.sigmoid, jax.nn.softmax, jnp.tanh",
    ),
    Rule(
        "norm at zero",
        ("sqrt", "pow"),
        norm_at_zero,
        "in the gradient at zero: 0 * inf",
        "jnp.where around the square root and inside of it",
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
        "in the gradient, where the other branch has none: 0 * inf",
        "jnp.where inside of the function too: jnp.where(c, f(jnp.where(c, x, 1)), 0)",
        is_of_gradient=True,
    ),
    Rule("quotient of itself", ("div",), quotient_of_itself, "at zero: 0 / 0", "1"),
    Rule(
        "sum in low precision",
        ("reduce_sum",),
        low_precision_sum,
        "where the sum is 256 times a term: the term is lost",
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
)
