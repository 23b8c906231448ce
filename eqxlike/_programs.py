"""Programs: equations, their interpretation, host callbacks and FLOPs; collectives if compiled."""

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, jaxprs_in_params

from ._traceback import frame_of_user


def equations_in(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All equations of a jaxpr. An equation comes before the equations of its inner jaxprs."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations_in(inner)


def interpret(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    inputs: Sequence[Any],
    run: Callable[[JaxprEqn, list[Any]], Sequence[Any]],
    of_literal: Callable[[Literal], Any] = operator.attrgetter("val"),
) -> list[Any]:
    """Interprets a jaxpr: `run(equation, inputs)` computes the outputs of each equation.

    **Arguments:**

    - `of_literal`: function that makes an input from a literal of the program.
    """
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

    def read(atom: Any) -> Any:
        return of_literal(atom) if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        outputs = run(equation, list(map(read, equation.invars)))
        values.update(zip(equation.outvars, outputs, strict=True))
    return list(map(read, jaxpr.outvars))


def bind(
    equation: JaxprEqn,
    inputs: Iterable[Any],
    params: dict[str, Any] | None = None,
    primitive: Primitive | None = None,
) -> Sequence[Any]:
    """Runs one equation on `inputs`. `params` and `primitive` replace its own ones."""
    primitive = equation.primitive if primitive is None else primitive
    params = equation.params if params is None else params
    with equation.ctx.manager:
        outputs = primitive.bind(*inputs, **primitive.get_bind_params(params))
    return outputs if primitive.multiple_results else [outputs]


# --- Host callbacks in a traced program ---


_CALLS = {
    "check": "error_if",
    "debug_callback": "jax.debug.callback or jax.debug.print",
    "debug_print": "jax.debug.print",
    "infeed": "infeed",
    "io_callback": "io_callback",
    "outfeed": "outfeed",
    "pure_callback": "pure_callback",
}
"""Maps each primitive that calls Python on the host to the public function that binds it."""


def departures(jaxpr: Any) -> Iterator[str]:
    """Descriptions of the host callbacks in a jaxpr and its inner jaxprs.

    A description is the name of a public function, with file and line if JAX knows them.
    """
    for equation in equations_in(jaxpr):
        what = _CALLS.get(equation.primitive.name)
        if what is not None:
            frame = frame_of_user(equation.source_info)
            yield f"{what} at {frame.file_name}:{frame.line_num}" if frame else what


# --- The number of floating-point operations of one equation ---


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


# --- The collectives of a compiled program ---


KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_INSTRUCTION = re.compile(rf"= (?P<type>.*?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
_ARRAY = re.compile(r"\b(?P<dtype>pred|[a-z]+(?P<bits>\d+)\w*)\[(?P<shape>[\d,]*)\]")


class Collective(NamedTuple):
    """One exchange between devices, of one or more arrays at once.

    - `kind`: `all-gather`, `all-reduce`, `reduce-scatter`, `all-to-all`, `collective-permute` or
      `collective-broadcast`.
    - `shapes`: the shapes of the resulting arrays on one device.
    - `num_bytes`: the total size of these arrays in bytes.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int


def collectives(compiled: Any) -> tuple[Collective, ...]:
    """The collectives of a compiled program, in the order of its text.

    A collective inside a loop is listed once.

    **Arguments:**

    - `compiled`: a compiled program: the result of `filter_jit(...).lower(...).compile()` or
      `jax.jit(...).lower(...).compile()`.

    >>> import jax, jax.numpy as jnp, optax
    >>> from eqxlike import nn, train
    >>> optimiser, sharding = optax.sgd(0.1), train.data_parallel()
    >>> state = train.TrainState.create(
    ...     nn.Linear(2, 3, key=jax.random.key(0)), optimiser, key=jax.random.key(1)
    ... )
    >>> def loss(model, x, key):
    ...     return jnp.mean(jax.vmap(model)(x) ** 2)
    >>> step = train.make_step(loss, optimiser, sharding=sharding)
    >>> x = jnp.ones((4 * jax.device_count(), 2))
    >>> compiled = step.lower(train.shard(state, sharding), x).compile()
    >>> {each.kind for each in collectives(compiled)} <= {"all-reduce"}
    True
    """
    return tuple(
        _collective(match)
        for line in compiled.as_text().splitlines()
        if (match := _INSTRUCTION.search(line))
    )


def _collective(match: re.Match[str]) -> Collective:
    arrays = list(_ARRAY.finditer(match["type"]))
    if match["start"] and match["kind"] != "all-reduce":
        # The type of an instruction that starts a collective lists operands before results.
        arrays = arrays[len(arrays) // 2 :]
    shapes = tuple(tuple(map(int, filter(None, array["shape"].split(",")))) for array in arrays)
    num_bytes = sum(
        math.prod(shape) * int(array["bits"] or 8) // 8
        for shape, array in zip(shapes, arrays, strict=True)
    )
    return Collective(match["kind"], shapes, num_bytes)
