"""Logarithms of what overflows or underflows: exponentials, their sums, probabilities, products.

The logarithm of a product is a sum of logarithms. Each is the sum of two parts, `large` and
`small`, where `small` holds the digits: the large parts are added first, and cancel exactly where
they are equal, as in the logarithm of a softmax.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ._expressions import (
    INPUT,
    PICKS,
    Axes,
    Part,
    Parts,
    Rewrite,
    Step,
    Value,
    argument_of,
    broadcast,
    called_function,
    constant_of,
    factors_of,
    seen_through,
    terms_of,
    unbroadcast,
)
from ._functions import (
    GUARDS,
    is_at_most_zero,
    normal_cdf_of,
    shifted_by_maximum,
    sigmoid_of,
    split_exponentials,
)
from ._replacements import log1mexp, log_normal_cdf, logaddexp, scaled

Split = tuple[Array, Array]


@dataclasses.dataclass(frozen=True)
class Log:
    """The logarithm of a value: `split` of the arrays of `operands` is its large and small part.

    - `is_near_one`: whether it has more digits only where the value is near one.
    """

    operands: tuple[Value, ...]
    split: Callable[..., Split]
    is_near_one: bool = False


def log_rule(step: Step) -> Rewrite | None:
    """log(x), log2(x) and log1p(x), where the logarithm of x, or of a factor of x, is known."""
    (x,) = step.inputs
    if step.kind == "log1p":
        total = terms_of(x)
        if _is_guarded(total):
            return None
        log = log_of_sum(dataclasses.replace(total, constant=total.constant + 1), x.shape)
    else:
        log = log_of_product(x)
    # Newer JAX has a `log2` of its own.
    scale = 1 / math.log(2) if step.kind == "log2" else 1
    return log and Rewrite(log.operands, lambda *arrays: scaled(scale, _sum(log.split(*arrays))))


def _is_guarded(total: Parts) -> bool:
    """Whether exponentials were kept from their limits by `where`, or by a limit."""
    arguments = [argument_of(part.value, "exp") for part in total.parts]
    return all(y is not None and seen_through(y).step.kind in GUARDS for y in arguments)


def log_of_product(value: Value) -> Log | None:
    if (matrix := _argument_of_det(value)) is not None:
        return Log((matrix,), lambda x: (jnp.zeros(x.shape[:-2], x.dtype), _log_det(x)))
    product, shape = factors_of(value), value.shape
    if not 0 < product.constant < math.inf:
        return None
    logs = [log_of(part.value) for part in product.parts]
    is_power = len(product.parts) == 1 and abs(product.parts[0].number) >= 2
    if not any(logs) and not is_power:
        return None
    if any(logs) and not all(logs) and all(log is None or log.is_near_one for log in logs):
        return None
    known = [(log, part) for log, part in zip(logs, product.parts, strict=True) if log is not None]
    # Two of these may be negative: the logarithm is that of their product.
    others = [part for log, part in zip(logs, product.parts, strict=True) if log is None]
    constant = math.log(product.constant)

    def split(*arrays: Array) -> Split:
        rest = iter(arrays)
        larges, smalls = [], []
        for log, part in known:
            large, small = log.split(*(next(rest) for _ in log.operands))
            larges.append(scaled(part.number, broadcast(large, part.axes, shape)))
            smalls.append(scaled(part.number, broadcast(small, part.axes, shape)))
        if others:
            smalls.append(_plain_log(others, list(rest), shape))
        small = _sum(smalls) + constant if constant else _sum(smalls)
        return _sum(larges) if larges else jnp.zeros_like(small), small

    operands = [each for log, _ in known for each in log.operands]
    return Log((*operands, *(part.value for part in others)), split)


def _plain_log(parts: Sequence[Part], arrays: Sequence[Array], shape: tuple[int, ...]) -> Array:
    """The logarithm of a product of powers."""
    powers = [broadcast(x, part.axes, shape) for x, part in zip(arrays, parts, strict=True)]
    if len(parts) > 1:
        product = powers[0] ** parts[0].number
        for power, part in zip(powers[1:], parts[1:], strict=True):
            product = product * power**part.number
        return jnp.log(product)
    number = parts[0].number
    return scaled(number, jnp.log(jnp.abs(powers[0]) if number % 2 == 0 else powers[0]))


def _sum(arrays: Sequence[Array]) -> Array:
    total = arrays[0]
    for each in arrays[1:]:
        total = total + each
    return total


def log_of(value: Value) -> Log | None:
    """The logarithm of a value, if it is known without computing the value."""
    value = seen_through(value)
    if (y := argument_of(value, "exp")) is not None:
        return Log((y,), lambda y: (y, jnp.zeros_like(y)))
    if (y := argument_of(value, "exp2")) is not None:
        return Log((y,), lambda y: (y * math.log(2), jnp.zeros_like(y)))
    if (found := sigmoid_of(value)) is not None:
        y, scale = found
        return Log((y,), lambda y: _log_sigmoid(scaled(scale, y)))
    if (y := argument_of(value, "cosh")) is not None:
        return Log((y,), _log_cosh)
    if (found := normal_cdf_of(value)) is not None:
        y, scale, constant = found
        return Log(
            (y,), lambda y: (jnp.zeros_like(y), log_normal_cdf(y * scale) + math.log(constant))
        )
    match value.step.kind:
        case "reduce_sum":
            return _log_of_reduced_sum(value)
        case "reduce_prod":
            (x,), axes = value.step.inputs, value.step.params["axes"]
            return Log((x,), lambda x: (jnp.zeros(value.shape, x.dtype), _log_product(x, axes)))
        case "select_n" if any(logs := [log_of(each) for each in value.step.inputs[1:]]):
            return _log_of_choice(value.step, logs)
        case "gather" if not _fills_with_nan(value.step.params["fill_value"]):
            return None
        case kind if kind in PICKS and (log := log_of(value.step.inputs[0])) is not None:
            # The logarithm of some elements is some elements of the logarithm.
            step, num_operands = value.step, len(log.operands)

            def split(*arrays: Array) -> Split:
                parts = log.split(*arrays[:num_operands])
                shape = step.inputs[0].shape
                if step.kind in ("reduce_max", "reduce_min"):
                    parts = _sum(parts), jnp.zeros_like(parts[0])  # The largest of the sums.
                parts = [jnp.broadcast_to(part, shape) for part in parts]
                bind = step.eqn.primitive.bind
                # Of a Python number, `stop_gradient` is no array.
                large, small = (
                    jnp.asarray(bind(part, *arrays[num_operands:], **step.params)) for part in parts
                )
                return large, small

            return Log((*log.operands, *step.inputs[1:]), split)
        case "add" | "sub" | "add_any":
            return log_of_sum(terms_of(value), value.shape) or _log_near_one(value)
        case "mul" | "div" | "neg" | "square" | "integer_pow" | "sqrt" | "rsqrt":
            return log_of_product(value) if _is_product(value) else None
    return None


def _fills_with_nan(number: Any) -> bool:
    return number is None or number != number


def _log_of_choice(step: Step, logs: list[Log | None]) -> Log:
    """The logarithm of `where`, of which not every branch is known."""
    branches = [
        log or Log((branch,), lambda x: (jnp.zeros_like(x), jnp.log(x)))
        for log, branch in zip(logs, step.inputs[1:], strict=True)
    ]

    def split(condition: Array, *arrays: Array) -> Split:
        rest = iter(arrays)
        parts = [log.split(*(next(rest) for _ in log.operands)) for log in branches]
        larges, smalls = zip(*parts, strict=True)
        return lax.select_n(condition, *larges), lax.select_n(condition, *smalls)

    return Log((step.inputs[0], *(each for log in branches for each in log.operands)), split)


def log_of_sum(total: Parts, shape: tuple[int, ...]) -> Log | None:
    """log(c + n exp(y) + m exp(z) + ...), log(1 - exp(y)), log(exp(y) - 1), log(1 - tanh² y)."""
    arguments = [argument_of(part.value, "exp") for part in total.parts]
    exps = [y for y in arguments if y is not None]
    numbers, places = [part.number for part in total.parts], [part.axes for part in total.parts]
    num_terms = len(numbers) + (total.constant != 0)
    is_positive_sum = len(exps) == len(arguments) > 0 and total.constant >= 0 and min(numbers) > 0
    if is_positive_sum and total.constant and all(map(is_at_most_zero, exps)):
        return None
    if is_positive_sum and num_terms > 1:
        constants = [math.log(total.constant)] if total.constant else []

        def split(*arrays: Array) -> Split:
            ys = [
                broadcast(y, axes, shape) + math.log(n) if n != 1 else broadcast(y, axes, shape)
                for y, axes, n in zip(arrays, places, numbers, strict=True)
            ]
            ys += [jnp.full_like(ys[0], each) for each in constants]
            large = finite(lax.stop_gradient(_max(ys)))
            if len(ys) == 2:
                return large, logaddexp(ys[0] - large, ys[1] - large)
            return large, jnp.log(_sum([jnp.exp(y - large) for y in ys]))

        return Log(tuple(exps), split)
    if total.constant == 1 and numbers == [-1]:
        (part,) = total.parts
        if (found := _complement(part.value)) is not None:
            y, log = found
            return Log((y,), lambda y: _broadcast_both(log(y), part.axes, shape))
    if len(total.parts) != 1 or not total.constant or abs(numbers[0]) != abs(total.constant):
        return None
    (part,), (y,) = total.parts, arguments
    lifted = functools.partial(broadcast, axes=part.axes, shape=shape)
    if y is not None and part.number > 0 > total.constant:
        shift = math.log(part.number)
        return Log((y,), lambda y: (lifted(y), lifted(log1mexp(-y) + shift)))
    if y is not None and part.number < 0 < total.constant:
        shift = math.log(total.constant)
        return Log((y,), lambda y: (jnp.zeros(shape, y.dtype), lifted(log1mexp(y) + shift)))
    if total.constant == 1 and part.number == -1:
        tanh = factors_of(part.value)
        if [(each.number, tanh.constant) for each in tanh.parts] == [(2, 1)]:
            if (y := argument_of(tanh.parts[0].value, "tanh")) is not None:
                return Log((y,), lambda y: _broadcast_both(_log_sech_squared(y), part.axes, shape))
    return None


def _broadcast_both(split: Split, axes: Axes, shape: tuple[int, ...]) -> Split:
    large, small = split
    return broadcast(large, axes, shape), broadcast(small, axes, shape)


def _complement(value: Value) -> tuple[Value, Callable[[Array], Split]] | None:
    """`y` and a function of it that is the logarithm of 1 - value, for a probability."""
    if (found := sigmoid_of(value)) is not None:
        y, scale = found
        return y, lambda y: _log_sigmoid(scaled(-scale, y))
    if (found := normal_cdf_of(value)) is not None and found[2] == 1:
        y, scale, _ = found
        return y, lambda y: (jnp.zeros_like(y), log_normal_cdf(-scale * y))
    return None


def _log_near_one(value: Value) -> Log | None:
    """log(1 + x) and log(1 - x)."""
    step = value.step
    numbers = [constant_of(each) for each in step.inputs]
    if numbers[0] == 1:
        sign, x = (-1 if step.kind == "sub" else 1), step.inputs[1]
    elif numbers[1] == (-1 if step.kind == "sub" else 1):
        sign, x = 1, step.inputs[0]
    else:
        return None
    x, axes = unbroadcast(x)
    shape = value.shape
    if _is_whole(x):
        return None

    def split(x: Array) -> Split:
        x = broadcast(x, axes, shape)
        return jnp.zeros_like(x), lax.log1p(scaled(sign, x))

    return Log((x,), split, is_near_one=True)


def _is_whole(value: Value) -> bool:
    """Whether it is computed of integers, as a count or an index, by sums and products."""
    step = seen_through(value).step
    if step.kind == "convert_element_type":
        return jnp.issubdtype(step.inputs[0].dtype, jnp.integer)
    if step.kind in ("add", "sub", "mul", "neg"):
        return all(_is_whole(each) for each in step.inputs if constant_of(each) is None)
    return step.kind == "iota"


def _max(arrays: Sequence[Array]) -> Array:
    largest = arrays[0]
    for each in arrays[1:]:
        largest = jnp.maximum(largest, each)
    return largest


def finite(large: Array) -> Array:
    """Zero where it is infinite, so that a difference from it is no NaN."""
    return jnp.where(jnp.isfinite(large), large, 0)


def _log_of_reduced_sum(value: Value) -> Log | None:
    """log(sum(w exp(y))), with positive weights w, or none."""
    (x,), axes = value.step.inputs, value.step.params["axes"]
    product = factors_of(x)
    exps, weights = split_exponentials(product.parts)
    if not exps or not product.constant > 0:
        return None
    if len(product.parts) == 1 and shifted_by_maximum(exps[0].value):
        return None
    shift, num_exps = math.log(product.constant), len(exps)

    def split(*arrays: Array) -> Split:
        ys = [
            scaled(part.number, broadcast(y, part.axes, x.shape))
            for part, y in zip(exps, arrays, strict=False)
        ]
        y = _sum(ys)
        ws = [
            broadcast(w, part.axes, x.shape) ** part.number
            if part.number != 1
            else broadcast(w, part.axes, x.shape)
            for part, w in zip(weights, arrays[num_exps:], strict=True)
        ]
        for w in ws:
            y = jnp.where(w == 0, -jnp.inf, y)
        large = finite(lax.stop_gradient(jnp.max(y, axis=axes, keepdims=True)))
        terms = jnp.exp(y - large)
        for w in ws:
            terms = terms * w
        return lax.squeeze(large, axes), jnp.log(jnp.sum(terms, axis=axes)) + shift

    return Log(tuple(part.value for part in (*exps, *weights)), split)


def _log_sigmoid(y: Array) -> Split:
    large = finite(lax.stop_gradient(jnp.minimum(y, 0)))
    return large, -logaddexp(large, large - y)


def _log_cosh(y: Array) -> Split:
    is_near = jnp.abs(y) < 1
    near = lax.log1p(2 * jnp.square(jnp.sinh(jnp.where(is_near, y, 0) / 2)))
    far = jnp.where(is_near, 1, y)
    large = finite(lax.stop_gradient(jnp.abs(far)))
    small = jnp.logaddexp(far - large, -far - large) - math.log(2)
    return jnp.where(is_near, 0, large), jnp.where(is_near, near, small)


def _log_sech_squared(y: Array) -> Split:
    large, small = _log_cosh(y)
    return -2 * large, -2 * small


def _is_product(value: Value) -> bool:
    """Whether it is more than one factor that cannot be divided further."""
    parts = factors_of(value).parts
    return len(parts) > 1 or any(part.value is not value for part in parts)


def _argument_of_det(value: Value) -> Value | None:
    while value.step is not INPUT:
        if called_function(value.step.eqn) == ("det", True):
            return value.step.inputs[0]
        if value.inside is None:
            return None
        value = value.inside
    return None


def _log_det(x: Array) -> Array:
    sign, log = jnp.linalg.slogdet(x)
    return jnp.where(sign < 0, jnp.nan, log)


def _log_product(x: Array, axes: Sequence[int]) -> Array:
    is_negative = jnp.sum(x < 0, axis=axes) % 2 == 1
    return jnp.where(is_negative, jnp.nan, jnp.sum(jnp.log(jnp.abs(x)), axis=axes))
