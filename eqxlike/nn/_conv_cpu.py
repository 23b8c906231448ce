"""`jax.lax.conv_general_dilated` with a faster lowering for CPUs.

XLA is slow at some convolutions on a CPU, so `_lower` lowers these convolutions to other
operations. A custom lowering needs a custom primitive. This primitive has the same name,
parameters, type and derivatives as JAX's primitive. On platforms other than CPUs, the primitive
uses JAX's lowering.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.jet import jet_rules
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, mlir
from jaxtyping import Array

from .._compat import is_partitioned, set_batching_rule, vary, varying_axes
from .._programs import bind, interpret

_jax_conv = jax.lax.conv_general_dilated_p
conv_p = Primitive("conv_general_dilated")


def conv(x: Array, weight: Array, **options: Any) -> Array:
    """Computes `jax.lax.conv_general_dilated(x, weight, **options)`."""
    axes = varying_axes(x) | varying_axes(weight)
    run = functools.partial(jax.lax.conv_general_dilated, **options)
    return _with_conv(run, vary(x, axes), vary(weight, axes))


def _with_conv(function: Callable[..., Array], *arrays: Array) -> Array:
    """`function(*arrays)`, with JAX's convolution primitive replaced by `conv_p`."""
    closed = jax.make_jaxpr(function)(*arrays)

    def run(equation: JaxprEqn, inputs: list[Array]) -> Sequence[Array]:
        primitive = conv_p if equation.primitive is _jax_conv else None
        return bind(equation, inputs, primitive=primitive)

    return interpret(closed.jaxpr, closed.consts, arrays, run)[0]


def _plain(x: Array, weight: Array, **params: Any) -> Array:
    return _jax_conv.bind(x, weight, **params)


@functools.cache
def _compiled(**params: Any) -> Callable[..., Array]:
    return jax.jit(functools.partial(conv_p.bind, **params))


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Array, Any]:
    x, weight = primals
    terms = [
        conv_p.bind(*each, **params)
        for each, tangent in (((tangents[0], weight), tangents[0]), ((x, tangents[1]), tangents[1]))
        if type(tangent) is not ad.Zero
    ]
    # On platforms other than CPUs, the rule binds JAX's primitive, because policies of
    # `jax.checkpoint` look for JAX's primitive.
    primitive = conv_p if jax.default_backend() == "cpu" else _jax_conv
    return primitive.bind(x, weight, **params), functools.reduce(ad.add_jaxvals, terms)


def _transpose(cotangent: Any, x: Any, weight: Any, **params: Any) -> list[Any]:
    if type(cotangent) is ad.Zero:
        return [None, None]
    place = 0 if ad.is_undefined_primal(x) else 1
    unknown, known = (x, weight) if place == 0 else (weight, x)

    def run(cotangent: Array, known: Array) -> Array:
        arrays = (unknown, known) if place == 0 else (known, unknown)
        return ad.primitive_transposes[_jax_conv](cotangent, *arrays, **params)[place]

    result = _with_conv(run, cotangent, known)
    return [result, None] if place == 0 else [None, result]


def _batch(_: Any, arrays: Any, axes: Any, **params: Any) -> tuple[Array, int]:
    return _with_conv(jax.vmap(functools.partial(_plain, **params), axes), *arrays), 0


conv_p.def_impl(lambda x, weight, **params: _compiled(**params)(x, weight))
conv_p.def_effectful_abstract_eval(_jax_conv.abstract_eval)
ad.primitive_jvps[conv_p] = _jvp
ad.primitive_transposes[conv_p] = _transpose
jet_rules[conv_p] = jet_rules[_jax_conv]
set_batching_rule(conv_p, _batch)
mlir.register_lowering(conv_p, mlir.lower_fun(_plain, multiple_results=False))


# --- On a CPU ---


def _lower(context: Any, x: Any, weight: Any, **params: Any) -> Any:
    """Lowers the convolution to the operations that XLA runs fastest on a CPU.

    With channels last, XLA calls Eigen, which is as fast as a matrix product. XLA moves the
    channels to the last axis itself, but not inside loops and branches. Inside loops and branches,
    a convolution with channels first takes 10 to 50 times as long, so the lowered program moves the
    channels. Other slow cases:

    - A kernel of size 1. It is lowered to a matrix product, which needs no change of layout.
    - A kernel that is larger than `x` along an axis. XLA computes it in a slow loop.
    - The gradient with respect to the weight. This gradient is a convolution in which the batch
      takes the place of the channels, and the window is a whole image. XLA moves the batch to the
      last axis of both operands. Moving the batch takes most of the time unless the operands fit
      into the cache.
    - The gradient with respect to the weight of a convolution with groups, or of a transposed
      convolution. XLA computes both in slow loops.
    """
    (x_aval, weight_aval), (y_aval,) = context.avals_in, context.avals_out
    all_sizes = (*x_aval.shape, *weight_aval.shape, *y_aval.shape)
    if not all(isinstance(size, int) for size in all_sizes):  # Exported programs, for example.
        return mlir.lower_fun(_plain, multiple_results=False)(context, x, weight, **params)
    numbers, groups = params["dimension_numbers"], params["batch_group_count"]
    x_sizes = [x_aval.shape[axis] for axis in numbers.lhs_spec[2:]]
    points = [weight_aval.shape[axis] for axis in numbers.rhs_spec[2:]]
    num_points = math.prod(points)
    num_outputs = math.prod(y_aval.shape[axis] for axis in numbers.out_spec[2:])
    is_gradient = numbers.lhs_spec[1] == 0 and not is_partitioned(context)
    run = _channels_last
    if 0 not in (x_aval.size, weight_aval.size, y_aval.size) and params["feature_group_count"] == 1:
        columns = x_aval.size // math.prod(x_sizes) * num_points * num_outputs
        is_larger = any(map(operator.gt, points, x_sizes))
        is_small = num_points <= _MOST_SLICES and columns <= _MOST_COLUMNS
        if groups == 1 and (num_points == 1 or (is_larger and is_small)):
            run = _im2col
        elif is_gradient and groups == 1 and num_outputs == 1:
            run = _one_output
        elif is_gradient and groups == 1 and set(params["lhs_dilation"]) == {1}:
            run = _in_parts if len(points) < 3 else _channels_last  # parts take 1.2 times as long
        elif is_gradient and num_outputs <= _MOST_SLICES:
            run = _by_outputs if columns // x_aval.shape[0] <= _MOST_COLUMNS else _channels_last
    return mlir.lower_fun(run, multiple_results=False)(context, x, weight, **params)


mlir.register_lowering(conv_p, _lower, platform="cpu")

# The gradient with respect to a weight is summed over parts of the batch that fit into the cache.
# `_PART` entries of float32 have 1.5 MiB. Measured on two cores with 2 MiB of cache each, for a 3 x
# 3 kernel from 32 to 64 channels of 32 x 32, batch 32: 45 ms without parts, 28 ms in parts of 3
# MiB, 15 ms in parts of 1.5 MiB or less.
_PART = 3 << 17
_MOST_PARTS = 32
_MOST_SLICES = 64
_MOST_COLUMNS = 1 << 24


def _sum_dtype(dtype: Any) -> Any:
    """The dtype in which products are accumulated."""
    return jnp.float32 if dtype in (jnp.float16, jnp.bfloat16) else dtype


def _padded(x: Array, params: Any) -> Array:
    """Pads and dilates `x`, whose spatial axes start at the third axis."""
    spatial = zip(params["padding"], params["lhs_dilation"], strict=True)
    edges = [(0, 0, 0), (0, 0, 0), *((*pads, step - 1) for pads, step in spatial)]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), edges)


def _output_sizes(x: Array, weight: Array, params: Any) -> list[int]:
    axes = zip(
        x.shape[2:], weight.shape[2:], params["rhs_dilation"], params["window_strides"], strict=True
    )
    return [len(range((points - 1) * rate, size, step)) for size, points, rate, step in axes]


def _slices(x: Array, counts: Any, steps: Any, points: Any, rates: Any) -> list[Array]:
    """Strided slices of a padded `x`.

    Along each axis there are `counts` slices, whose starts are `steps` apart. Each slice has
    `points` entries that are `rates` apart.
    """
    axes = zip(counts, steps, strict=True)
    starts = itertools.product(*(range(0, count * step, step) for count, step in axes))
    spans = [(size - 1) * rate + 1 for size, rate in zip(points, rates, strict=True)]
    return [
        jax.lax.slice(
            x, (0, 0, *start), (*x.shape[:2], *map(operator.add, start, spans)), (1, 1, *rates)
        )
        for start in starts
    ]


def _to_spec(y: Array, spec: Any) -> Array:
    """The inverse of `jnp.transpose(y, spec)`."""
    return jnp.transpose(y, [spec.index(axis) for axis in range(len(spec))])


def _channels_last(x: Array, weight: Array, **params: Any) -> Array:
    numbers, last = params["dimension_numbers"], tuple(range(1, x.ndim - 1))
    x_spec, weight_spec = (0, x.ndim - 1, *last), (x.ndim - 1, x.ndim - 2, *range(x.ndim - 2))
    x = _to_spec(jnp.transpose(x, numbers.lhs_spec), x_spec)
    weight = _to_spec(jnp.transpose(weight, numbers.rhs_spec), weight_spec)
    moved = jax.lax.ConvDimensionNumbers(x_spec, weight_spec, x_spec)
    y = _plain(x, weight, **{**params, "dimension_numbers": moved})
    return _to_spec(jnp.transpose(y, x_spec), numbers.out_spec)


def _im2col(x: Array, weight: Array, **params: Any) -> Array:
    """One matrix product of `weight` and the windows of `x` (im2col)."""
    numbers, precision = params["dimension_numbers"], params["precision"]
    x = _padded(jnp.transpose(x, numbers.lhs_spec), params)
    weight = jnp.transpose(weight, numbers.rhs_spec)
    sizes, points = _output_sizes(x, weight, params), weight.shape[2:]
    windows = _slices(x, points, params["rhs_dilation"], sizes, params["window_strides"])
    flat = jnp.stack(windows, 2).reshape(x.shape[0], -1, math.prod(sizes))
    weight = weight.reshape(weight.shape[0], -1)
    # The first einsum needs no transpose, but makes one copy of the weight for each example.
    if weight.size <= sum(weight.shape) * flat.shape[2]:
        weight = jnp.broadcast_to(weight, (x.shape[0], *weight.shape))
        y = jnp.einsum("boi,bip->bop", weight, flat, precision=precision)
    else:
        y = jnp.einsum("oi,bip->bop", weight, flat, precision=precision)
    return _to_spec(y.reshape(*y.shape[:2], *sizes), numbers.out_spec)


def _one_output(x: Array, weight: Array, **params: Any) -> Array:
    """A convolution with one output entry, such as the weight gradient of a kernel of size 1.

    The convolution is a sum over the batch, `y = sum(x[b] @ weight[b].T)`.
    """
    numbers, dtype = params["dimension_numbers"], x.dtype
    options = {"precision": params["precision"], "preferred_element_type": _sum_dtype(dtype)}
    weight = jnp.transpose(weight, numbers.rhs_spec)
    x = _padded(jnp.transpose(x, numbers.lhs_spec), params)
    rates = params["rhs_dilation"]
    (window,) = _slices(x, (1,) * len(rates), rates, weight.shape[2:], rates)
    flat, weight = (each.reshape(*each.shape[:2], -1) for each in (window, weight))
    # The first einsum needs no transpose, but has one product for each example of the batch.
    if len(flat) * len(weight) <= (len(flat) + len(weight)) * flat.shape[2]:
        y = jnp.einsum("nbp,obp->bno", flat, weight, **options).sum(0)
    else:
        y = jnp.einsum("nbp,obp->no", flat, weight, **options)
    y = y.astype(dtype).reshape(*y.shape, *(1,) * (x.ndim - 2))
    return _to_spec(y, numbers.out_spec)


def _in_parts(x: Array, weight: Array, **params: Any) -> Array:
    """Splits the batch into parts that fit into the cache, and sums the parts' convolutions."""
    numbers, batch = params["dimension_numbers"], x.shape[0]
    axis = numbers.rhs_spec[1]
    num_parts = min(batch, _MOST_PARTS, math.ceil((x.size + weight.size) / _PART))
    if num_parts == 1:
        return _channels_last(x, weight, **params)
    size = math.ceil(batch / num_parts)
    params_of_part = {**params, "preferred_element_type": jnp.dtype(_sum_dtype(x.dtype))}
    terms = [
        _channels_last(
            jax.lax.slice_in_dim(x, start, min(start + size, batch)),
            jax.lax.slice_in_dim(weight, start, min(start + size, batch), axis=axis),
            **params_of_part,
        )
        for start in range(0, batch, size)
    ]
    return functools.reduce(jnp.add, terms).astype(x.dtype)


def _by_outputs(x: Array, weight: Array, **params: Any) -> Array:
    """Computes all output entries by one matrix product for each part of the batch, in a loop."""
    numbers, groups = params["dimension_numbers"], params["batch_group_count"]
    # Moves the batch axis, over which the products are summed, to axis 0 of both arrays.
    x = jnp.transpose(x, (numbers.lhs_spec[1], numbers.lhs_spec[0], *numbers.lhs_spec[2:]))
    order = (numbers.rhs_spec[1], numbers.rhs_spec[0], *numbers.rhs_spec[2:])
    x, weight, dtype = _padded(x, params), jnp.transpose(weight, order), _sum_dtype(x.dtype)
    (batch, channels), outputs = x.shape[:2], weight.shape[1]
    sizes = _output_sizes(x, weight, params)
    columns = channels * math.prod(sizes) * math.prod(weight.shape[2:])
    part = max(
        n for n in range(1, batch + 1) if batch % n == 0 and n * columns <= max(_PART, columns)
    )

    def add(index: Array, total: Array) -> Array:
        members = (jax.lax.dynamic_slice_in_dim(each, index * part, part) for each in (x, weight))
        some, kernel = members
        windows = [
            each.swapaxes(0, 1).reshape(groups, channels // groups, -1)
            for each in _slices(
                some, sizes, params["window_strides"], kernel.shape[2:], params["rhs_dilation"]
            )
        ]
        kernel = kernel.swapaxes(0, 1).reshape(groups, outputs // groups, -1)
        options = {"precision": params["precision"], "preferred_element_type": dtype}
        return total + jnp.einsum("gop,gnp->gon", kernel, jnp.concatenate(windows, 1), **options)

    shape = (groups, outputs // groups, columns // math.prod(weight.shape[2:]) // groups)
    zero = vary(jnp.zeros(shape, dtype), varying_axes(x))
    total = jax.lax.fori_loop(0, batch // part, add, zero)
    y = total.reshape(outputs, *sizes, channels // groups).astype(x.dtype)
    return _to_spec(jnp.moveaxis(y, -1, 0), numbers.out_spec)
