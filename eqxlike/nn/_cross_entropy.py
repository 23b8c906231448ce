"""Cross-entropy over a large vocabulary, without storing the logits of all tokens.

A loop computes the logits of one chunk of tokens at a time. `B` is the number of tokens, `C` the
number of tokens in a chunk, `D` the number of features, and `V` the number of classes. The features
`x` have shape (B, D), the weight `w` of the readout has shape (V, D), and the logits of a chunk
have shape (C, V).
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, mlir
from jax.sharding import AxisType
from jaxtyping import Array, Float, Int

from .._check_numbers import integer, real_number
from .._compat import set_batching_rule, vary, varying_axes
from .._dtypes import at_least_float32
from .._module import Module
from .._pytree import describe_node, is_array
from .._transforms._derivatives._linear_call import has_tangent, jvp_of_moving, to_front

_CHUNKS, _SMALL, _LARGE = 8, 2**21, 2**26
"""Number of chunks, and the smallest and largest number of logits in a chunk.

There are 8 chunks, unless a chunk would have fewer than 2**21 or more than 2**26 logits. Each chunk
reads and writes the gradient of the weight, so small chunks are slow.
"""


def cross_entropy(
    features: Float[Array, "*tokens D"],
    readout: Module | Float[Array, "V D"],
    labels: Int[Array, "*tokens"],
    *,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Float[Array, ""]:
    """Mean cross-entropy of a linear readout, in nats, without storing all logits.

    The logits are `features @ weight.T + bias`. In a language model the logits are the largest
    array of a training step. This function only stores the logits of one chunk of tokens, in the
    forward and the backward pass. Each chunk computes its gradient together with its losses (Hsu et
    al. (2024), "Liger Kernel"), so that a training step has the usual three matrix products with
    the readout.

    Call the function once for a whole batch. Under `jax.vmap` the examples share the chunks, but
    the backward pass computes the logits again.

    **Arguments:**

    - `features`: inputs of the readout, shape `(..., D)`.
    - `readout`: a `Linear` from D to V features; an `Embedding` of V rows, for tied weights; an
      array of shape `(V, D)`; or any layer with a `weight` and optionally a `bias`.
    - `labels`: integers from 0 to V - 1, shape `(...)`. Any other label except `ignore_index` makes
      the loss NaN.
    - `ignore_index`: any integer. Tokens with this label are ignored, for example padding.
    - `label_smoothing`: share of the target, in [0, 1], that is distributed evenly over all V
      classes, as in PyTorch. Szegedy, Vanhoucke, Ioffe, Shlens & Wojna (2016), "Rethinking the
      Inception Architecture for Computer Vision".
    - `z_loss`: factor of a penalty. `z_loss * logsumexp(logits)**2` is added to the loss of each
      token, to keep the logits small. Chowdhery et al. (2022), "PaLM".

    **Returns:** the mean over the tokens that are not ignored, in at least float32; 0 if all tokens
    are ignored. To combine the means of several calls, weight each mean by `(labels !=
    ignore_index).sum()`.

    **Raises:**

    - `ValueError` if the shapes of the arguments do not match.
    - `ValueError` if `label_smoothing` is outside [0, 1].
    - `TypeError` if `labels` are not integers.
    - `TypeError` if `readout` has no `weight` with two axes.

    >>> import eqxlike as eqx, jax, jax.numpy as jnp
    >>> readout = eqx.nn.Linear(8, 1000, key=jax.random.key(0))
    >>> features, labels = jnp.ones((4, 16, 8)), jnp.zeros((4, 16), int)
    >>> loss, gradient = jax.value_and_grad(cross_entropy)(features, readout, labels)
    >>> loss.shape, gradient.shape
    ((), (4, 16, 8))
    """
    weights = _weights_of(readout)
    features, labels = jnp.asarray(features), jnp.asarray(labels)
    num_classes, size = weights[0].shape
    if features.shape != (*labels.shape, size):
        raise ValueError(
            f"cross_entropy expected features of shape (..., {size}), to match the readout, and "
            f"labels of shape (...); got shapes {features.shape} and {labels.shape}."
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            f"cross_entropy expected integer labels, from 0 to {num_classes - 1}; got dtype "
            f"{labels.dtype}. For labels -1 and 1, pass `(labels > 0).astype(int)`."
        )
    label_smoothing = real_number(label_smoothing, "label_smoothing")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be from 0 to 1, got {label_smoothing}.")
    counts = _is_counted(labels.ravel(), ignore_index)
    # A narrow dtype, such as int8, may be unable to represent all classes.
    labels = labels.ravel().astype(jnp.int64 if labels.dtype.itemsize == 8 else jnp.int32)
    is_class = (labels >= 0) & (labels < num_classes)
    # A label that is not a class is a mistake, so it makes the loss NaN.
    factors = jnp.where(counts, jnp.where(is_class, 1.0, jnp.nan), 0.0)
    factors = factors.astype(at_least_float32(jnp.result_type(features, *weights)))
    arrays = (features.reshape(-1, size), labels, factors, *weights)
    z_loss = real_number(z_loss, "z_loss")
    total = _bind(arrays, smoothing=label_smoothing, z_loss=z_loss, num_groups=1)
    return total[0] / jnp.maximum(counts.sum(), 1).astype(total.dtype)


def _is_counted(labels: Array, ignore_index: Any) -> Array:
    """Returns `True` for each token whose label is not `ignore_index`."""
    number = integer(ignore_index)
    if number is not None:
        range_ = jnp.iinfo(labels.dtype)
        is_possible = range_.min <= number <= range_.max
    elif ignore_index is None:
        is_possible = False
    elif is_array(ignore_index) and jnp.issubdtype(ignore_index.dtype, jnp.integer):
        number, is_possible = ignore_index.astype(labels.dtype), True
    else:
        raise TypeError(f"cross_entropy: ignore_index must be an integer, got {ignore_index!r}.")
    return labels != number if is_possible else jnp.ones(labels.shape, bool)


def _weights_of(readout: Any) -> list[Array]:
    """The weight of a readout, and its bias if it has one."""
    weight = readout if is_array(readout) else getattr(readout, "weight", None)
    if not is_array(weight) or getattr(weight, "ndim", None) != 2:
        raise TypeError(
            "cross_entropy expected the readout to be a Linear, an Embedding, or an array of shape "
            f"(V, D); got {describe_node(readout)}"
            + (f" with a weight {describe_node(weight)}." if weight is not readout else ".")
        )
    bias = getattr(readout, "bias", None)
    return [jnp.asarray(each) for each in (weight, bias) if each is not None]


# --- One chunk: its logits, and the losses of its tokens ---


def _logits(x: Array, weight: Array, *bias: Array) -> Array:
    product = _product(x, weight, (1, 1))
    return product + bias[0].astype(product.dtype)[None] if bias else product


def _product(a: Array, b: Array, axes: tuple[int, int], like: Array | None = None) -> Array:
    """Contracts one axis of `a` with one axis of `b`. The result has at least float32 and the
    explicit sharding of `like`.
    """
    dtype = jnp.result_type(a, b)
    return jax.lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        (((axes[0],), (axes[1],)), ((), ())),
        preferred_element_type=at_least_float32(dtype),
        out_sharding=None if like is None else _explicit_sharding(like),
    )


def _explicit_sharding(array: Array) -> Any:
    """The sharding of an array on a mesh with explicit axes, otherwise `None`."""
    sharding = jax.typeof(array).sharding
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None


def _losses(logits: Array, labels: Array, *, smoothing: float, z_loss: float) -> Array:
    # Selects the logit of the label by a comparison and not by an index, so that the axis of the
    # vocabulary may be sharded.
    is_label = jnp.arange(logits.shape[1], dtype=labels.dtype)[None] == labels[:, None]
    log_total = jax.nn.logsumexp(logits, axis=1)
    target = jnp.where(is_label, logits, 0).sum(1)
    if smoothing:
        target = (1 - smoothing) * target + smoothing * logits.mean(1)
    losses = log_total - target
    return losses + z_loss * log_total**2 if z_loss else losses


# --- All chunks ---


def _split_chunks(num_classes: int, *arrays: Array) -> list[Array]:
    """Splits arrays of B rows into chunks, shape (number of chunks, C, ...), padded with zeros.

    Each chunk takes rows at regular intervals. If the rows are sharded, every device therefore
    works on every chunk.
    """
    num_tokens = arrays[0].shape[0]
    number = 1
    if isinstance(num_tokens, int):  # Otherwise a symbolic size of `jax.export`.
        size = max(num_tokens * num_classes, 1)
        target_size = min(max(size / _CHUNKS, _SMALL), _LARGE)
        number = 2 ** max(0, math.ceil(math.log2(size / target_size)))
    if (sharding := _explicit_sharding(arrays[0])) is not None:
        # JAX can split an explicitly sharded axis only within the shard of each device.
        number = math.gcd(number, *sharding.shard_shape(arrays[0].shape)[:1])
    missing = -num_tokens % number

    def split(array: Array) -> Array:
        if missing:
            array = jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1))
        return array.reshape(-1, number, *array.shape[1:]).swapaxes(0, 1)

    return list(map(split, arrays))


def _join_chunks(chunks: Array, num_tokens: int) -> Array:
    """The inverse of `_split_chunks`."""
    return chunks.swapaxes(0, 1).reshape(-1, *chunks.shape[2:])[:num_tokens]


def _sums(
    x: Array, labels: Array, factors: Array, *weights: Array, num_groups: int, **options: float
) -> Array:
    """The sum of losses times factors in each group of tokens, shape (number of groups,).

    If JAX differentiates this function, the backward pass computes the logits of each chunk again.
    """
    # These copies have a wide dtype, in which JAX sums the cotangents of the weights over all
    # chunks.
    wide = [each.astype(factors.dtype) for each in weights]

    @jax.checkpoint
    def step(_: None, chunk: Sequence[Array]) -> tuple[None, Array]:
        x, labels = chunk
        narrow = [each.astype(like.dtype) for each, like in zip(wide, weights, strict=True)]
        return None, _losses(_logits(x, *narrow), labels, **options)

    _, losses = jax.lax.scan(step, None, _split_chunks(len(weights[0]), x, labels))
    return _weighted_sums(_join_chunks(losses, x.shape[0]), factors, num_groups)


def _weighted_sums(losses: Array, factors: Array, num_groups: int) -> Array:
    weighted = jnp.where(factors == 0, 0, losses * factors)
    return weighted.reshape(num_groups, -1).sum(1)


@functools.partial(jax.jit, static_argnames=("moving", "smoothing", "z_loss"), inline=True)
def _sum_and_gradients(
    x: Array, labels: Array, factors: Array, *weights: Array, moving: Any, **options: float
) -> tuple[Array, list[Array]]:
    """Returns the sum of losses times factors, shape (1,), and the gradients of the sum. The sum
    and the gradients are differentiable.

    `moving` has a boolean for `x` and for each weight: whether to compute the gradient.
    """
    needs_x, *needs_weights = moving

    @jax.checkpoint
    def step(sums: list[Array], chunk: Sequence[Array]) -> tuple[list[Array], Any]:
        x, labels, factors = chunk
        logits = _logits(x, *weights)
        losses, pull = jax.vjp(functools.partial(_losses, labels=labels, **options), logits)
        (logits_bar,) = pull(factors)
        narrow = logits_bar.astype(jnp.result_type(x, weights[0]))
        weights_bar = [_product(narrow, x, (0, 0), weights[0])] if needs_weights[0] else []
        weights_bar += [logits_bar.sum(0)] if needs_weights[1:] == [True] else []
        x_bar = _product(narrow, weights[0], (1, 0), x).astype(x.dtype) if needs_x else None
        sums = [total + each for total, each in zip(sums, weights_bar, strict=True)]
        return sums, (losses, x_bar)

    axes = frozenset().union(*map(varying_axes, (x, labels, factors, *weights)))
    zeros = [
        vary(jnp.zeros_like(weight, dtype=factors.dtype), axes)
        for weight, is_one in zip(weights, needs_weights, strict=True)
        if is_one
    ]
    chunks = _split_chunks(len(weights[0]), x, labels, factors)
    weights_bar, (losses, x_bar) = jax.lax.scan(step, zeros, chunks)
    x_bar = [_join_chunks(x_bar, x.shape[0])] if needs_x else []
    return _weighted_sums(_join_chunks(losses, x.shape[0]), factors, 1), [*x_bar, *weights_bar]


# --- The primitive ---

# The loss is a primitive, because `vmap` of a `jax.custom_jvp` would make one gradient of `w` for
# each example.


def _bind(arrays: Sequence[Array], **params: Any) -> Array:
    jaxpr = jax.make_jaxpr(functools.partial(_sums, **params))(*arrays)
    return _primitive.bind(*arrays, jaxpr=jaxpr, **params)


def _jvp(primals: Any, tangents: Any, *, num_groups: int, jaxpr: Any, **options: float) -> Any:
    if num_groups > 1:
        # The gradients depend on the cotangent of each group, which is only known in the backward
        # pass.
        function = functools.partial(_sums, num_groups=num_groups, **options)
        return jvp_of_moving(lambda arrays: function(*arrays), primals, tangents)
    moving = tuple(map(has_tangent, (tangents[0], *tangents[3:])))
    value, gradients = _sum_and_gradients(*primals, moving=moving, **options)
    directions = [each for each in tangents if has_tangent(each)]
    # The products are in the wider dtype, because they may be too large for float16 until they are
    # multiplied by the cotangent. The cotangent may be as small as 1e-4.
    products = (
        jnp.sum(gradient.astype(value.dtype) * direction.astype(value.dtype))
        for gradient, direction in zip(gradients, directions, strict=True)
    )
    return value, sum(products, jnp.zeros_like(value))


def _batch(
    axis: Any, arrays: Any, axes: Any, *, num_groups: int, jaxpr: Any, **options: float
) -> tuple[Array, int]:
    if any(each is not None for each in axes[3:]):
        function = functools.partial(_sums, num_groups=num_groups, **options)
        return jax.vmap(function, axes, axis_size=axis.size)(*arrays), 0

    def flatten(array: Array, axis_of_array: int | None) -> Array:
        if axis_of_array is None:
            array = jnp.broadcast_to(array, (axis.size, *array.shape))
        array = to_front(array, axis_of_array or 0)
        return array.reshape(-1, *array.shape[2:])

    tokens = map(flatten, arrays[:3], axes[:3])
    sums = _bind((*tokens, *arrays[3:]), num_groups=axis.size * num_groups, **options)
    return sums.reshape(axis.size, num_groups), 0


_in_program = jax.jit(_sums, static_argnames=("num_groups", "smoothing", "z_loss"))
_primitive = Primitive("cross_entropy")
_primitive.def_impl(lambda *arrays, jaxpr, **params: _in_program(*arrays, **params))
_primitive.def_abstract_eval(lambda *_, jaxpr, **params: jaxpr.out_avals[0])
mlir.register_lowering(
    _primitive,
    mlir.lower_fun(lambda *arrays, jaxpr, **_: jaxpr_as_fun(jaxpr)(*arrays), multiple_results=True),
)
ad.primitive_jvps[_primitive] = _jvp
set_batching_rule(_primitive, _batch)
