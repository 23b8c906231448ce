"""Functions whose value and derivative keep their digits where JAX's functions lose digits."""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax


def with_slope(slope: Callable[[Array], Array], function: Callable[[Array], Array]):
    """Returns `function`, a function of one array, with `slope` as its derivative."""
    stable = jax.custom_jvp(function)
    stable.defjvps(lambda tangent, _, y: tangent * slope(y))
    return stable


sigmoid = with_slope(lambda y: sigmoid(y) * sigmoid(-y), lax.logistic)
expm1 = with_slope(jnp.exp, lax.expm1)
tanh = with_slope(lambda y: one_minus_tanh_squared(y), lax.tanh)
atanh = with_slope(lambda y: 1 / (1 - jnp.square(y)), lax.atanh)
one_minus_tanh_squared = with_slope(
    lambda y: -2 * tanh(y) * one_minus_tanh_squared(y),
    lambda y: times_sigmoid(4 * sigmoid(2 * y), -2 * y),
)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def times_sigmoid(x: Array, y: Array, ratio: float = 1.0) -> Array:
    """Computes x / (1 + ratio exp(-y)), without underflow if x is large and the result tiny."""
    root = jnp.exp(-jnp.abs(y) / 2)
    below = scaled(ratio, root * root)
    if ratio == 1:
        return jnp.where(y < 0, (x * root) * root, x) / (1 + below)
    return jnp.where(y < 0, (x * root) * root / (root * root + ratio), x / (1 + below))


@times_sigmoid.defjvp
def _(ratio, primals, tangents):
    x, y = primals
    product = times_sigmoid(x, y, ratio)
    slope = product * times_sigmoid(jnp.ones_like(y), -y, 1 / ratio)
    return product, times_sigmoid(tangents[0], y, ratio) + tangents[1] * slope


@functools.partial(with_slope, lambda x: 1 / (1 + x))
def log1p(x: Array) -> Array:
    """Computes `lax.log1p(x)` near zero, otherwise log(1 + x).

    Elsewhere `lax.log1p` may lose digits: in jax 0.10 on CPU, it loses two digits at -0.4.
    """
    is_near = jnp.abs(x) < 0.29
    near, far = jnp.where(is_near, x, 0), jnp.where(is_near, 0, x)
    return jnp.where(is_near, lax.log1p(near), jnp.log(1 + far))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def times_sech(x: Array, y: Array, power: float) -> Array:
    """Computes x / cosh(y) ** power. It is accurate even if cosh(y) ** power overflows."""
    root = jnp.exp(-power / 2 * jnp.abs(y))
    return (x * root) * root * (2 / (1 + jnp.exp(-2 * jnp.abs(y)))) ** power


@times_sech.defjvp
def _(power, primals, tangents):
    x, y = primals
    product = times_sech(x, y, power)
    return product, times_sech(tangents[0], y, power) - tangents[1] * power * tanh(y) * product


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def logaddexp(x: Array, y: Array, ratio: float = 1.0) -> Array:
    """Computes log(exp(x) + ratio exp(y)).

    The derivatives are sigmoids. They are accurate in both tails.
    """
    return jnp.logaddexp(x, y if ratio == 1 else y + math.log(ratio))


@logaddexp.defjvp
def _(ratio, primals, tangents):
    x, y = primals
    is_tie = jnp.isinf(x) & (x == y)
    difference, one = jnp.where(is_tie, 0, x - y), jnp.ones_like(x)
    slope = times_sigmoid(one, difference, ratio) * tangents[0]
    slope += times_sigmoid(one, -difference, 1 / ratio) * tangents[1]
    return logaddexp(x, y, ratio), slope


Function = Callable[[Array], Array]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 2, 3))
def over_power(function: Function, y: Array, order: int, sign: int) -> Array:
    """Computes (order * f(y) / y ** order) ** sign, where f(y) ≈ y ** order / order near zero."""
    is_zero = jnp.abs(y) < jnp.finfo(y.dtype).eps / 4
    y = jnp.where(is_zero, 1, y)
    above, below = (order * function(y), y**order)[::sign]
    return jnp.where(is_zero, 1, above / below)


@over_power.defjvp
def _(function, order, sign, primals, tangents):
    (y,), (tangent,) = primals, tangents
    slope = _slope_of(lambda y: _smooth_over_power(function, y, order))(y)
    if sign < 0:
        inverse = over_power(function, y, order, -1)
        slope = -jnp.where(inverse == 0, 0, slope * inverse) * inverse
    return over_power(function, y, order, sign), tangent * slope


def _slope_of(function: Function) -> Function:
    return lambda y: jax.jvp(function, (y,), (jnp.ones_like(y),))[1]


def _smooth_over_power(function: Function, y: Array, order: int) -> Array:
    """Computes order * f(y) / y ** order. All its derivatives are accurate near zero.

    Near zero it computes the integral form of Taylor's remainder, so no difference cancels. With
    n = order, this is the integral over t from 0 to 1 of n (1 - t) ** (n - 1) g(t y), where g is
    the n-th derivative of f. The integral is computed by Gauss-Legendre quadrature.
    """
    is_near = jnp.abs(y) < 0.75
    near, far = jnp.where(is_near, y, 0), jnp.where(is_near, 1, y)
    derivative = _slope_of(function) if order == 1 else _slope_of(_slope_of(function))
    total = jnp.zeros_like(y)
    nodes = np.polynomial.legendre.leggauss(16 if y.dtype == jnp.float64 else 8)
    for node, weight in zip(*nodes, strict=True):
        t = float(1 + node) / 2
        total += order / 2 * float(weight) * (1 - t) ** (order - 1) * derivative(t * near)
    return jnp.where(is_near, total, order * function(far) / far**order)


def one_minus_cos(y: Array) -> Array:
    return 2 * jnp.square(jnp.sin(y / 2))


@functools.partial(with_slope, expm1)
def excess_of_exp(y: Array) -> Array:
    """Computes exp(y) - 1 - y."""
    is_near = jnp.abs(y) < 1
    near = jnp.where(is_near, y, 0)
    total, num_terms = jnp.zeros_like(y), 20 if y.dtype == jnp.float64 else 12
    for n in range(num_terms, 1, -1):
        total = (total * near + 1) / n  # Taylor series of exp without its first two terms.
    far = jnp.where(is_near, 1, y)
    return jnp.where(is_near, jnp.square(near) * total, lax.expm1(far) - far)


@functools.partial(with_slope, lambda t: jnp.where(jnp.abs(t - 1) < 0.5, (t - 1) / t, 1 - 1 / t))
def excess_of_size(t: Array) -> Array:
    """Computes t - 1 - log|t|."""
    u = t - 1
    is_near = jnp.abs(u) < 0.5
    near = jnp.where(is_near, u, 0)
    # Use the series of log(1 + u) = 2 artanh(s).
    s = near / (2 + near)
    total, num_terms = jnp.zeros_like(t), 17 if t.dtype == jnp.float64 else 8
    for n in range(num_terms, 0, -1):
        total = total * jnp.square(s) + 1 / (2 * n + 1)
    return jnp.where(is_near, s * near - 2 * s**3 * total, u - jnp.log(jnp.abs(t)))


MILLS = (
    *(1.1776327316361239, -0.001630177283414629, -0.08733682573463146),
    *(0.058009748370293268, -0.024340115396182225, 0.0075294837156357486),
    *(-0.0017438817577112521, 0.00028269829816555584, -2.3184911611263501e-05),
    *(-2.1117666981330409e-06, 8.7657601568928219e-07, -6.1057026350861181e-08),
    *(-1.7116664716341917e-08, 3.3913602686112588e-09, 2.5466161936604599e-10),
    *(-1.2482784079516295e-10, -2.2122757753433792e-12, 4.4272603638230294e-12),
    *(-3.3672661280310127e-14, -1.6519256000923575e-13, 1.9024103044538835e-15),
    6.601187937172832e-15,
)
"""Chebyshev coefficients of (1 + 2 z) exp(z²) erfc(z) in the variable 1 - 7 / (z + 3.5)."""


def _scaled_erfc(z: Array) -> Array:
    """Computes (1 + 2 z) exp(z²) erfc(z) for z >= 0."""
    q, total, before = 1 - 7 / (z + 3.5), jnp.zeros_like(z), jnp.zeros_like(z)
    for each in MILLS[: 22 if z.dtype == jnp.float64 else 14][:0:-1]:
        total, before = each + 2 * q * total - before, total
    return MILLS[0] + q * total - before


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def gaussian(y: Array, rate: float) -> Array:
    """Computes exp(-rate y²) without the rounding error of a large y²."""
    y = jnp.clip(y, -200, 200)
    head = jnp.round(16 * y) / 16  # `head` has at most 12 bits, so its square is exact.
    return jnp.exp(-rate * head * head) * jnp.exp(-rate * (y - head) * (y + head))


@gaussian.defjvp
def _(rate, primals, tangents):
    (y,), (tangent,) = primals, tangents
    return gaussian(y, rate), tangent * (-2 * rate * y) * gaussian(y, rate)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def erfc(y: Array, rate: float = 1.0) -> Array:
    """Computes the complementary error function of sqrt(rate) y.

    With rate 1/2, this is twice the upper tail probability of the standard normal distribution.
    """
    z = y * math.sqrt(rate)
    is_far = z > 0.25
    far = jnp.where(is_far, z, 1)
    tail = _scaled_erfc(far) / (1 + 2 * far) * gaussian(y, rate)
    return jnp.where(is_far, tail, lax.erfc(jnp.where(is_far, 0, z)))


@erfc.defjvp
def _(rate, primals, tangents):
    (y,), (tangent,) = primals, tangents
    return erfc(y, rate), tangent * -2 * math.sqrt(rate / math.pi) * gaussian(y, rate)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def log_erfc(y: Array, rate: float = 1.0, number: float = 1.0) -> Array:
    """Computes log(number * erfc(sqrt(rate) y))."""
    return _log_erfc_and_slope(y, rate, number)[0]


@log_erfc.defjvp
def _(rate, number, primals, tangents):
    (y,), (tangent,) = primals, tangents
    slope = _log_erfc_and_slope(y, rate, number)[1]
    return log_erfc(y, rate, number), tangent * slope


def _log_erfc_and_slope(y: Array, rate: float, number: float) -> tuple[Array, Array]:
    z, scale = y * math.sqrt(rate), 2 * math.sqrt(rate / math.pi)
    is_far = z > 0.5
    far = jnp.where(is_far, z, 1)
    total = _scaled_erfc(far)
    log_far = jnp.log(number * total / (1 + 2 * far)) - rate * jnp.square(y)
    near = jnp.where(is_far, 0, y)
    if number == 1:
        is_below = z < -0.5
        middle = jnp.where(is_below | is_far, 0, z)
        log_near = jnp.where(is_below, jnp.log(erfc(near, rate)), log1p(-lax.erf(middle)))
    else:
        is_below = z < -0.3
        log_below = log1p(-erfc(jnp.where(is_below, -near, 0), rate) / 2) + math.log(2 * number)
        log_near = jnp.where(is_below, log_below, jnp.log(number * erfc(near, rate)))
    slope_near = gaussian(near, rate) / erfc(near, rate)
    slope = -scale * jnp.where(is_far, (1 + 2 * far) / total, slope_near)
    return jnp.where(is_far, log_far, log_near), slope


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def squared_deviations(x: Array, axes: tuple[int, ...]) -> Array:
    """Computes the sum of (x - mean(x))² along `axes`."""
    return jnp.sum(jnp.square(x - jnp.mean(x, axis=axes, keepdims=True)), axis=axes)


@squared_deviations.defjvp
def _(axes, primals, tangents):
    (x,), (tangent,) = primals, tangents
    # The deviations add up to zero, so the derivative of the mean contributes nothing.
    slope = 2 * (x - jnp.mean(x, axis=axes, keepdims=True))
    return squared_deviations(x, axes), jnp.sum(slope * tangent, axis=axes)


def safe_sqrt(x: Array) -> Array:
    """Computes the square root, with derivative zero at zero."""
    is_zero = x == 0
    return jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 1, x)))


def length(roots: list[Array]) -> Array:
    """Computes sqrt(x₁² + x₂² + ...) elementwise, without overflow or underflow of the squares."""
    dtype = roots[0].dtype
    if dtype == jnp.float16:
        squares = [jnp.square(root.astype(jnp.float32)) for root in roots]
        return safe_sqrt(functools.reduce(jnp.add, squares)).astype(dtype)
    largest = functools.reduce(jnp.maximum, map(jnp.abs, roots))
    # Scale by powers of two, because that is exact.
    half = jnp.finfo(dtype).maxexp // 2
    is_large, is_small = largest > 2.0 ** (half - 4), largest < 2.0 ** (14 - half)

    def scale(sign: int) -> Array:
        large, small = (2.0 ** (sign * power) for power in (-half - 6, half + 6))
        return jnp.where(is_large, large, jnp.where(is_small, small, 1)).astype(dtype)

    squares = [jnp.square(root * scale(1)) for root in roots]
    return safe_sqrt(functools.reduce(jnp.add, squares)) * scale(-1)


def scaled(number: float, array: Array) -> Array:
    """Multiplies an array by a number. If the number is one, no operation is traced."""
    return array if number == 1 else -array if number == -1 else number * array


def single(array: Array) -> Array:
    """Casts an array of a 16-bit dtype to float32, and returns other arrays unchanged."""
    return array.astype(jnp.float32) if array.dtype.itemsize < 4 else array


def finite(large: Array) -> Array:
    """Replaces infinities and NaN by zero, because inf - inf would be NaN."""
    return jnp.where(jnp.isfinite(large), large, 0)


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


def shifted(ys: Sequence[Array], ws: Sequence[Array | float | None]) -> tuple[Array, list[Array]]:
    """Divides terms w exp(y) by the largest |w| exp(y), without overflow.

    **Returns:** the logarithm of the largest |w| exp(y), and for each term the quotient.
    """
    sizes = [_log_size(y, w) for y, w in zip(ys, ws, strict=True)]
    large = finite(lax.stop_gradient(functools.reduce(jnp.maximum, sizes)))
    return large, [weighted_exp(y - large, w) for y, w in zip(ys, ws, strict=True)]


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


def digits(small: Array, *sign: Array) -> tuple[Array, ...]:
    """The parts of a logarithm (see `_logarithms`): a large part of zero, `small`, and the sign."""
    return jnp.zeros_like(small), small, *sign


def log_size(x: Array) -> tuple[Array, Array]:
    """Computes log|x| and the sign of x."""
    return jnp.log(jnp.where(x < 0, -x, x)), jnp.sign(x)


def log_sigmoid(y: Array) -> tuple[Array, Array]:
    large = finite(lax.stop_gradient(jnp.minimum(y, 0)))
    return large, -logaddexp(large, large - y)


def log_of_one_plus_tanh(y: Array) -> tuple[Array, Array]:
    large, small = log_sigmoid(2 * y)
    is_near = jnp.abs(y) < 0.5
    near = log1p(jnp.tanh(jnp.where(is_near, y, 0)))
    return jnp.where(is_near, 0, large), jnp.where(is_near, near, small + math.log(2))


def log_cosh(y: Array) -> tuple[Array, Array]:
    is_near = jnp.abs(y) < 1
    square, total = jnp.square(jnp.where(is_near, y, 0)), jnp.ones_like(y)
    for n in range(18 if y.dtype == jnp.float64 else 10, 2, -2):
        total = 1 + square / (n * (n - 1)) * total  # Taylor series of 2 (cosh(y) - 1) / y².
    near = log1p(square / 2 * total)
    far = jnp.where(is_near, 1, y)
    large = finite(lax.stop_gradient(jnp.abs(far)))
    small = jnp.logaddexp(far - large, -far - large) - math.log(2)
    return jnp.where(is_near, 0, large), jnp.where(is_near, near, small)


def log_size_of_sinh(y: Array) -> tuple[Array, Array, Array]:
    large, small, _ = log_size_of_expm1(-2 * jnp.abs(y))
    return jnp.abs(y) + large, small - math.log(2), jnp.sign(y)


def log_size_of_expm1(y: Array) -> tuple[Array, Array, Array]:
    """Computes the large and small part of log|exp(y) - 1|, and the sign of y.

    Away from zero, the small part is log(1 - exp(-|y|)), as in Mächler 2012, "Accurately computing
    log(1 - exp(-|a|))".
    """
    is_near = (y > -math.log(2)) & (y < 2)
    near, far = jnp.where(is_near, y, 1), jnp.where(is_near, 2, y)
    small = jnp.where(is_near, log_size(expm1(near))[0], log1p(-jnp.exp(-jnp.abs(far))))
    return jnp.where(is_near, 0, jnp.maximum(far, 0)), small, jnp.sign(y)


def log_size_of_det(x: Array) -> tuple[Array, Array, Array]:
    if x.shape[-1] not in (1, 2):
        sign, log = jnp.linalg.slogdet(x)
        return jnp.zeros_like(log), log, sign
    # For small matrices, JAX multiplies entries, and the products may overflow. Add logarithms
    # instead.
    pivot, rest, sign = x[..., 0, 0], jnp.ones_like(x[..., 0, 0]), 1
    if x.shape[-1] == 2:
        (a, b), (c, d) = ((x[..., i, 0], x[..., i, 1]) for i in range(2))
        is_swapped = jnp.abs(c) > jnp.abs(a)
        pivot, c = jnp.where(is_swapped, c, a), jnp.where(is_swapped, a, c)
        b, d = jnp.where(is_swapped, d, b), jnp.where(is_swapped, b, d)
        rest = d - c / jnp.where(pivot == 0, 1, pivot) * b
        sign = jnp.where(is_swapped, -1, 1).astype(x.dtype)
    return jnp.log(jnp.abs(pivot)), jnp.log(jnp.abs(rest)), sign * jnp.sign(pivot) * jnp.sign(rest)
