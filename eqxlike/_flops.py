"""Formulas for the number of floating-point operations of one equation of a jaxpr."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

# fmt: off
_ARITHMETIC = {
    "add", "sub", "mul", "div", "rem", "max", "min", "neg", "abs", "sign", "floor", "ceil",
    "round", "clamp", "add_any", "square", "select_n", "eq", "ne", "lt", "le", "gt", "ge",
    "eq_to", "lt_to", "le_to", "is_finite", "nextafter", "copysign", "reduce_precision",
    "cumsum", "cumprod", "cummax", "cummin",
}
_TRANSCENDENTAL = {
    "exp", "exp2", "expm1", "log", "log1p", "logistic", "sin", "cos", "tan", "sinh", "cosh",
    "tanh", "asin", "acos", "atan", "asinh", "acosh", "atanh", "atan2", "pow", "sqrt", "rsqrt",
    "cbrt", "erf", "erfc", "erf_inv", "lgamma", "digamma", "polygamma", "igamma", "igammac",
    "igamma_grad_a", "random_gamma_grad", "bessel_i0e", "bessel_i1e",
    "regularized_incomplete_beta", "zeta", "cumlogsumexp",
}
_REDUCTIONS = {
    "reduce", "reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "argmax", "argmin",
    "psum", "psum_invariant", "pmax", "pmin",
}
_WINDOWS = {"reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window"}
_SCATTERS = {
    "scatter-add", "scatter_add", "scatter-mul", "scatter_mul", "scatter-min", "scatter_min",
    "scatter-max", "scatter_max", "select_and_scatter_add",
}
_OPAQUE = {
    "eig", "eigh", "svd", "schur", "hessenberg", "tridiagonal", "householder_product", "geqrf",
    "geqp3", "qr", "ormqr", "lu_pivots", "ffi_call", "custom_call", "pallas_call",
    "pure_callback", "io_callback", "custom_linear_solve", "random_gamma",
}
# fmt: on


class Cost(NamedTuple):
    """The number of operations of one equation.

    - `flops`: additions, multiplications and other arithmetic on floating-point and complex
      numbers.
    - `transcendentals`: exponentials, roots, and trigonometric and other special functions.
    """

    flops: int
    transcendentals: int = 0


def cost_of(equation: Any) -> Cost | None:
    """The number of operations of an equation.

    It is `None` if the number is unknown, or if the operations are in an inner jaxpr.

    - A product of an `m` by `k` matrix and a `k` by `n` matrix takes `2 m k n` operations.
    - A convolution takes two operations for each pair of a weight and an input. Padding is not
      counted.
    - Elementwise arithmetic or a comparison takes one operation for each element.
    - A reduction takes one operation for each element of the input, minus one for each element of
      the output.
    - Complex arithmetic is counted as the real operations that it takes.
    - Integer arithmetic and data movement take no operations.
    """
    name = equation.primitive.name
    if name in _OPAQUE:
        return None
    inputs = [each.aval for each in equation.invars]
    outputs = [each.aval for each in equation.outvars]
    numbers = [each for each in (*inputs, *outputs) if _is_inexact(each)]
    if not numbers:
        return Cost(0)
    is_complex = any(jnp.issubdtype(each.dtype, jnp.complexfloating) for each in numbers)
    size = math.prod(outputs[0].shape) if outputs else 0
    per_product = 8 if is_complex else 2
    if name == "dot_general":
        (contracting, _), _ = equation.params["dimension_numbers"]
        contracted = math.prod(inputs[0].shape[axis] for axis in contracting)
        return Cost(per_product * size * contracted)
    if name == "ragged_dot_general":
        return Cost(per_product * _products_of_groups(equation))
    if name == "conv_general_dilated":
        return Cost(per_product * _products_of_convolution(equation))
    if name in _ARITHMETIC:
        return Cost(size * ((6 if name in ("mul", "div") else 2) if is_complex else 1))
    if name in _TRANSCENDENTAL:
        return Cost(0, size)
    if name == "integer_pow":
        return Cost(size * _products_of_power(equation.params["y"]) * (6 if is_complex else 1))
    if name in _REDUCTIONS:
        return Cost((math.prod(inputs[0].shape) - size) * (2 if is_complex else 1))
    if name in _WINDOWS:
        return Cost(size * (math.prod(equation.params["window_dimensions"]) - 1))
    if name in _SCATTERS:
        return Cost(math.prod(inputs[-1 if name.startswith("scatter") else 0].shape))
    if name in ("cholesky", "lu", "triangular_solve", "fft"):
        return _linear_algebra(name, equation, inputs)
    if name != "scatter" and any(True for _ in jaxprs_in_params(equation.params)):
        return None
    return Cost(0)


def _is_inexact(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _products_of_groups(equation: Any) -> int:
    """The number of multiplications in a `jax.lax.ragged_dot_general`."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (_, contracting), (_, batch) = numbers.dot_dimension_numbers
    left, right = (each.aval.shape for each in equation.invars[:2])
    taken = {*contracting, *batch, *numbers.rhs_group_dimensions}
    return math.prod(left) * math.prod(size for axis, size in enumerate(right) if axis not in taken)


def _products_of_convolution(equation: Any) -> int:
    params = equation.params
    numbers = params["dimension_numbers"]
    left, right = (each.aval.shape for each in equation.invars[:2])
    output = equation.outvars[0].aval.shape
    # If the features are grouped, each output depends on the input features of one group. In the
    # kernel, the axis of the input features has the size of a group.
    features = right[numbers.rhs_spec[1]]
    batch_and_channels = math.prod(output[axis] for axis in numbers.out_spec[:2])
    # The number of pairs of a weight and an input is the product of the numbers for each axis.
    pairs = 1
    for lhs, rhs, out, stride, (padding, _), lhs_dilation, rhs_dilation in zip(
        numbers.lhs_spec[2:],
        numbers.rhs_spec[2:],
        numbers.out_spec[2:],
        *(params[name] for name in ("window_strides", "padding", "lhs_dilation", "rhs_dilation")),
        strict=True,
    ):
        starts = np.arange(output[out]) * stride - padding
        taps = np.arange(right[rhs]) * rhs_dilation
        pairs *= _pairs_along_axis(starts, taps, left[lhs], lhs_dilation)
    return batch_and_channels * features * pairs


def _pairs_along_axis(starts: np.ndarray, taps: np.ndarray, length: int, dilation: int) -> int:
    """The number of pairs of a weight and an entry of the input along one axis.

    Pairs with an entry of the padding are not counted.

    **Arguments:**

    - `starts`: the start of the window for each output.
    - `taps`: the positions of the weights, relative to the start.
    - `length`, `dilation`: length and dilation of the input.
    """
    # Loops over the shorter array: in a gradient, `taps` may be as long as the input.
    shorter, longer = sorted((starts, taps), key=len)
    pairs = 0
    for place in shorter:
        places = longer + place
        is_inside = (places >= 0) & (places <= (length - 1) * dilation)
        pairs += np.count_nonzero(is_inside & (places % dilation == 0))
    return int(pairs)


def _products_of_power(exponent: int) -> int:
    """The number of multiplications of repeated squaring. A negative exponent adds a division."""
    magnitude = abs(exponent)
    if magnitude == 0:
        return 0
    products = magnitude.bit_length() - 1 + magnitude.bit_count() - 1
    return products + (exponent < 0)


def _linear_algebra(name: str, equation: Any, inputs: list[Any]) -> Cost:
    shape = inputs[0].shape
    if name == "fft":
        lengths = equation.params["fft_lengths"]
        size = math.prod(max(inputs[0].shape, equation.outvars[0].aval.shape, key=math.prod))
        return Cost(round(5 * size * math.log2(max(math.prod(lengths), 1))))
    batch, rows, columns = math.prod(shape[:-2]), shape[-2], shape[-1]
    if name == "cholesky":
        return Cost(batch * rows**3 // 3)
    if name == "lu":
        shorter = min(rows, columns)
        return Cost(batch * (rows * columns * shorter - shorter**3 // 3))
    return Cost(math.prod(inputs[1].shape) * rows)
