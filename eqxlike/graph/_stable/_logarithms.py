"""Rules for logarithms of expressions that overflow, underflow or cancel.

The logarithm of a product is computed as a sum of logarithms. Each logarithm is represented by two
arrays, `large` and `small`, whose sum is the logarithm; `small` holds the low digits. All large
parts are added first, so that equal large parts cancel exactly, as in the logarithm of a softmax.
If a value x may be negative, the two arrays represent log|x|, and a third array is the sign of x.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from . import _replacements as stable
from ._expressions import (
    PICKS,
    Part,
    Parts,
    Step,
    Value,
    all_axes,
    argument_of,
    axes_of_dot,
    broadcast,
    constant_of,
    factors_of,
    is_determinant,
    once,
    seen_through,
    terms_of,
    unbroadcast,
)
from ._patterns import (
    GUARDS,
    Formula,
    erfc_of,
    exponent_of,
    exponential_of,
    exponentials_in,
    first_match,
    match,
    shifted_terms,
    sigmoid_of,
)
from ._replacements import digits, log_size, scaled, single
from ._rewrite import Rewrite, applied, lifted, product_of, sum_of


@dataclasses.dataclass(frozen=True)
class Log:
    """The stable logarithm of a value x.

    - `parts`: computes the large and the small part of log|x|, and the sign of x. The sign may be
      omitted if `is_positive`.
    - `is_positive`: whether x is never negative.
    - `is_near_one`: whether this logarithm is more accurate than `log` only for x near one.
    """

    parts: Rewrite
    is_positive: bool = True
    is_near_one: bool = False


def log_rule(step: Step) -> Rewrite | None:
    """Matches log(x), log2(x) and log1p(x) if x or a factor of x has a stable logarithm."""
    (x,) = step.inputs
    if step.kind == "log1p":
        total = terms_of(x)
        exponents = [argument_of(part.value, "exp") for part in total.parts]
        if all(y is not None and seen_through(y).step.kind in GUARDS for y in exponents):
            return None  # `where`, `max`, `min` or `clamp` limits each exponent.
        log = log_of_sum(dataclasses.replace(total, constant=total.constant + 1), x.shape)
    elif (log := _log_of_product(x)) is None:
        return Rewrite() if _is_product_of_matrices(x) else None
    # Newer versions of JAX have a primitive `log2`.
    scale = 1 / math.log(2) if step.kind == "log2" else 1
    return log and applied(lambda parts: scaled(scale, _whole(*parts)), log.parts)


def _whole(large: Array, small: Array, *sign: Array) -> Array:
    total = large + small
    return total + jnp.where(sign[0] < 0, jnp.nan, 0) if sign else total


def _is_product_of_matrices(value: Value) -> bool:
    """Returns True if a value is matrix @ exp(y).

    Such a product has no stable logarithm here, because each element would need its own shift of y.
    """
    step = unbroadcast(value)[0].step
    inputs = step.inputs if step.kind == "dot_general" else ()
    return any(exponential_of(factors_of(each)).may_underflow for each in inputs)


def _log_of_product(value: Value) -> Log | None:
    product, shape = factors_of(value), value.shape
    # Each of these functions as a whole has a stable logarithm. The logarithms of its factors would
    # cancel.
    if sigmoid_of(value) or erfc_of(value) or match(lax.cosh, value):
        return log_of(value)
    if not 0 < product.constant < math.inf:
        return None
    pairs = [(log_of(part.value), part) for part in product.parts]
    factors = [(log, part) for log, part in pairs if log is not None]
    others = [part for log, part in pairs if log is None]
    if not factors and not (len(others) == 1 and abs(others[0].number) >= 2):
        return None
    if factors and others and all(log.is_near_one for log, _ in factors):
        return None
    if others:
        power = others[0].number if len(others) == 1 else 1.0
        rest = lifted(others[0], shape) if len(others) == 1 else product_of(others, shape)
        own = Part(power, value, all_axes(value))
        factors.append((Log(applied(_plain_log, rest), is_positive=False), own))
    shift = math.log(product.constant)
    is_positive = all(log.is_positive or part.number % 2 == 0 for log, part in factors)

    def combined(*logs: Sequence[Array]) -> tuple[Array, ...]:
        larges, smalls, signs = [], [], []
        for (log, part), parts in zip(factors, logs, strict=True):
            large, small, *sign = (broadcast(each, part.axes, shape) for each in parts)
            if part.number % 2 and not log.is_positive:
                # A root of a negative number is NaN. An odd power has the sign of its base.
                is_root = part.number != int(part.number)
                small = jnp.where(sign[0] < 0, jnp.nan, small) if is_root else small
                signs += sign
            larges.append(scaled(part.number, large))
            smalls.append(scaled(part.number, small))
        small = _sum(smalls) + shift if shift else _sum(smalls)
        return _sum(larges), small, *([functools.reduce(operator.mul, signs)] if signs else [])

    return Log(applied(combined, *(log.parts for log, _ in factors)), is_positive)


def _plain_log(x: Array) -> tuple[Array, ...]:
    return digits(*log_size(x))


def _sum(arrays: Sequence[Array]) -> Array:
    return functools.reduce(operator.add, arrays)


def _of_sigmoids(y: Array, z: Array) -> tuple[Array, ...]:
    """The logarithm of s(y) - s(z) = s(y) s(-z) (1 - exp(z - y)), where s is the sigmoid."""
    far, rest, sign = stable.log_size_of_expm1(z - y)
    (one, more), (other, others) = stable.log_sigmoid(y), stable.log_sigmoid(-z)
    return one + other + far, more + others + rest, -sign


def _of_exponentials(y: Array, z: Array) -> tuple[Array, ...]:
    large, small, sign = stable.log_size_of_expm1(z - y)
    return y + large, small, -sign


LOGARITHMS: tuple[tuple[Formula, Callable[..., Sequence[Array]], bool], ...] = (
    (lax.logistic, stable.log_sigmoid, True),
    (lax.cosh, stable.log_cosh, True),
    (lax.sinh, stable.log_size_of_sinh, False),
    (lax.expm1, stable.log_size_of_expm1, False),
    (lambda y: 1 - lax.logistic(y), lambda y: stable.log_sigmoid(-y), True),
    (lambda y: 1 - lax.tanh(y) ** 2, lambda y: [-2 * x for x in stable.log_cosh(y)], True),
    (lambda y: 1 + lax.tanh(y), stable.log_of_one_plus_tanh, True),
    (lambda y: 1 - lax.tanh(y), lambda y: stable.log_of_one_plus_tanh(-y), True),
    (lambda y: lax.exp(y) - 1, stable.log_size_of_expm1, False),
    (lambda y, z: lax.exp(y) - lax.exp(z), _of_exponentials, False),
    (lambda y, z: lax.logistic(y) - lax.logistic(z), _of_sigmoids, False),
)
"""Each row has a formula, its logarithm, and True if the formula is never negative."""


def _log_by_table(value: Value | Parts, shape: tuple[int, ...]) -> Log | None:
    if (erfc := erfc_of(value)) is not None:
        y, rate, number = erfc
        log = applied(lambda y: stable.log_erfc(single(y), rate, number), sum_of((y,), shape))
        return Log(applied(digits, log))
    if (row := first_match(LOGARITHMS, value)) is None:
        return None
    (factor, holes), function, is_positive = row

    def log_of_multiple(*arrays: Array) -> tuple[Array, ...]:
        large, small, *sign = function(*arrays)
        sign = sign or [jnp.ones_like(large)]
        shift = math.log(abs(factor))
        return large, small + shift if shift else small, scaled(math.copysign(1, factor), *sign)

    sums = (sum_of((hole,), shape) for hole in holes)
    return Log(applied(log_of_multiple, *sums), is_positive and factor > 0)


EXTREMES = ("reduce_max", "reduce_min")


@once
def log_of(value: Value) -> Log | None:
    """The logarithm of a value, computed without the value itself. None if that is not possible."""
    value = seen_through(value)
    step, kind = value.step, value.step.kind
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return None
    if is_determinant(step):
        return Log(applied(stable.log_size_of_det, step.inputs[0]), is_positive=False)
    if (found := exponent_of(value)) is not None:
        y, scale = found
        return Log(applied(lambda y: (scaled(scale, y), jnp.zeros_like(y)), y))
    if (log := _log_by_table(value, value.shape)) is not None:
        return log
    match kind:
        case "reduce_sum":
            return _log_of_reduced_sum(step)
        case "dot_general":
            return _log_of_dot(step)
        case "select_n":
            return _log_of_choice(step)
        case "add" | "sub" | "add_any":
            return log_of_sum(terms_of(value), value.shape) or _log_near_one(value)
        case "mul" | "div" | "neg" | "square" | "integer_pow" | "sqrt" | "rsqrt":
            parts = factors_of(value).parts
            is_product = len(parts) > 1 or any(part.value is not value for part in parts)
            return _log_of_product(value) if is_product else None
    log = log_of(step.inputs[0]) if step.inputs else None
    if kind == "reduce_prod":
        return _log_of_reduced_product(step, log)
    if log is None:
        return None
    if kind == "abs":
        if not log.is_positive and argument_of(step.inputs[0], *EXTREMES) is not None:
            return None  # The logarithm of a maximum or minimum has lost the sign.
        return Log(applied(lambda parts: parts[:2], log.parts))
    if kind == "cumsum" and log.is_positive:
        params = {"axis": step.params["axis"], "reverse": step.params["reverse"]}
        cumulate = functools.partial(lax.cumlogsumexp, **params)
        return Log(applied(lambda parts: digits(cumulate(_whole(*parts))), log.parts))
    return _log_of_picks(step, log) if kind in PICKS else None


def _log_of_picks(step: Step, log: Log) -> Log | None:
    """The logarithm of the elements that `step` selects, computed by selecting logarithms."""
    fill = step.params.get("fill_value")
    if fill is not None and fill == fill:  # The fill value is not NaN.
        return None

    def picked(parts: Sequence[Array], *indices: Array) -> list[Array]:
        if step.kind in EXTREMES:  # Compare the sums of the parts, not the parts.
            parts = digits(whole := _whole(*parts), jnp.ones_like(whole))
        parts = [jnp.broadcast_to(part, step.inputs[0].shape) for part in parts]
        # `bind` may return a Python number, for example for `stop_gradient`.
        bind = step.eqn.primitive.bind
        return [jnp.asarray(bind(part, *indices, **step.params)) for part in parts]

    return Log(applied(picked, log.parts, *step.inputs[1:]), log.is_positive)


def _log_of_choice(step: Step) -> Log | None:
    """The logarithm of `where`, if at least one branch has a stable logarithm."""
    condition, *branches = step.inputs
    if condition.dtype != bool or condition.shape != step.output.shape:
        return None
    # If a branch may be negative, the derivative of its stable logarithm may be infinite where the
    # branch is not chosen. So use the plain logarithm of such a branch.
    logs = [log if (log := log_of(each)) and log.is_positive else None for each in branches]
    if not any(logs):
        return None

    def chosen(condition: Array, *branches: Any) -> list[Array]:
        parts = []
        for index, (log, found) in enumerate(zip(logs, branches, strict=True)):
            if log is None:
                is_chosen = condition if index else ~condition
                parts.append(_plain_log(jnp.where(is_chosen, found, 1)))
            else:
                parts.append((*found[:2], jnp.ones_like(found[1])))
        return [lax.select_n(condition, *each) for each in zip(*parts, strict=True)]

    sources = (log.parts if log else x for log, x in zip(logs, branches, strict=True))
    return Log(applied(chosen, condition, *sources), is_positive=False)


def log_of_sum(total: Parts, shape: tuple[int, ...]) -> Log | None:
    """The stable logarithm of a sum, such as n w exp(y) + m exp(z) or 1 - exp(y), or None."""
    if (log := _log_by_table(total, shape)) is not None:
        return log
    return _log_of_exponentials(total, shape)


def _log_near_one(value: Value) -> Log | None:
    """The logarithm of 1 + x or 1 - x, computed with log1p."""
    step = value.step
    numbers = [constant_of(each) for each in step.inputs]
    if numbers[0] == 1:
        one, x = (-1 if step.kind == "sub" else 1), step.inputs[1]
    elif numbers[1] == (-1 if step.kind == "sub" else 1):
        one, x = 1, step.inputs[0]
    else:
        return None
    part = Part(1.0, *unbroadcast(x))

    def near_one(x: Array) -> tuple[Array, ...]:
        x = scaled(one, x)
        size = jnp.where(x < -1, -2 - x, x)  # This is |1 + x| - 1.
        return digits(stable.log1p(size), jnp.sign(1 + x))

    log = Log(applied(near_one, lifted(part, value.shape)), is_positive=False, is_near_one=True)
    return None if _is_integer(part.value) else log


def _is_integer(value: Value) -> bool:
    """Returns True if a value is computed from integers by sums and products, such as a count."""
    step = seen_through(value).step
    if step.kind == "convert_element_type":
        return jnp.issubdtype(step.inputs[0].dtype, jnp.integer)
    if step.kind in ("add", "sub", "mul", "neg"):
        return all(_is_integer(each) for each in step.inputs if constant_of(each) is None)
    return step.kind == "iota"


def _log_of_exponentials(total: Parts, shape: tuple[int, ...]) -> Log | None:
    terms = exponentials_in(total)
    may_overflow = any(term.may_overflow for term in terms)
    if len(terms) < 2 or not (may_overflow or all(term.may_underflow for term in terms)):
        return _log_of_known_terms(total, shape)
    is_positive = all(term.number > 0 and not term.weights for term in terms)
    if not is_positive and not any(term.number > 0 for term in terms):
        return None
    if is_positive and len(terms) == 2:
        n, m = (term.number for term in terms)

        def of_pair(first: tuple[Array, None], second: tuple[Array, None]) -> tuple[Array, Array]:
            y, z = (0.0 if y is None else y for y, _ in (first, second))
            large = stable.finite(lax.stop_gradient(jnp.maximum(y, z)))
            return large, stable.logaddexp(y - large, z - large, m / n) + math.log(n)

        return Log(applied(of_pair, *(term.split(shape) for term in terms)))

    def of_terms(found: tuple[Array, list[Array]]) -> tuple[Array, ...]:
        large, parts = found
        others = _sum(parts[:-1])
        small, sign = log_size(others + parts[-1])
        if total.constant == 1:
            # The last term is the constant 1, so use log1p of the other terms.
            near = jnp.where(large == 0, others, 0)
            near = stable.log1p(jnp.where(near < -1, -2 - near, near))
            small = jnp.where(large == 0, near, small)
        return large, small, sign

    return Log(applied(of_terms, shifted_terms(terms, shape)), is_positive)


def _log_of_known_terms(total: Parts, shape: tuple[int, ...]) -> Log | None:
    """The logarithm of a sum whose terms all have stable logarithms, such as probabilities."""
    logs = [log for part in total.parts if (log := log_of(part.value)) and log.is_positive]
    if total.constant or len(logs) < 2 or len(logs) < len(total.parts):
        return None
    terms = [exponential_of(factors_of(part.value)) for part in total.parts]
    is_shifted = all(term.exponents and not term.may_underflow for term in terms)
    if is_shifted or any(part.number <= 0 for part in total.parts):
        return None

    def of_terms(*logs: Sequence[Array]) -> tuple[Array, Array]:
        ys = [
            broadcast(_whole(*parts), part.axes, shape) + math.log(part.number)
            for parts, part in zip(logs, total.parts, strict=True)
        ]
        large, parts = stable.shifted(ys, [None] * len(ys))
        if len(ys) == 2:
            return large, stable.logaddexp(ys[0] - large, ys[1] - large)
        return large, jnp.log(_sum(parts))

    return Log(applied(of_terms, *(log.parts for log in logs)))


def _log_of_reduced_sum(step: Step) -> Log | None:
    """The logarithm of sum(w exp(y)), or None if the sum has another form."""
    (x,), axes = step.inputs, step.params["axes"]
    term = exponential_of(factors_of(x))
    if not term.exponents or not term.number > 0 or not (term.may_underflow or term.weights):
        return None

    def of_sum(split: tuple[Array, Array | None]) -> tuple[Array, ...]:
        large, terms = stable.shifted_along(*split, axes)
        small, sign = log_size(jnp.sum(terms, axis=axes))
        return lax.squeeze(large, axes), small + math.log(term.number), sign

    return Log(applied(of_sum, term.split(x.shape)), is_positive=not term.weights)


def _log_of_dot(step: Step) -> Log | None:
    """The logarithm of w @ exp(y), where w is a vector or a batch of vectors."""
    contracted, batch = step.params["dimension_numbers"]
    for place, other in ((0, 1), (1, 0)):
        x, weights = step.inputs[place], step.inputs[other]
        term = exponential_of(factors_of(x))
        is_vector = all(i in contracted[other] or i in batch[other] for i in all_axes(weights))
        if is_vector and term.exponents and not term.weights and term.number > 0:
            break
    else:
        return None
    reduced, axes = contracted[place], axes_of_dot(step, place)
    own = dict(zip((*batch[other], *contracted[other]), (*batch[place], *reduced), strict=True))
    axes_of_weights = tuple(own[i] for i in all_axes(weights))

    def of_dot(split: tuple[Array, None], w: Array) -> tuple[Array, ...]:
        y, weight = split[0], broadcast(w, axes_of_weights, x.shape)
        large = stable.largest_along(y, weight, reduced)
        pair = (jnp.exp(stable.finite_where_zero(y - large, weight)), w)[:: 1 - 2 * place]
        small, sign = log_size(step.eqn.primitive.bind(*pair, **step.params))
        return broadcast(large, axes, step.output.shape), small + math.log(term.number), sign

    return Log(applied(of_dot, term.split(x.shape), weights), is_positive=False)


def _log_of_reduced_product(step: Step, log: Log | None) -> Log:
    (x,), axes = step.inputs, step.params["axes"]
    known = log.parts if log is not None and log.is_positive else None

    def of_product(found: Any) -> tuple[Array, ...]:
        large, small, *sign = found if known else _plain_log(found)
        large, small = (jnp.sum(jnp.broadcast_to(y, x.shape), axes) for y in (large, small))
        return (large, small) if known else (large, small, jnp.prod(sign[0], axes))

    return Log(applied(of_product, known or x), is_positive=known is not None)


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
        is_guarded = 0 < total.constant + part.number < GUARD and _is_probability(part.value)
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


def _is_probability(value: Value) -> bool:
    """Returns True if one minus the value has a stable logarithm, as for a sigmoid or a cdf."""
    p = _limited(value) or value
    complement = Parts(1.0, (Part(-1.0, p, all_axes(p)),))
    return erfc_of(p) is not None or _log_by_table(complement, p.shape) is not None


def _has_logarithm(value: Value) -> bool:
    log = log_of(value)
    return log is not None and not log.is_near_one
