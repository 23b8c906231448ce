"""Functions that people write in several ways: which one a formula computes, and of what."""

import dataclasses
import math
from collections.abc import Sequence

from ._expressions import Part, Value, argument_of, factors_of, is_same, seen_through, terms_of

ROOT_2 = math.sqrt(2)

GUARDS = ("select_n", "max", "min", "clamp")
"""Operations by which people keep a number from where a function fails."""


def all_axes(value: Value) -> tuple[int, ...]:
    return tuple(range(len(value.shape)))


def sigmoid_of(value: Value) -> tuple[Value, float] | None:
    """`(y, scale)` if `value` is `sigmoid(scale * y)`.

    It may be written as 1 / (1 + exp(-y)), exp(y) / (1 + exp(y)), 0.5 + 0.5 tanh(y / 2), or
    1 - sigmoid(-y).
    """
    value = seen_through(value)
    if (y := argument_of(value, "logistic")) is not None:
        return y, 1.0
    if value.step.kind in ("div", "integer_pow", "mul"):
        product = factors_of(value)
        below = [part for part in product.parts if part.number == -1]
        above = [part for part in product.parts if part.number == 1]
        if len(below) != 1 or len(below) + len(above) != len(product.parts) or len(above) > 1:
            return None
        total = terms_of(below[0].value)
        if len(total.parts) != 1 or below[0].axes != all_axes(value):
            return None
        (part,) = total.parts
        y = argument_of(part.value, "exp")
        if y is None or part.axes != all_axes(below[0].value):
            return None
        if not above:
            is_sigmoid = total.constant == part.number == product.constant
            return (y, -1.0) if is_sigmoid else None
        other = argument_of(above[0].value, "exp")
        if other is None or above[0].axes != all_axes(value) or not is_same(y, other):
            return None
        return (y, 1.0) if total.constant == part.number == product.constant else None
    if value.step.kind in ("add", "sub"):
        total = terms_of(value)
        if len(total.parts) != 1 or total.parts[0].axes != all_axes(value):
            return None
        (part,) = total.parts
        if total.constant == 0.5 and abs(part.number) == 0.5:
            y = argument_of(part.value, "tanh")
            return None if y is None else (y, 4.0 * part.number)
        if total.constant == 1 and part.number == -1 and (found := sigmoid_of(part.value)):
            return found[0], -found[1]
    return None


def normal_cdf_of(value: Value) -> tuple[Value, float, float] | None:
    """`(y, scale, constant)` if `value` is `constant` times the normal cdf of `scale * y`.

    It may be written by erf or erfc, by JAX's `norm.cdf`, or as 1 minus one of these.
    """
    value = seen_through(value)
    if (y := argument_of(value, "erfc")) is not None:
        return y, -ROOT_2, 2.0
    if value.step.kind == "select_n":
        # JAX's: 1 + erf(y) near zero, erfc(|y|) or 2 - erfc(|y|) far from it.
        for case in value.step.inputs[1:]:
            case = seen_through(case)
            if case.step.kind == "add" and (found := normal_cdf_of(case)):
                others = [each for each in value.step.inputs[1:] if seen_through(each) is not case]
                if len(others) == 1 and (_uses_erfc(others[0], found[0])):
                    return found
        return None
    if value.step.kind not in ("add", "sub"):
        return None
    total = terms_of(value)
    if not total.constant or len(total.parts) != 1 or total.parts[0].axes != all_axes(value):
        return None
    (part,) = total.parts
    y = argument_of(part.value, "erf")
    if y is not None and total.constant > 0 and abs(part.number) == total.constant:
        return y, math.copysign(ROOT_2, part.number), 2 * total.constant
    product = factors_of(part.value)
    if len(product.parts) == 1 and product.parts[0].number == 1:
        found = normal_cdf_of(product.parts[0].value)
        if found and found[2] * product.constant * part.number == -total.constant:
            return found[0], -found[1], total.constant
    return None


def _uses_erfc(value: Value, y: Value) -> bool:
    """Whether a branch of JAX's cdf computes erfc(|y|)."""
    value = seen_through(value)
    if value.step.kind != "select_n":
        return False
    for case in value.step.inputs[1:]:
        if (size := argument_of(case, "erfc")) is not None:
            inner = argument_of(size, "abs")
            return inner is not None and is_same(inner, y)
    return False


def split_exponentials(parts: Sequence[Part]) -> tuple[list[Part], list[Part]]:
    """The factors exp(y), as the parts with y for their value, and the other factors."""
    exps, others = [], []
    for part in parts:
        y = argument_of(part.value, "exp")
        if y is None:
            others.append(part)
        else:
            exps.append(dataclasses.replace(part, value=y))
    return exps, others


def shifted_by_maximum(y: Value) -> bool:
    """Whether the largest element was subtracted from `y`."""
    return any(part.number < 0 and _is_maximum(part.value) for part in terms_of(y).parts)


def _is_maximum(value: Value, depth: int = 4) -> bool:
    value = seen_through(value)
    if depth == 0:
        return False
    if value.step.kind in ("reduce_max", "pmax", "cummax"):
        return True
    if value.step.kind in (
        "max",
        "select_n",
        "broadcast_in_dim",
        "reshape",
        "squeeze",
        "stop_gradient",
    ):
        return any(_is_maximum(each, depth - 1) for each in value.step.inputs)
    return False


def is_at_most_zero(y: Value) -> bool:
    """Whether `y` is a sum of negative sizes, as in exp(-|x|), which cannot overflow."""
    total = terms_of(y)
    sizes = ("abs", "square", "exp", "sqrt", "reduce_max")
    return total.constant <= 0 and all(
        part.number < 0 and _is_size(part.value, sizes) for part in total.parts
    )


def _is_size(value: Value, kinds: tuple[str, ...]) -> bool:
    step = value.step
    return step.kind in kinds or (step.kind == "integer_pow" and step.params["y"] % 2 == 0)


def is_positive(y: Value) -> bool:
    """Whether `y` is a sum of a positive constant and sizes, as 1 + exp(x)."""
    total = terms_of(y)
    sizes = ("abs", "square", "exp", "cosh", "logistic", "sqrt")
    return total.constant > 0 and all(
        part.number > 0 and _is_size(part.value, sizes) for part in total.parts
    )
