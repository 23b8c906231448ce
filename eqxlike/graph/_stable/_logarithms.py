"""Logarithms of what overflows or underflows: exponentials, their sums, probabilities, products.

The logarithm of a product is a sum of logarithms. Each is the sum of two parts, `large` and
`small`, where `small` holds the digits: the large parts are added first, and cancel exactly where
they are equal, as in the logarithm of a softmax.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ._expressions import (
    PICKS,
    Part,
    Parts,
    Step,
    Value,
    argument_of,
    broadcast,
    factors_of,
    is_determinant,
    once,
    seen_through,
    terms_of,
    unbroadcast,
)
from ._functions import (
    GUARDS,
    Exponential,
    erfc_of,
    exponent_of,
    exponential_of,
    exponentials_in,
    finite_where_zero,
    known,
    largest_along,
    opposites_in,
    product_of,
    shifted,
    shifted_along,
    sigmoid_by_tanh,
    sigmoid_of,
)
from ._log_differences import (
    Log,
    log_near_one,
    log_of_difference,
    log_of_exp_less_one,
)
from ._replacements import (
    Split,
    finite,
    log1mexp,
    log1p,
    log_cosh,
    log_det,
    log_erfc,
    log_product,
    log_sigmoid,
    log_size_of_det,
    log_size_of_product,
    logaddexp,
    scaled,
    single,
)
from ._rewrite import Rewrite


def log_rule(step: Step) -> Rewrite | None:
    """log(x), log2(x) and log1p(x), where the logarithm of x, or of a factor of x, is known."""
    (x,) = step.inputs
    if step.kind == "log1p":
        total = terms_of(x)
        if _is_guarded(total):
            return None
        log = log_of_sum(dataclasses.replace(total, constant=total.constant + 1), x.shape)
    elif (log := log_of_product(x)) is None:
        return Rewrite() if _is_product_of_matrices(x) else None
    # Newer JAX has a `log2` of its own.
    scale = 1 / math.log(2) if step.kind == "log2" else 1
    return log and Rewrite(log.operands, lambda *arrays: scaled(scale, _sum(log.split(*arrays))))


def _is_product_of_matrices(value: Value) -> bool:
    """Whether it is matrix @ exp(y), of which each element has a largest exponent of its own."""
    step = unbroadcast(value)[0].step
    inputs = step.inputs if step.kind == "dot_general" else ()
    terms = [exponential_of(factors_of(each)) for each in inputs]
    return any(term.may_underflow for term in terms)


def _is_guarded(total: Parts) -> bool:
    """Whether exponentials were kept from their limits by `where`, or by a limit."""
    arguments = [argument_of(part.value, "exp") for part in total.parts]
    return all(y is not None and seen_through(y).step.kind in GUARDS for y in arguments)


def log_of_product(value: Value) -> Log | None:
    product, shape = factors_of(value), value.shape
    # The logarithms of their factors would cancel.
    if sigmoid_of(value) or sigmoid_by_tanh(value) or erfc_of(value):
        return log_of(value)
    if opposites_in(terms_of(value)):
        return log_of_sum(terms_of(value), shape)
    if not 0 < product.constant < math.inf:
        return None
    logs = [log_of(part.value) for part in product.parts]
    is_power = len(product.parts) == 1 and abs(product.parts[0].number) >= 2
    if not any(logs) and not is_power:
        return None
    if any(logs) and not all(logs) and all(log is None or log.is_near_one for log in logs):
        return None
    # Two of these may be negative: the logarithm is that of their product.
    may_be_negative = [
        (log is None or not log.is_positive) and part.number % 2 != 0
        for log, part in zip(logs, product.parts, strict=True)
    ]
    with_log, signed, others = [], [], []
    for log, part, may in zip(logs, product.parts, may_be_negative, strict=True):
        is_single = may and sum(may_be_negative) == 1
        if log is not None and (log.is_positive or is_single):
            with_log.append((log, part))
        elif log is not None and log.signed is not None:
            signed.append((log, part))
        else:
            others.append(part)
    if not with_log and not signed and any(logs):
        return None
    constant, groups = math.log(product.constant), [*with_log, *signed]

    def split(*arrays: Array) -> Split:
        rest = iter(arrays)
        larges, smalls, factors = [], [], []
        for i, (log, part) in enumerate(groups):
            found = [next(rest) for _ in log.operands]
            if i < len(with_log):
                large, small = log.split(*found)
            else:
                assert log.signed is not None
                large, small, sign = log.signed(*found)
                if part.number % 2:
                    factors.append(_power_of_sign(broadcast(sign, part.axes, shape), part.number))
            larges.append(scaled(part.number, broadcast(large, part.axes, shape)))
            smalls.append(scaled(part.number, broadcast(small, part.axes, shape)))
        if factors:
            factors += [product_of(others, list(rest), shape)] if others else []
            smalls.append(jnp.log(functools.reduce(jnp.multiply, factors)))
        elif others:
            smalls.append(_plain_log(others, list(rest), shape))
        small = _sum(smalls) + constant if constant else _sum(smalls)
        return _sum(larges) if larges else jnp.zeros_like(small), small

    operands = [each for log, _ in groups for each in log.operands]
    is_positive = not any(may_be_negative)
    return Log((*operands, *(part.value for part in others)), split, is_positive=is_positive)


def _power_of_sign(sign: Array, number: float) -> Array:
    sign = jnp.where(sign == 0, 1, sign)  # The logarithm of the size is infinite there.
    return sign if number == int(number) else jnp.where(sign < 0, jnp.nan, sign)


def _plain_log(parts: Sequence[Part], arrays: Sequence[Array], shape: tuple[int, ...]) -> Array:
    """The logarithm of a product of powers."""
    if len(parts) > 1:
        return jnp.log(product_of(parts, arrays, shape))
    (part,), (x,) = parts, arrays
    x = broadcast(x, part.axes, shape)
    return scaled(part.number, jnp.log(jnp.abs(x) if part.number % 2 == 0 else x))


def _sum(arrays: Sequence[Array]) -> Array:
    total = arrays[0]
    for each in arrays[1:]:
        total = total + each
    return total


@once
def log_of(value: Value) -> Log | None:
    """The logarithm of a value, if it is known without computing the value."""
    value = seen_through(value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return None
    positive = functools.partial(Log, is_positive=True)
    if is_determinant(value.step):
        return Log(value.step.inputs[:1], log_det, signed=log_size_of_det)
    if (found := exponent_of(value)) is not None:
        y, scale = found
        return positive((y,), lambda y: (scaled(scale, y), jnp.zeros_like(y)))
    if (found := sigmoid_of(value) or sigmoid_by_tanh(value)) is not None:
        y, scale = found
        return positive((y,), lambda y: log_sigmoid(scaled(scale, y)))
    if (y := argument_of(value, "cosh")) is not None:
        return positive((y,), log_cosh)
    if (y := argument_of(value, "sinh")) is not None:
        return Log((y,), lambda y: (y, log1mexp(-2 * y) - math.log(2)))
    if (found := erfc_of(value)) is not None:
        y, sign, rate, number = found
        return positive(
            (y,), lambda y: (jnp.zeros_like(y), log_erfc(single(sign * y), rate, number))
        )
    match value.step.kind:
        case "abs":
            return _log_of_size(value.step.inputs[0])
        case "reduce_sum":
            return _log_of_reduced_sum(value)
        case "dot_general":
            return _log_of_dot(value)
        case "reduce_prod":
            return _log_of_reduced_product(value)
        case "select_n":
            return _log_of_choice(value.step)
        case "cumsum" if (log := log_of(value.step.inputs[0])) and log.is_positive:
            axis, reverse = value.step.params["axis"], value.step.params["reverse"]

            def cumulative(*arrays: Array) -> Split:
                y = lax.cumlogsumexp(_sum(log.split(*arrays)), axis, reverse)
                return y, jnp.zeros_like(y)

            return positive(log.operands, cumulative)
        case "expm1":
            return log_of_exp_less_one(value)
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

            return Log((*log.operands, *step.inputs[1:]), split, is_positive=log.is_positive)
        case "add" | "sub" | "add_any":
            return log_of_sum(terms_of(value), value.shape) or log_near_one(value)
        case "mul" | "div" | "neg" | "square" | "integer_pow" | "sqrt" | "rsqrt":
            return log_of_product(value) if _is_product(value) else None
    return None


def _fills_with_nan(number: Any) -> bool:
    return number is None or number != number


def _log_of_choice(step: Step) -> Log | None:
    """The logarithm of `where`, of which not every branch is known."""
    condition, *branches = step.inputs
    if condition.dtype != bool or condition.shape != step.output.shape:
        return None
    # The derivative of others may be infinite where they are not chosen.
    logs = [log if (log := log_of(each)) and log.is_positive else None for each in branches]
    if not any(logs):
        return None
    groups = [log.operands if log else (x,) for log, x in zip(logs, branches, strict=True)]

    def split(condition: Array, *arrays: Array) -> Split:
        rest, parts = iter(arrays), []
        for index, (log, group) in enumerate(zip(logs, groups, strict=True)):
            found = [next(rest) for _ in group]
            if log is not None:
                parts.append(log.split(*found))
            else:
                is_chosen = condition if index else ~condition
                plain = jnp.log(jnp.where(is_chosen, found[0], 1))
                parts.append((jnp.zeros_like(plain), plain))
        larges, smalls = zip(*parts, strict=True)
        return lax.select_n(condition, *larges), lax.select_n(condition, *smalls)

    return Log((condition, *(each for group in groups for each in group)), split)


def _log_of_size(value: Value) -> Log | None:
    """log(|x|)."""
    log = log_of(value)
    if log is None or log.is_positive or log.signed is None:
        return log if log and log.is_positive else None
    signed = log.signed
    return Log(log.operands, lambda *arrays: signed(*arrays)[:2], is_positive=True)


def log_of_sum(total: Parts, shape: tuple[int, ...]) -> Log | None:
    """log(1 - exp(y)), log(exp(y) - 1), log(1 - tanh² y), and log(n w exp(y) + m exp(z) + ...)."""
    return log_of_difference(total, shape) or _log_of_exponentials(total, shape)


def _log_of_exponentials(total: Parts, shape: tuple[int, ...]) -> Log | None:
    if (first := opposites_in(total)) is not None and first.number > 0:
        shift = math.log(2 * first.number)

        def split_cosh(*arrays: Array) -> Split:
            large, small = log_cosh(known(first.split(arrays, shape)[0]))
            return large, small + shift

        return Log(first.operands, split_cosh, is_positive=True)
    terms = exponentials_in(total)
    may_overflow = any(term.may_overflow for term in terms)
    if len(terms) < 2 or not (may_overflow or all(term.may_underflow for term in terms)):
        return _log_of_known_terms(total, shape)
    is_positive = all(term.number > 0 and not term.weights for term in terms)
    if not is_positive and not any(term.number > 0 for term in terms):
        return None
    is_pair = is_positive and len(terms) == 2

    def split(*arrays: Array) -> Split:
        rest, ys, ws = iter(arrays), [], []
        for term in terms:
            y, w = term.split([next(rest) for _ in term.operands], shape)
            y = jnp.zeros(shape, arrays[0].dtype) if y is None else y
            if not is_pair and (w is not None or term.number != 1):
                w = term.number if w is None else scaled(term.number, w)
            ys.append(y)
            ws.append(w)
        if is_pair:
            y, z, n, m = *ys, *(term.number for term in terms)
            large = finite(lax.stop_gradient(jnp.maximum(y, z)))
            return large, logaddexp(y - large, z - large, m / n) + math.log(n)
        large, parts = shifted(ys, ws)
        if total.constant == 1:
            # The last term is one, as in log1p.
            others = _sum(parts[:-1])
            near = log1p(jnp.where(large == 0, others, 0))
            return large, jnp.where(large == 0, near, jnp.log(parts[-1] + others))
        return large, jnp.log(_sum(parts))

    operands = tuple(each for term in terms for each in term.operands)
    return Log(operands, split, is_positive=is_positive)


def _log_of_known_terms(total: Parts, shape: tuple[int, ...]) -> Log | None:
    """The logarithm of a sum of what has a logarithm, as of probabilities."""
    logs = [log_of(part.value) for part in total.parts]
    is_known = all(log is not None and log.is_positive for log in logs)
    if total.constant or len(logs) < 2 or not is_known:
        return None
    with_log = [(log, part) for log, part in zip(logs, total.parts, strict=True) if log is not None]
    if any(part.number <= 0 for _, part in with_log) or all(
        _is_shifted(part) for _, part in with_log
    ):
        return None

    def split(*arrays: Array) -> Split:
        rest = iter(arrays)
        return _log_of_sum_of(
            [
                broadcast(_sum(log.split(*(next(rest) for _ in log.operands))), part.axes, shape)
                + math.log(part.number)
                for log, part in with_log
            ]
        )

    operands = tuple(each for log, _ in with_log for each in log.operands)
    return Log(operands, split, is_positive=True)


def _is_shifted(part: Part) -> bool:
    term = exponential_of(factors_of(part.value))
    return bool(term.exponents) and not term.may_underflow


def _log_of_sum_of(ys: Sequence[Array]) -> Split:
    """log(exp(y) + exp(z) + ...)."""
    large, parts = shifted(ys, [None] * len(ys))
    if len(ys) == 2:
        return large, logaddexp(ys[0] - large, ys[1] - large)
    return large, jnp.log(_sum(parts))


def _log_of_reduced_sum(value: Value) -> Log | None:
    """log(sum(w exp(y)))."""
    (x,), axes = value.step.inputs, value.step.params["axes"]
    term = exponential_of(factors_of(x))
    return _log_of_sum_along(term, value.step.inputs[0].shape, axes)


def _log_of_sum_along(term: Exponential, shape: tuple[int, ...], axes: Sequence[int]) -> Log | None:
    if not term.exponents or not term.number > 0:
        return None
    if not term.may_underflow and not term.weights:
        return None
    shift = math.log(term.number)

    def split(*arrays: Array) -> Split:
        y, w = term.split(arrays, shape)
        large, terms = shifted_along(known(y), w, axes)
        return lax.squeeze(large, axes), jnp.log(jnp.sum(terms, axis=axes)) + shift

    def signed(*arrays: Array) -> tuple[Array, Array, Array]:
        y, w = term.split(arrays, shape)
        large, terms = shifted_along(known(y), w, axes)
        total = jnp.sum(terms, axis=axes)
        return lax.squeeze(large, axes), jnp.log(jnp.abs(total)) + shift, jnp.sign(total)

    return Log(term.operands, split, is_positive=not term.weights, signed=signed)


def _log_of_dot(value: Value) -> Log | None:
    """log(w @ exp(y)), for a vector w, or one for each element of a batch."""
    step = value.step
    contracted, batch = step.params["dimension_numbers"]
    for place in (0, 1):
        x, weights = step.inputs[place], step.inputs[1 - place]
        term, own = exponential_of(factors_of(x)), (*batch[1 - place], *contracted[1 - place])
        if len(weights.shape) == len(own) and not term.weights and term.exponents:
            if term.number > 0:
                axes = dict(zip(own, (*batch[place], *contracted[place]), strict=True))
                return _log_of_dot_with(step, place, term, axes)
    return None


def _log_of_dot_with(step: Step, place: int, term: Exponential, axes: dict[int, int]) -> Log:
    """`axes` says on which axis of the exponentials each axis of the weights is."""
    x, weights = step.inputs[place], step.inputs[1 - place]
    contracted, batch = (each[place] for each in step.params["dimension_numbers"])
    free = [i for i in range(len(x.shape)) if i not in contracted and i not in batch]
    places = tuple(axes[i] for i in range(len(weights.shape)))
    rows = sorted((*batch, *free))
    order = [rows.index(axis) for axis in (*batch, *free)]
    shift = math.log(term.number)

    def parts(*arrays: Array) -> Split:
        *exponents, w = arrays
        y = known(term.split(exponents, x.shape)[0])
        weight = broadcast(w, places, x.shape)
        large = largest_along(y, weight, contracted)
        pair = (jnp.exp(finite_where_zero(y - large, weight)), w)[:: 1 - 2 * place]
        total = step.eqn.primitive.bind(*pair, **step.params)
        return lax.transpose(lax.squeeze(large, contracted), order), total

    def split(*arrays: Array) -> Split:
        large, total = parts(*arrays)
        return large, jnp.log(total) + shift

    def signed(*arrays: Array) -> tuple[Array, Array, Array]:
        large, total = parts(*arrays)
        return large, jnp.log(jnp.abs(total)) + shift, jnp.sign(total)

    return Log((*term.operands, weights), split, signed=signed)


def _is_product(value: Value) -> bool:
    """Whether it is more than one factor that cannot be divided further."""
    parts = factors_of(value).parts
    return len(parts) > 1 or any(part.value is not value for part in parts)


def _log_of_reduced_product(value: Value) -> Log:
    (x,), axes = value.step.inputs, value.step.params["axes"]
    log, shape = log_of(x), x.shape
    if log is None or not log.is_positive:
        return Log(
            (x,), lambda x: log_product(x, axes), signed=lambda x: log_size_of_product(x, axes)
        )

    def split(*arrays: Array) -> Split:
        large, small = (jnp.sum(jnp.broadcast_to(part, shape), axes) for part in log.split(*arrays))
        return large, small

    return Log(log.operands, split, is_positive=True)
