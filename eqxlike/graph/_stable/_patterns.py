"""Pattern matching: finds formulas and exponentials in a program, and builds their rewrites.

`match` tests whether a value is a multiple of a formula. A formula is a Python function of one or
two numbers. It is traced once; the traced value is called the pattern, and its inputs are called
holes. Matching finds the values that fill the holes. Pattern and value are compared as sums,
products and functions, so a formula may be written in different ways.
"""

import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from . import _replacements as stable
from ._expressions import (
    INPUT,
    Axes,
    Part,
    Parts,
    Value,
    all_axes,
    argument_of,
    broadcast,
    constant_of,
    factors_in,
    factors_of,
    is_same,
    key_of,
    once,
    placed,
    seen_through,
    steps_of,
    terms_in,
    terms_of,
    unbroadcast,
)
from ._replacements import scaled
from ._rewrite import Rewrite, applied, lifted, product_of, sum_of

Formula = Callable[..., Array]
Table = tuple[tuple[Formula, Formula], ...]
Holes = dict[Value, Part]
Binding = tuple[float, Holes]


class Found(NamedTuple):
    """A match: the value is `factor * formula(*holes)`.

    Each hole is filled with a number times a value of the program.
    """

    factor: float
    holes: tuple[Part, ...]


def match(formula: Formula, value: Value | Parts) -> Found | None:
    """Matches a multiple of a formula. The value to match may also be a sum (`Parts`)."""
    pattern, names = _traced(formula)
    if pattern.step.kind in SPELLINGS:
        return spelled(pattern.step.kind, value)
    if isinstance(value, Parts):
        matches = _match_sum(terms_of(pattern), value, {})
    else:
        matches = _match(pattern, value, all_axes(value), {})
    for factor, holes in matches:
        return Found(factor, tuple(holes[name] for name in names))
    return None


def first_match(table: Iterable[Any], value: Value | Parts) -> tuple[Any, ...] | None:
    """Finds the first row of a table whose formula matches. Each row starts with a formula.

    **Returns:** the match, followed by the other entries of the row.
    """
    matches = ((match(row[0], value), *row[1:]) for row in table)
    return next((row for row in matches if row[0] is not None), None)


def rewritten(table: Table, value: Value | Parts, shape: tuple[int, ...]) -> Rewrite | None:
    """Rewrites a multiple of a formula in a table by the function in the same row."""
    if (row := first_match(table, value)) is None:
        return None
    (factor, holes), function = row
    sums = (sum_of((hole,), shape) for hole in holes)
    return applied(lambda *arrays: scaled(factor, function(*arrays)), *sums)


@functools.cache
def _traced(formula: Formula) -> tuple[Value, list[Value]]:
    parameters = inspect.signature(formula).parameters.values()
    arguments = [each for each in parameters if each.default is each.empty]
    closed = jax.make_jaxpr(formula)(*[jax.ShapeDtypeStruct((), "float32")] * len(arguments))
    holes = [Value(each, INPUT) for each in closed.in_avals]
    _, (output,) = steps_of(closed, holes)
    return seen_through(output), holes


def _match(pattern: Value, value: Value, axes: Axes, holes: Holes) -> Iterator[Binding]:
    value, inner = unbroadcast(value)
    axes = tuple(axes[i] if i >= 0 else -1 for i in inner)
    total, product = terms_of(pattern), factors_of(pattern)
    if total.constant or len(total.parts) > 1:
        yield from _match_sum(total, terms_in(Part(1.0, value, axes)), holes)
    elif all(part.value.step is INPUT for part in total.parts):
        yield from _bind(pattern, Part(1.0, value, axes), holes)
    elif pattern.step.kind == "square":
        if (root := square_root_of(value)) is not None:
            yield from _bind(pattern.step.inputs[0], Part(1.0, root, axes), holes)
    elif product.parts[0].value is not pattern:
        yield from _match_product(product, factors_of(value), axes, holes)
    elif pattern.step.kind in SPELLINGS:
        if (found := spelled(pattern.step.kind, value)) is not None:
            (hole,) = placed(found.holes, axes)
            holes_found = _bind(pattern.step.inputs[0], hole, holes)
            yield from ((found.factor, each) for _, each in holes_found)
    elif pattern.step.kind == value.step.kind:
        yield from (
            each
            for each in _match(pattern.step.inputs[0], value.step.inputs[0], axes, holes)
            if each[0] == 1
        )


def _match_sum(pattern: Parts, total: Parts, holes: Holes) -> Iterator[Binding]:
    if bool(pattern.constant) != bool(total.constant) or len(pattern.parts) != len(total.parts):
        return
    factor = total.constant / pattern.constant if pattern.constant else None
    for order in itertools.permutations(total.parts):
        yield from _match_terms(list(zip(pattern.parts, order, strict=True)), factor, holes)


def _match_terms(pairs: list[Any], factor: float | None, holes: Holes) -> Iterator[Binding]:
    if not pairs:
        assert factor is not None
        yield factor, holes
        return
    (mine, theirs), *rest = pairs
    number = theirs.number / mine.number
    if mine.value.step is INPUT and factor is not None:
        part = Part(number / factor, theirs.value, theirs.axes)
        matches = ((factor / number, found) for _, found in _bind(mine.value, part, holes))
    else:
        matches = _match(mine.value, theirs.value, theirs.axes, holes)
    for own, found in matches:
        if factor is None or math.isclose(own * number, factor, rel_tol=1e-12):
            yield from _match_terms(rest, own * number, found)


def _match_product(pattern: Parts, product: Parts, axes: Axes, holes: Holes) -> Iterator[Binding]:
    if len(pattern.parts) != len(product.parts):
        return
    for order in itertools.permutations(placed(product.parts, axes)):
        if [part.number for part in order] != [part.number for part in pattern.parts]:
            continue
        matches = [(product.constant / pattern.constant, holes)]
        for mine, theirs in zip(pattern.parts, order, strict=True):
            matches = [
                (factor * own**mine.number, found)
                for factor, holes in matches
                for own, found in _match(mine.value, theirs.value, theirs.axes, holes)
                if own > 0 or mine.number == int(mine.number)
            ]
        yield from matches


def _bind(pattern: Value, part: Part, holes: Holes) -> Iterator[Binding]:
    """Fills the hole of a pattern with `part`. The pattern is a number times the hole."""
    (own,) = terms_of(pattern).parts
    part = Part(part.number / own.number, part.value, part.axes)
    if own.value not in holes or _linear(holes[own.value]) == _linear(part):
        yield 1.0, {own.value: part, **holes}


def _linear(part: Part) -> Any:
    total = terms_in(part)
    return total.constant, {(key_of(each.value), each.axes): each.number for each in total.parts}


SPELLINGS: dict[str, tuple[Formula, ...]] = {
    "logistic": (
        lambda y: 1 / (1 + lax.exp(-y)),
        lambda y: lax.exp(y) / (1 + lax.exp(y)),
        lambda y: 0.5 + 0.5 * lax.tanh(y / 2),
        lambda y: 1 - lax.logistic(-y),
    ),
    "erfc": (
        lambda y: 1 - lax.erf(y),
        lambda y: 1 + lax.erf(-y),
        lambda y: 2 - lax.erfc(-y),
    ),
    "cosh": (lambda y: 0.5 * lax.exp(y) + 0.5 * lax.exp(-y),),
    "sinh": (lambda y: 0.5 * lax.exp(y) - 0.5 * lax.exp(-y),),
}
"""For each primitive, other formulas that compute the same function."""


def spelled(kind: str, value: Value | Parts) -> Found | None:
    """Matches a multiple of the function `kind`, which may be written as any of its `SPELLINGS`."""
    if isinstance(value, Value):
        value, total = seen_through(value), terms_of(value)
        if not total.constant and len(total.parts) == 1 and total.parts[0].value is not value:
            (part,) = total.parts
            found = spelled(kind, part.value)
            return found and Found(part.number * found.factor, placed(found.holes, part.axes))
        if value.step.kind == kind:
            return Found(1.0, (Part(1.0, value.step.inputs[0], all_axes(value)),))
        if kind == "erfc" and value.step.kind == "select_n":
            return _cdf_of_jax(value)
        if value.step.kind not in ("div", "integer_pow", "mul", "add", "sub"):
            return None
    row = first_match(((formula,) for formula in SPELLINGS[kind]), value)
    return row[0] if row else None


def _cdf_of_jax(value: Value) -> Found | None:
    """Matches the `where` in JAX's `norm.cdf`.

    This `where` computes 1 + erf(y) near zero, and erfc(|y|) or 2 - erfc(|y|) elsewhere.
    """
    near, far = sorted(map(seen_through, value.step.inputs[1:]), key=lambda x: x.step.kind)[:2]
    found = spelled("erfc", near) if near.step.kind == "add" else None
    if found is None or far.step.kind != "select_n":
        return None
    sizes = [argument_of(each, "erfc") for each in far.step.inputs[1:]]
    inner = [argument_of(size, "abs") for size in sizes if size is not None]
    is_same_y = any(y is not None and is_same(y, found.holes[0].value) for y in inner)
    return found if is_same_y else None


@once
def sigmoid_of(value: Value) -> tuple[Value, float] | None:
    """Returns `(y, scale)` if `value` is `sigmoid(scale * y)` in any spelling, otherwise None."""
    found = spelled("logistic", value)
    if found is None or found.factor != 1 or found.holes[0].axes != all_axes(value):
        return None
    return found.holes[0].value, found.holes[0].number


def erfc_of(value: Value | Parts) -> tuple[Part, float, float] | None:
    """Returns `(y, rate, factor)` if `value` is `factor * erfc(sqrt(rate) * y)` in any spelling.

    Otherwise returns None. `y` is returned without the factor sqrt(rate), because the product would
    be rounded. For a normal cdf the rate is 1/2.
    """
    found = spelled("erfc", value)
    if found is None or found.factor <= 0:
        return None
    (hole,) = found.holes
    product = factors_of(hole.value)
    if [part.number for part in product.parts] == [1]:
        if math.isclose(product.constant * math.sqrt(2), 1, rel_tol=1e-6):
            (own,) = placed(product.parts, hole.axes)
            return dataclasses.replace(own, number=hole.number), 0.5, found.factor
    return hole, 1.0, found.factor


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


@dataclasses.dataclass(frozen=True)
class Exponential:
    """The product `number * weights * exp(exponents)`.

    - `exponents`: terms of the exponent. If there are none, the exponent is zero.
    - `weights`: factors of any sign.
    - `masks`: Boolean conditions. The number of a condition is 1 or 0. The product is zero wherever
      a condition of number 1 is False, or a condition of number 0 is True.
    """

    number: float
    exponents: tuple[Part, ...] = ()
    weights: tuple[Part, ...] = ()
    masks: tuple[Part, ...] = ()

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
            for condition, mask in zip(conditions, self.masks, strict=True):
                condition = condition if mask.number else ~condition
                y = jnp.where(condition, y, -jnp.inf)
                w = None if w is None else jnp.where(condition, w, 0)
            return y, w

        y, w = sum_of(self.exponents, shape), product_of(self.weights, shape)
        return applied(masked, y, w, *(lifted(mask, shape) for mask in self.masks))


@dataclasses.dataclass(frozen=True)
class SumOfExponentials:
    """A sum `number * sum(term, reduced)`, where no maximum is subtracted from the exponents.

    As a term of an outer sum, it is treated as one exponential, whose exponent is the logarithm of
    the inner sum.

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
            large, terms = stable.shifted_along(*split, self.reduced)
            total = jnp.sum(terms, axis=self.reduced)
            # If all exponents are -inf, the total is zero. Avoid NaN in the gradient.
            is_zero = total == 0
            small = jnp.where(is_zero, -jnp.inf, jnp.log(jnp.where(is_zero, 1, total)))
            log = lax.squeeze(large, self.reduced) + small + math.log(self.term.number)
            return broadcast(log, self.axes, shape), None

        return applied(log_of_sum, self.term.split(self.inner))


def summed_exponential(part: Part) -> SumOfExponentials | None:
    """Matches a multiple of sum(w exp(y)). The sum is a factor or a term of an outer expression."""
    if (x := argument_of(part.value, "reduce_sum")) is None:
        return None
    term, reduced = exponential_of(factors_of(x)), seen_through(part.value).step.params["axes"]
    if not term.may_underflow or term.number <= 0:
        return None
    return SumOfExponentials(part.number, term, x.shape, reduced, part.axes)


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
            inner, mask = masked
            constant *= inner.constant
            rest += placed(inner.parts[::-1], part.axes)
            masks += placed((mask,), part.axes)
        elif part.number == 1 and (condition := _condition_of(part.value)) is not None:
            masks += placed((condition,), part.axes)
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


def _masked_exponential(value: Value) -> tuple[Parts, Part] | None:
    """Matches where(mask, exp(y), 0) or where(mask, 0, exp(y)).

    **Returns:** the product that contains exp(y), and the mask. The number of the mask is 1 if the
    product is selected where the mask is True, otherwise 0.
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
                return product, Part(kept, *unbroadcast(condition))
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
    for product in map(factors_in, total.parts):
        found = None
        if [part.number for part in product.parts] == [1] and product.constant > 0:
            part = dataclasses.replace(product.parts[0], number=product.constant)
            found = summed_exponential(part)
        is_plain = found is not None and found.term.may_overflow and not found.term.weights
        terms.append(found if found and is_plain else exponential_of(product))
    if total.constant:
        terms.append(Exponential(total.constant))
    return terms


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
        return stable.shifted([zero if y is None else y for y, _ in pairs], ws)

    return applied(shift, *(term.split(shape) for term in terms))


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
