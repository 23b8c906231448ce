"""Recognises exponentials, squares and bounded values, and builds rewrites from them."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ._expressions import (
    Axes,
    Part,
    Parts,
    Value,
    argument_of,
    broadcast,
    constant_of,
    factors_of,
    is_same,
    placed,
    seen_through,
    terms_of,
    unbroadcast,
)
from ._patterns import Found
from ._replacements import finite, scaled
from ._rewrite import Rewrite

GUARDS = ("select_n", "max", "min", "clamp")
"""Operations that can limit a number to a range in which a function is accurate."""


def square_root_of(value: Value) -> Value | None:
    """Returns `x` if `value` is x², otherwise None."""
    step = value.step
    if step.kind == "square" or (step.kind == "integer_pow" and step.params["y"] == 2):
        return step.inputs[0]
    if step.kind == "mul" and is_same(*step.inputs) and step.inputs[0].shape == value.shape:
        return step.inputs[0]
    return None


def summed_squares_of(total: Value) -> Value | None:
    """Returns `x` if `total` is sum(x²), otherwise None."""
    if (squares := argument_of(total, "reduce_sum")) is not None:
        return square_root_of(seen_through(squares))
    step = seen_through(total).step
    is_dot = step.kind == "dot_general" and not total.shape
    return step.inputs[0] if is_dot and is_same(*step.inputs) else None


def applied(function: Callable[..., Any], *inputs: Value | Rewrite) -> Rewrite:
    """A rewrite that calls `function` with one argument for each of `inputs`.

    For a `Value`, the argument is its array. For a `Rewrite`, the argument is its result.
    """
    counts = [1 if isinstance(each, Value) else len(each.operands) for each in inputs]

    def build(*arrays: Array) -> Any:
        rest, found = iter(arrays), []
        for each, count in zip(inputs, counts, strict=True):
            own = itertools.islice(rest, count)
            build = getattr(each, "build", None)
            found.append(build(*own) if build is not None else next(own))
        return function(*found)

    operands = ((each,) if isinstance(each, Value) else each.operands for each in inputs)
    return Rewrite(tuple(itertools.chain(*operands)), build)


def lifted(part: Part, shape: tuple[int, ...]) -> Rewrite:
    """A rewrite that broadcasts the value of a part to `shape`."""
    return applied(lambda x: broadcast(x, part.axes, shape), part.value)


def product_of(parts: Sequence[Part], shape: tuple[int, ...]) -> Rewrite:
    """A rewrite that computes the product of factors. Without factors its result is None."""

    def product(*arrays: Array) -> Array | None:
        powers = map(power_of, arrays, (part.number for part in parts))
        return functools.reduce(jnp.multiply, powers) if parts else None

    return applied(product, *(lifted(part, shape) for part in parts))


def sum_of(parts: Sequence[Part], shape: tuple[int, ...]) -> Rewrite:
    """A rewrite that computes the sum of terms. Without terms its result is None."""

    def total(*arrays: Array) -> Array | None:
        terms = map(scaled, (part.number for part in parts), arrays)
        return functools.reduce(jnp.add, terms) if parts else None

    return applied(total, *(lifted(part, shape) for part in parts))


def rewritten(found: Found, function: Callable[..., Any], shape: tuple[int, ...]) -> Rewrite:
    """A rewrite that computes `factor * function(*holes)` for the holes of a match."""
    holes = (sum_of((hole,), shape) for hole in found.holes)
    return applied(lambda *holes: scaled(found.factor, function(*holes)), *holes)


def times(x: Array, weight: Array | None) -> Array:
    return x if weight is None else x * weight


def power_of(x: Array, number: float) -> Array:
    match number:
        case 1:
            return x
        case -1:
            return 1 / x
        case 0.5:
            return jnp.sqrt(x)
        case -0.5:
            return lax.rsqrt(x)
    return lax.integer_pow(x, int(number)) if number == int(number) else x**number


@dataclasses.dataclass(frozen=True)
class Exponential:
    """The product `number * weights * exp(exponents)`.

    - `exponents`: terms of the exponent. If there are none, the exponent is zero.
    - `weights`: factors of any sign.
    - `masks`: pairs of a Boolean condition and a value, True or False. The product is zero wherever
      a condition does not have its value.
    """

    number: float
    exponents: tuple[Part, ...] = ()
    weights: tuple[Part, ...] = ()
    masks: tuple[tuple[Part, bool], ...] = ()

    @property
    def may_underflow(self) -> bool:
        """Returns True if there is an exponent, and no maximum is subtracted from it."""
        return bool(self.exponents) and not any(shifted_by_maximum(x.value) for x in self.exponents)

    @property
    def may_overflow(self) -> bool:
        is_bounded = all(is_at_most_zero(part.value) for part in self.exponents if part.number > 0)
        return self.may_underflow and not is_bounded

    def split(self, shape: tuple[int, ...]) -> Rewrite:
        """A rewrite that computes the exponent and the weight.

        None stands for an exponent of zero, and for a weight of one.
        """

        def masked(y: Array, w: Array | None, *conditions: Array) -> tuple[Array, Array | None]:
            for condition, (_, is_kept) in zip(conditions, self.masks, strict=True):
                condition = condition if is_kept else ~condition
                y = jnp.where(condition, y, -jnp.inf)
                w = None if w is None else jnp.where(condition, w, 0)
            return y, w

        masks = (lifted(mask, shape) for mask, _ in self.masks)
        y, w = sum_of(self.exponents, shape), product_of(self.weights, shape)
        return applied(masked, y, w, *masks)


@dataclasses.dataclass(frozen=True)
class SumOfExponentials:
    """A sum `number * sum(term, reduced)` that is itself a term of an outer sum.

    The inner sum is treated as one exponential, whose exponent is the logarithm of the inner sum.

    - `inner`: shape of `term`.
    - `reduced`: the axes that are summed.
    - `axes`: `Axes` of the inner sum in the outer sum.
    """

    number: float
    term: Exponential
    inner: tuple[int, ...]
    reduced: tuple[int, ...]
    axes: Axes
    weights = ()
    may_underflow = may_overflow = True

    def split(self, shape: tuple[int, ...]) -> Rewrite:
        def log_of_sum(split: tuple[Array, None]) -> tuple[Array, None]:
            large, terms = shifted_along(*split, self.reduced)
            total = jnp.sum(terms, axis=self.reduced)
            # If all exponents are -inf, the total is zero. Avoid NaN in the gradient.
            is_zero = total == 0
            small = jnp.where(is_zero, -jnp.inf, jnp.log(jnp.where(is_zero, 1, total)))
            log = lax.squeeze(large, self.reduced) + small + math.log(self.term.number)
            return broadcast(log, self.axes, shape), None

        return applied(log_of_sum, self.term.split(self.inner))


def exponential_of(product: Parts) -> Exponential:
    """Sorts the factors of a product into exponentials exp(y), weights and masks."""
    constant, exponents, weights, masks = product.constant, [], [], []
    weights_of_masks = []
    rest = list(product.parts[::-1])
    while rest:
        part = rest.pop()
        if (found := exponent_of(part.value)) is not None:
            y, scale = found
            exponents.append(dataclasses.replace(part, value=y, number=scale * part.number))
        elif part.number == 1 and (masked := _masked_exponential(part.value)) is not None:
            inner, mask, is_kept = masked
            constant *= inner.constant
            rest += placed(inner.parts[::-1], part.axes)
            masks.append((*placed((mask,), part.axes), is_kept))
        elif part.number == 1 and (condition := _condition_of(part.value)) is not None:
            masks.append((*placed((condition,), part.axes), True))
            weights_of_masks.append(part)
        else:
            weights.append(part)
    if not exponents:
        return Exponential(constant, (), (*weights, *weights_of_masks))
    return Exponential(constant, tuple(exponents), tuple(weights), tuple(masks))


def _condition_of(value: Value) -> Part | None:
    """Returns the condition if `value` is a Boolean array cast to numbers, otherwise None."""
    condition = argument_of(value, "convert_element_type")
    if condition is None or condition.dtype != bool:
        return None
    return Part(1.0, *unbroadcast(condition))


def _masked_exponential(value: Value) -> tuple[Parts, Part, bool] | None:
    """Matches where(mask, exp(y), 0) or where(mask, 0, exp(y)).

    **Returns:** the product that contains exp(y), the mask, and the value of the mask, True or
    False, for which the product is selected.
    """
    step = seen_through(value).step
    if step.kind != "select_n" or step.inputs[0].dtype != bool:
        return None
    condition, *branches = step.inputs
    if len(branches) != 2 or condition.shape != value.shape:
        return None
    for kept, zero in ((1, 0), (0, 1)):
        if constant_of(branches[zero]) == 0:
            product = factors_of(branches[kept])
            if any(exponent_of(part.value) is not None for part in product.parts):
                return product, Part(1.0, *unbroadcast(condition)), bool(kept)
    return None


def exponent_of(value: Value) -> tuple[Value, float] | None:
    """Returns `(y, scale)` if `value` is `exp(scale * y)`, otherwise None.

    Powers of any constant base are matched.
    """
    if (y := argument_of(value, "exp")) is not None:
        return y, 1.0
    if (y := argument_of(value, "exp2")) is not None:
        return y, math.log(2)
    base = argument_of(value, "pow")
    number = constant_of(base) if base is not None else None
    if number is not None and 0 < number < math.inf and number != 1:
        return seen_through(value).step.inputs[1], math.log(number)
    return None


def exponentials_in(total: Parts) -> list[Exponential | SumOfExponentials]:
    """Converts each term of a sum to an exponential or a sum of exponentials."""
    terms: list[Exponential | SumOfExponentials] = []
    for part in total.parts:
        product = factors_of(part.value)
        lifted = Parts(part.number * product.constant, placed(product.parts, part.axes))
        terms.append(_sum_in(lifted) or exponential_of(lifted))
    if total.constant:
        terms.append(Exponential(total.constant))
    return terms


def _sum_in(product: Parts) -> SumOfExponentials | None:
    if [part.number for part in product.parts] != [1] or product.constant <= 0:
        return None
    (part,) = product.parts
    if (x := argument_of(part.value, "reduce_sum")) is None:
        return None
    term, reduced = exponential_of(factors_of(x)), seen_through(part.value).step.params["axes"]
    if term.weights or term.number <= 0 or not term.may_overflow:
        return None
    return SumOfExponentials(product.constant, term, x.shape, reduced, part.axes)


def shifted(ys: Sequence[Array], ws: Sequence[Array | float | None]) -> tuple[Array, list[Array]]:
    """Divides terms w exp(y) by the largest |w| exp(y), without overflow.

    **Returns:** the logarithm of the largest |w| exp(y), and for each term the quotient.
    """
    sizes = [_log_size(y, w) for y, w in zip(ys, ws, strict=True)]
    large = finite(lax.stop_gradient(functools.reduce(jnp.maximum, sizes)))
    return large, [weighted_exp(y - large, w) for y, w in zip(ys, ws, strict=True)]


def shifted_terms(
    terms: Sequence[Exponential | SumOfExponentials], shape: tuple[int, ...]
) -> Rewrite:
    """A rewrite that computes `shifted` for terms. At least one term must have an exponent."""

    def shift(*pairs: tuple[Array | None, Array | None]) -> tuple[Array, list[Array]]:
        zero = jnp.zeros_like(next(y for y, _ in pairs if y is not None))
        ws = [
            w if term.number == 1 else term.number if w is None else scaled(term.number, w)
            for term, (_, w) in zip(terms, pairs, strict=True)
        ]
        return shifted([zero if y is None else y for y, _ in pairs], ws)

    return applied(shift, *(term.split(shape) for term in terms))


def shifted_along(y: Array, w: Array | None, axes: Sequence[int]) -> tuple[Array, Array]:
    """Computes `shifted` for the terms along `axes` of one array.

    The returned logarithm keeps these axes with length one.
    """
    large = largest_along(y, w, axes)
    return large, weighted_exp(y - large, w)


def shifted_in_quotient(y: Array, w: Array | None, axes: Sequence[int]) -> Array:
    """Subtracts the largest exponent from all exponents of a quotient, such as a softmax.

    The subtraction does not change the value of the quotient. Without weights, the subtracted
    maximum is differentiated too, so the largest term has the constant value 1. This matters if a
    softmax `p` rounds to 1. The gradient of `p` is then computed from the smaller terms, and not
    from `1 - p`, which would be 0.
    """
    if w is not None:
        return y - largest_along(y, w, axes)
    return y - finite(jnp.max(y, axis=axes, keepdims=True, initial=-jnp.inf))


def largest_along(y: Array, w: Array | None, axes: Sequence[int]) -> Array:
    size = _log_size(y, w)
    return finite(lax.stop_gradient(jnp.max(size, axis=axes, keepdims=True, initial=-jnp.inf)))


def _log_size(y: Array, w: Array | float | None) -> Array:
    if w is None:
        return y
    return y + (jnp.log(jnp.abs(w)) if isinstance(w, Array) else math.log(abs(w)))


def weighted_exp(y: Array, w: Array | float | None) -> Array:
    if not isinstance(w, Array):
        return jnp.exp(y) if w is None else w * jnp.exp(y)
    # If the exponential alone underflows, its product with a large weight may still be nonzero. So
    # multiply the weight by the root of the exponential twice.
    root = jnp.exp(finite_where_zero(y, w) / 2)
    return (w * root) * root


def finite_where_zero(y: Array, w: Array) -> Array:
    """Limits the exponent `y` where the weight `w` is zero, so that no derivative is NaN."""
    return jnp.where(w == 0, jnp.minimum(y, math.log(float(jnp.finfo(y.dtype).max)) / 2), y)


def shifted_by_maximum(y: Value) -> bool:
    """Returns True if a maximum is subtracted in `y`, as in `x - max(x)` or `x - maximum(x, z)`."""
    terms = terms_of(y).parts
    for part in terms:
        if part.number < 0 and _is_maximum(part.value):
            return True
        if part.number < 0 and part.value.step.kind == "max":
            among = _elements_of_maximum(part.value)
            if any(is_same(each, other.value) for each in among for other in terms):
                return True
    return False


def _elements_of_maximum(value: Value) -> list[Value]:
    step = seen_through(value).step
    if step.kind != "max":
        return [value]
    return [each for value in step.inputs for each in _elements_of_maximum(value)]


def _is_maximum(value: Value, depth: int = 4) -> bool:
    value = seen_through(value)
    if depth == 0 or value.step.kind in ("reduce_max", "pmax", "cummax"):
        return depth > 0
    passed_on = ("max", "select_n", "broadcast_in_dim", "reshape", "squeeze", "stop_gradient")
    inputs = value.step.inputs if value.step.kind in passed_on else ()
    return any(_is_maximum(each, depth - 1) for each in inputs)


def is_at_most_zero(y: Value) -> bool:
    """Returns True if `y` is never positive, such as -|x| - x². Then exp(y) cannot overflow."""
    total = terms_of(y)
    sizes = ("abs", "square", "exp", "sqrt", "reduce_max")
    return total.constant <= 0 and all(
        part.number < 0 and _is_size(part.value, sizes) for part in total.parts
    )


def _is_size(value: Value, kinds: tuple[str, ...]) -> bool:
    step = value.step
    is_even_power = step.kind == "integer_pow" and step.params["y"] % 2 == 0
    return step.kind in kinds or is_even_power or square_root_of(value) is not None


def is_positive(y: Value) -> bool:
    """Returns True if `y` is a positive constant plus terms that are never negative.

    An example is 1 + exp(x).
    """
    total = terms_of(y)
    sizes = ("abs", "square", "exp", "cosh", "logistic", "sqrt")
    return total.constant > 0 and all(
        part.number > 0 and _is_size(part.value, sizes) for part in total.parts
    )
