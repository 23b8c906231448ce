"""`jax.lax.conv_general_dilated`, with products of matrices where a CPU is faster with them.

XLA's convolutions are fast on a CPU where the window has few points and the output has many. In
the gradient by the weight the window is a whole image, and the output has the size of the kernel:
each point of the output is one product of matrices, over all images and positions. A kernel of one
point is one product of matrices too.

The primitive of this file has the name, parameters, type and derivatives of JAX's own. It differs
only in its lowering for CPUs, so that programs for other platforms stay as they are.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Primitive
from jax.interpreters import ad, mlir
from jaxtyping import Array

from .._compat import is_partitioned, set_batching_rule, vary, varying_axes

_jax_conv = jax.lax.conv_general_dilated_p
_conv = Primitive("conv_general_dilated")


def conv(x: Array, weight: Array, **options: Any) -> Array:
    """`jax.lax.conv_general_dilated(x, weight, **options)`."""
    axes = varying_axes(x) | varying_axes(weight)
    run = functools.partial(jax.lax.conv_general_dilated, **options)
    return _with_conv(run, vary(x, axes), vary(weight, axes))


def _with_conv(function: Callable[..., Array], *arrays: Array) -> Array:
    """`function(*arrays)`, with the primitive of this file in place of JAX's."""
    closed = jax.make_jaxpr(function)(*arrays)
    values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(closed.jaxpr.invars, arrays, strict=True))
    for equation in closed.eqns:
        primitive = _conv if equation.primitive is _jax_conv else equation.primitive
        inputs = [
            each.val if isinstance(each, Literal) else values[each] for each in equation.invars
        ]
        with equation.ctx.manager:
            outputs = primitive.bind(*inputs, **primitive.get_bind_params(equation.params))
        outputs = outputs if primitive.multiple_results else [outputs]
        values.update(zip(equation.outvars, outputs, strict=True))
    return values[closed.jaxpr.outvars[0]]


def _plain(x: Array, weight: Array, **params: Any) -> Array:
    return _jax_conv.bind(x, weight, **params)


@functools.cache
def _compiled(**params: Any) -> Callable[..., Array]:
    return jax.jit(functools.partial(_conv.bind, **params))


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Array, Any]:
    x, weight = primals
    terms = [
        _conv.bind(*each, **params)
        for each, tangent in (((tangents[0], weight), tangents[0]), ((x, tangents[1]), tangents[1]))
        if type(tangent) is not ad.Zero
    ]
    # JAX's own, where it is as fast: the policies of `jax.checkpoint` know no other convolution.
    primitive = _conv if _is_product(params, weight.shape) else _jax_conv
    return primitive.bind(x, weight, **params), functools.reduce(ad.add_jaxvals, terms)


def _transpose(cotangent: Any, x: Any, weight: Any, **params: Any) -> list[Any]:
    if type(cotangent) is ad.Zero:
        return [None, None]
    place = 0 if ad.is_undefined_primal(x) else 1
    unknown, known = (x, weight) if place == 0 else (weight, x)

    def run(cotangent: Array, known: Array) -> Array:
        arrays = (unknown, known) if place == 0 else (known, unknown)
        return ad.primitive_transposes[_jax_conv](cotangent, *arrays, **params)[place]

    found = _with_conv(run, cotangent, known)
    return [found, None] if place == 0 else [None, found]


def _batch(_: Any, arrays: Any, axes: Any, **params: Any) -> tuple[Array, int]:
    return _with_conv(jax.vmap(functools.partial(_plain, **params), axes), *arrays), 0


_conv.def_impl(lambda x, weight, **params: _compiled(**params)(x, weight))
_conv.def_effectful_abstract_eval(_jax_conv.abstract_eval)
ad.primitive_jvps[_conv] = _jvp
ad.primitive_transposes[_conv] = _transpose
set_batching_rule(_conv, _batch)
mlir.register_lowering(_conv, mlir.lower_fun(_plain, multiple_results=False))


# --- On a CPU ---


def _is_product(params: Any, weight_shape: tuple[int, ...]) -> bool:
    """Whether the kernel has one point, and all channels meet."""
    points = [weight_shape[axis] for axis in params["dimension_numbers"].rhs_spec[2:]]
    return math.prod(points) == 1 and params["feature_group_count"] == 1


def _lower(context: Any, x: Any, weight: Any, **params: Any) -> Any:
    x_aval, weight_aval = context.avals_in
    run = _plain
    if 0 not in (*x_aval.shape, *weight_aval.shape, *context.avals_out[0].shape):
        out_spec = params["dimension_numbers"].out_spec
        rhs_spec = params["dimension_numbers"].rhs_spec
        num_outputs = math.prod(context.avals_out[0].shape[axis] for axis in out_spec[2:])
        num_points = math.prod(weight_aval.shape[axis] for axis in rhs_spec[2:])
        if params["feature_group_count"] == 1:
            if num_points == 1 and params["batch_group_count"] == 1:
                run = _product
            elif num_outputs <= num_points and not is_partitioned(context):
                run = _by_outputs
    return mlir.lower_fun(run, multiple_results=False)(context, x, weight, **params)


mlir.register_lowering(_conv, _lower, platform="cpu")


def _padded(x: Array, params: Any) -> Array:
    """`x`, with axes `(*, *, *sizes)`, as its window meets it: padded and spread."""
    spatial = zip(params["padding"], params["lhs_dilation"], strict=True)
    config = [(0, 0, 0), (0, 0, 0), *((*pads, step - 1) for pads, step in spatial)]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), config)


def _sum_dtype(dtype: Any) -> Any:
    return jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype


def _product(x: Array, weight: Array, **params: Any) -> Array:
    """A convolution with a kernel of one point."""
    numbers = params["dimension_numbers"]
    x = _padded(jnp.transpose(x, numbers.lhs_spec), params)
    x = jax.lax.slice(x, (0,) * x.ndim, x.shape, (1, 1, *params["window_strides"]))
    weight = jnp.transpose(weight, numbers.rhs_spec).reshape(weight.shape[numbers.rhs_spec[0]], -1)
    batch, channels, *sizes = x.shape
    flat = x.reshape(batch, channels, -1)
    dot = functools.partial(jnp.einsum, precision=params["precision"])
    if weight.size <= sum(weight.shape) * flat.shape[2]:
        weights = jnp.broadcast_to(weight, (batch, *weight.shape))
        y = dot("boi,bip->bop", weights, flat)
    else:
        y = dot("oi,bip->bop", weight, flat)
    y = y.reshape(batch, -1, *sizes)
    return jnp.transpose(y, _inverse(numbers.out_spec))


def _inverse(order: Any) -> list[int]:
    return [order.index(axis) for axis in range(len(order))]


_CHUNK = 1 << 18


def _by_outputs(x: Array, weight: Array, **params: Any) -> Array:
    """A convolution with few outputs, each a product of matrices."""
    numbers, groups = params["dimension_numbers"], params["batch_group_count"]
    # The channels, over which the sum runs, in front.
    batch_axis, channel_axis, *spatial = numbers.lhs_spec
    x = jnp.transpose(x, (channel_axis, batch_axis, *spatial))
    out_axis, in_axis, *spatial = numbers.rhs_spec
    weight = jnp.transpose(weight, (in_axis, out_axis, *spatial))
    channels, outputs, *points = weight.shape
    batch = x.shape[1] // groups
    extents = [(k - 1) * d + 1 for k, d in zip(points, params["rhs_dilation"], strict=True)]
    dtype = _sum_dtype(x.dtype)

    def step(total: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
        x, weight = part
        x = _padded(x, params)
        steps = params["window_strides"]
        starts = [
            range(0, size - extent + 1, step)
            for size, extent, step in zip(x.shape[2:], extents, steps, strict=True)
        ]
        windows = []
        for start in itertools.product(*starts):
            stop = [first + extent for first, extent in zip(start, extents, strict=True)]
            window = jax.lax.slice(
                x, (0, 0, *start), (*x.shape[:2], *stop), (1, 1, *params["rhs_dilation"])
            )
            windows.append(jnp.moveaxis(window, 0, 1).reshape(groups, batch, -1))
        flat = jnp.concatenate(windows, 1)
        kernel = jnp.moveaxis(weight, 0, 1).reshape(groups, outputs // groups, -1)
        found = jnp.einsum(
            "gop,gnp->gon",
            kernel,
            flat,
            precision=params["precision"],
            preferred_element_type=dtype,
        )
        return total + found, None

    sizes = [1 + (size - 1) * d + sum(pads) - extent for size, d, pads, extent in
             zip(x.shape[2:], params["lhs_dilation"], params["padding"], extents, strict=True)]
    sizes = [size // step + 1 for size, step in zip(sizes, params["window_strides"], strict=True)]
    per_channel = x.shape[1] * math.prod(sizes) * math.prod(points)
    chunk = max(n for n in range(1, channels + 1) if channels % n == 0 and (n == 1 or n * per_channel <= _CHUNK))
    zero = jnp.zeros((groups, outputs // groups, math.prod(sizes) * batch), dtype)
    chunks = [each.reshape(-1, chunk, *each.shape[1:]) for each in (x, weight)]
    total, _ = jax.lax.scan(step, zero, tuple(chunks))
    y = total.reshape(outputs, *sizes, batch)
    y = jnp.moveaxis(y, -1, 0).astype(x.dtype)
    return jnp.transpose(y, _inverse(numbers.out_spec))
