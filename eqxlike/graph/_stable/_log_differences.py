"""Logarithms of differences, and of what is near one: 1 - exp(y), 1 - tanh² y, 1 + x."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from ._expressions import (
    Axes,
    Parts,
    Value,
    argument_of,
    broadcast,
    constant_of,
    factors_of,
    seen_through,
    unbroadcast,
)
from ._functions import erfc_of, sigmoid_of
from ._replacements import (
    Split,
    log1mexp,
    log1p,
    log_erfc,
    log_expm1,
    log_sech_squared,
    log_sigmoid,
    log_size_of_1mexp,
    scaled,
    single,
)


@dataclasses.dataclass(frozen=True)
class Log:
    """The logarithm of a value: `split` of the arrays of `operands` is its large and small part.

    - `is_near_one`: whether it has more digits only where the value is near one.
    - `is_positive`: whether the value is never negative.
    - `signed`: the parts for the absolute value, and the sign.
    """

    operands: tuple[Value, ...]
    split: Callable[..., Split]
    is_near_one: bool = False
    is_positive: bool = False
    signed: Callable[..., tuple[Array, Array, Array]] | None = None


def log_of_difference(total: Parts, shape: tuple[int, ...]) -> Log | None:
    if total.constant == 1 and [part.number for part in total.parts] == [-1]:
        (part,) = total.parts
        if (found := complement_of(part.value)) is not None:
            y, log = found
            return Log((y,), lambda y: _broadcast_both(log(y), part.axes, shape), is_positive=True)
    if len(total.parts) == 2 and not total.constant:
        return _log_of_difference_of_two(total, shape)
    if len(total.parts) != 1 or not total.constant:
        return None
    (part,), c = total.parts, total.constant
    if abs(part.number) != abs(c):
        return None
    lifted = functools.partial(broadcast, axes=part.axes, shape=shape)
    z, y, shift = argument_of(part.value, "tanh"), argument_of(part.value, "exp"), math.log(abs(c))
    if z is not None and c > 0:
        twice = math.copysign(2.0, part.number)

        def split_tanh(z: Array) -> Split:
            z = lifted(z)
            large, small = log_sigmoid(twice * z)
            is_near = (jnp.abs(z) < 0.5) & (c == 1)  # The value is near zero.
            near = log1p(jnp.tanh(jnp.where(is_near, math.copysign(1.0, twice) * z, 0)))
            small = jnp.where(is_near, near, small + (shift + math.log(2)))
            return jnp.where(is_near, 0, large), small

        return Log((z,), split_tanh, is_positive=True)
    if y is None or part.number * c > 0:
        return None

    def split(y: Array) -> Split:
        y = lifted(y)
        large, small = (jnp.zeros_like(y), log1mexp(y)) if c > 0 else log_expm1(y)
        return large, small + shift

    def signed(y: Array) -> tuple[Array, Array, Array]:
        size, sign = log_size_of_1mexp(lifted(y))
        return jnp.zeros_like(size), size + shift, scaled(math.copysign(1.0, c), sign)

    return Log((y,), split, signed=signed)


def _log_of_difference_of_two(total: Parts, shape: tuple[int, ...]) -> Log | None:
    """log(n exp(y) - n exp(z)), and log(n s(y) - n s(z)) for sigmoids s."""
    first, second = sorted(total.parts, key=lambda part: -part.number)
    found, other = (_exponent_or_sigmoid(part.value) for part in (first, second))
    if first.number != -second.number or found is None or other is None or found[2] != other[2]:
        return None
    (y, scale_y, is_sigmoid), (z, scale_z, _) = found, other
    shift = math.log(first.number)

    def parts(y: Array, z: Array) -> tuple[Array, Array, Array]:
        y = broadcast(scaled(scale_y, y), first.axes, shape)
        z = broadcast(scaled(scale_z, z), second.axes, shape)
        if not is_sigmoid:
            return y, jnp.zeros_like(y), z - y
        # s(y) - s(z) = s(y) s(-z) (1 - exp(z - y))
        (large, small), (far, rest) = log_sigmoid(y), log_sigmoid(-z)
        return large + far, small + rest, z - y

    def split(y: Array, z: Array) -> Split:
        large, small, difference = parts(y, z)
        return large, small + log1mexp(difference) + shift

    def signed(y: Array, z: Array) -> tuple[Array, Array, Array]:
        large, small, difference = parts(y, z)
        size, sign = log_size_of_1mexp(difference)
        return large, small + size + shift, sign

    return Log((y, z), split, signed=signed)


def _exponent_or_sigmoid(value: Value) -> tuple[Value, float, bool] | None:
    if (y := argument_of(value, "exp")) is not None:
        return y, 1.0, False
    found = sigmoid_of(value)
    return found and (*found, True)


def _broadcast_both(split: Split, axes: Axes, shape: tuple[int, ...]) -> Split:
    large, small = split
    return broadcast(large, axes, shape), broadcast(small, axes, shape)


def complement_of(value: Value) -> tuple[Value, Callable[[Array], Split]] | None:
    """`y` and a function of it that is the logarithm of 1 - value, for a probability."""
    if (found := sigmoid_of(value)) is not None:
        y, scale = found
        return y, lambda y: log_sigmoid(scaled(-scale, y))
    if (found := erfc_of(value)) is not None and found[3] == 0.5:
        y, sign, rate, number = found
        return y, lambda y: (jnp.zeros_like(y), log_erfc(single(-sign * y), rate, number))
    tanh = factors_of(value)
    if [(each.number, tanh.constant) for each in tanh.parts] == [(2, 1)]:
        if (y := argument_of(tanh.parts[0].value, "tanh")) is not None:
            return y, log_sech_squared
    return None


def log_of_exp_less_one(value: Value) -> Log:
    def signed(y: Array) -> tuple[Array, Array, Array]:
        size, sign = log_size_of_1mexp(y)
        return jnp.zeros_like(y), size, -sign

    return Log(value.step.inputs, log_expm1, signed=signed)


def log_near_one(value: Value) -> Log | None:
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
        return jnp.zeros_like(x), log1p(scaled(sign, x))

    def signed(x: Array) -> tuple[Array, Array, Array]:
        x = scaled(sign, broadcast(x, axes, shape))
        is_negative = x < -1
        size = jnp.where(is_negative, -2 - x, x)  # |1 + x| - 1
        return jnp.zeros_like(x), log1p(size), jnp.sign(1 + x)

    return Log((x,), split, is_near_one=True, signed=signed)


def _is_whole(value: Value) -> bool:
    """Whether it is computed of integers, as a count or an index, by sums and products."""
    step = seen_through(value).step
    if step.kind == "convert_element_type":
        return jnp.issubdtype(step.inputs[0].dtype, jnp.integer)
    if step.kind in ("add", "sub", "mul", "neg"):
        return all(_is_whole(each) for each in step.inputs if constant_of(each) is None)
    return step.kind == "iota"
