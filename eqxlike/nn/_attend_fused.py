"""Attention by cuDNN's fused kernel, through `jax.nn.dot_product_attention`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array

from ._attend_blocks import Inputs, Kernel, Pattern


def find_unsupported(pattern: Pattern, inputs: Inputs) -> str | None:
    """Returns the reason why cuDNN cannot compute this attention, or `None` if it can.

    One possible reason is that cuDNN is not installed on the machine that traces the program.
    """
    query, key, value = inputs[:3]
    dtypes = sorted({str(each.dtype) for each in (query, key, value)})
    before, after = pattern.window
    if dtypes not in (["bfloat16"], ["float16"]):
        return f"cuDNN needs float16 or bfloat16, but query, key and value have {', '.join(dtypes)}"
    if value.shape[-1] != query.shape[-1]:
        return f"keys have {query.shape[-1]} features, but values have {value.shape[-1]}"
    if inputs.dropout_keys is not None:
        return "it has dropout of attention weights"
    if inputs.bias is not None and inputs.bias.dtype != query.dtype:
        return f"its bias or float mask has dtype {inputs.bias.dtype}, but query has {query.dtype}"
    if pattern.offset != 0:
        return f"the query offset is {'an array' if pattern.offset is None else pattern.offset}"
    if (before, after) != (None, None) and not pattern.is_causal:
        return "it has a window that is not causal"
    if before is not None and len(query) > len(key):
        return "it has a window and more queries than keys"
    probe = jax.tree_util.tree_map(
        lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype), inputs
    )
    try:
        outputs = jax.eval_shape(functools.partial(_output, pattern), probe)
        jax.eval_shape(functools.partial(_cotangents, pattern), probe, outputs, outputs)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return f"JAX says: {error}"
    return None


def fused(platform: str | None) -> Kernel:
    return Kernel(platform, _output, _cotangents)


def _output(pattern: Pattern, inputs: Inputs) -> list[Array]:
    static, arguments, has_no_key = _prepare(pattern, inputs)
    output, log_sums = _forward(static)(*arguments)
    output, log_sums = output[0], log_sums[0]
    if has_no_key is not None:
        mean = inputs.value.astype(log_sums.dtype).mean(0).astype(output.dtype)
        mean = jnp.repeat(mean, output.shape[1] // mean.shape[0], axis=0)
        output = jnp.where(has_no_key.T[..., None], mean[None], output)
        log_sums = jnp.where(has_no_key, jnp.finfo(log_sums.dtype).max, log_sums)
    return [output, log_sums]


def _cotangents(
    pattern: Pattern, inputs: Inputs, outputs: list[Array], cotangents: list[Array]
) -> list[Array]:
    static, arguments, has_no_key = _prepare(pattern, inputs)
    (output, log_sums), cotangent = outputs, cotangents[0]
    mean_bar = None
    if has_no_key is not None:
        # The output of a query without any key is the mean of all values.
        rows_without_key = has_no_key.T[..., None]
        mean_bar = jnp.where(rows_without_key, cotangent, 0).astype(log_sums.dtype).sum(0)
        mean_bar = mean_bar.reshape(inputs.value.shape[1], -1, mean_bar.shape[-1]).sum(1)
        cotangent = jnp.where(rows_without_key, 0, cotangent)
    results = _backward(static)(*arguments, output[None], log_sums[None], cotangent[None])
    query_bar, key_bar, value_bar = (each[0] for each in results)
    if mean_bar is not None:
        value_bar += (mean_bar / len(inputs.value)).astype(value_bar.dtype)[None]
    return [query_bar, key_bar, value_bar]


Static = tuple[float, bool, int | None]
"""`(scale, is_causal, before)`, where `before` is the window's number of keys before the query."""


def _prepare(pattern: Pattern, inputs: Inputs) -> tuple[Static, list[Any], Array | None]:
    """Returns the static arguments, the array arguments, and a mask of the queries without any key
    (axes `heads q_seq`; `None` if every query has a key).
    """
    before = pattern.window[0]
    mask, bias, length = inputs.mask, inputs.bias, inputs.key_length
    num_queries, num_keys = len(inputs.query), len(inputs.key)
    if bias is not None:
        # cuDNN returns NaN for a query whose scores are all `-inf`.
        has_score = ~(bias <= jnp.finfo(bias.dtype).min)
        bias = jnp.where(has_score, bias, 0)
        mask = has_score if mask is None else mask & has_score
        bias = jnp.broadcast_to(bias, (len(bias), num_queries, num_keys))[None]
    if mask is None and inputs.query_segments is None:
        has_no_key = None
        if length is not None:
            has_no_key = jnp.broadcast_to(length <= 0, (1, num_queries))
            length = jnp.maximum(length, 1)[None].astype(jnp.int32)
        static = (pattern.scale, pattern.is_causal, before)
    else:
        allowed = pattern.allowed(inputs)
        if allowed is not None:
            mask = allowed[None] if mask is None else mask & allowed[None]
        assert mask is not None
        mask = jnp.broadcast_to(mask, (len(mask), num_queries, num_keys))
        has_no_key = ~mask.any(-1)
        mask, length, static = mask[None], None, (pattern.scale, False, None)
    arrays = [each[None] for each in inputs[:3]]
    return static, [*arrays, bias, mask, length], has_no_key


def _attention(
    static: Static, bias: Array | None, mask: Array | None, length: Array | None
) -> Callable[..., Array]:
    scale, is_causal, before = static
    return functools.partial(
        jax.nn.dot_product_attention,
        scale=scale,
        is_causal=is_causal,
        local_window_size=None if before is None else (before, 0),
        bias=bias,
        mask=mask,
        key_value_seq_lengths=length,
        implementation="cudnn",
    )


@functools.cache
def _forward(static: Static) -> Callable[..., list[Array]]:
    """Returns a function from batched arrays to the output and the log-sum-exp."""

    def forward(query: Array, key: Array, value: Array, *others: Any) -> list[Array]:
        output, pull = jax.vjp(_attention(static, *others), query, key, value)
        sums = [each for each in jax.tree_util.tree_leaves(pull) if _is_log_sums(each, query)]
        return [output, sums[0]]

    return _with_merged_batches(forward)


@functools.cache
def _backward(static: Static) -> Callable[..., list[Array]]:
    """Returns a function from batched arrays to the cotangents of query, key and value."""

    def backward(
        query: Array,
        key: Array,
        value: Array,
        bias: Any,
        mask: Any,
        length: Any,
        output: Array,
        log_sums: Array,
        cotangent: Array,
    ) -> list[Array]:
        recomputed, pull = jax.vjp(_attention(static, bias, mask, length), query, key, value)
        leaves, treedef = jax.tree_util.tree_flatten(pull)
        # The backward pass needs residuals of a forward pass. These lines replace the residuals by
        # the saved output and log-sum-exp. Nothing then depends on the second forward pass, so XLA
        # removes it.
        leaves = [
            output if each is recomputed else log_sums if _is_log_sums(each, query) else each
            for each in leaves
        ]
        return list(treedef.unflatten(leaves)(cotangent))

    return _with_merged_batches(backward)


def _is_log_sums(array: Array, query: Array) -> bool:
    batch, length, heads, _ = query.shape
    return array.shape == (batch, heads, length) and array.dtype == jnp.float32


def _with_merged_batches(function: Callable[..., list[Array]]) -> Callable[..., list[Array]]:
    """Adds a `vmap` rule to `function`. The rule merges the mapped axis into the batch axis.

    JAX's own rule for the kernel copies the whole mask or bias for each head.
    """
    mapped = custom_vmap(function)

    @mapped.def_vmap
    def _map(size: int, is_batched: list[Any], *args: Any) -> tuple[Any, Any]:
        batch, shared = args[0].shape[1 if is_batched[0] else 0], [id(each) for each in args[3:5]]

        def merge(array: Any, is_batched: Any) -> Any:
            if array is None or (id(array) in shared and len(array) == 1 and not is_batched):
                return array
            if not is_batched:
                array = jnp.broadcast_to(array, (size, *array.shape))
            return array.reshape(-1, *array.shape[2:])

        results = mapped(*map(merge, args, is_batched))
        split = [each.reshape(size, batch, *each.shape[1:]) for each in results]
        sharding = jax.typeof(args[is_batched.index(True)]).sharding
        if any(sharding.spec[:1]):
            # The kernel returns arrays without explicit sharding.
            split = [
                jax.sharding.reshard(
                    each, jax.sharding.NamedSharding(sharding.mesh, jax.P(sharding.spec[0]))
                )
                for each in split
            ]
        return split, [True] * len(split)

    return mapped
