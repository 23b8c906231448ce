"""`dot_product_attention`: its arguments, the choice of the implementation, and cuDNN's kernel."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from .._check_numbers import whole_number
from .._compat import vary, varying_axes
from .._dtypes import at_least_float32
from .._pytree import describe_node, is_array_like
from ._attend_blocks import Inputs, Kernel, Pattern, Plan, attend
from ._inputs import check_input

Implementation = Literal["auto", "plain", "blocks", "cudnn"]

_LEAST_SCORES = 128 * 128
"""On a CPU, `"auto"` uses `"blocks"` from this number of scores. Below it, `"plain"` is faster."""

_LEAST_SCORES_ELSEWHERE = 2048 * 2048
"""On other platforms, `"auto"` uses `"blocks"` from this number of scores. Each block launches
several kernels, so blocks are faster only for long sequences.
"""

_ROWS, _ROWS_ELSEWHERE = 128, 256
"""Number of queries in a block: on a CPU, and on other platforms.

On a CPU, blocks of 64 queries are faster for short sequences with a causal mask or a window,
because small blocks skip more keys. From a length of 512, blocks of 128 queries are faster, and
keep both cores of a two-core CPU busy.
"""


def dot_product_attention(
    query: Float[Array, "q_seq heads size"],
    key: Float[Array, "kv_seq kv_heads size"],
    value: Float[Array, "kv_seq kv_heads value_size"],
    mask: Shaped[Array, "#heads q_seq kv_seq"] | Literal["causal"] | None = None,
    *,
    bias: Float[Array, "#heads #q_seq #kv_seq"] | None = None,
    is_causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    segment_ids: Int[Array, " seq"]
    | tuple[Int[Array, " q_seq"], Int[Array, " kv_seq"]]
    | None = None,
    key_length: int | Int[Array, ""] | None = None,
    query_offset: int | Int[Array, ""] = 0,
    scale: float | Array | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "q_seq heads value_size"]:
    """Multi-head attention, `softmax(Q K^T * scale + bias) V`, in linear memory.

    Long sequences never build the matrix of all scores: memory grows linearly with the length, in
    the forward and the backward pass. All modes and orders of differentiation are supported. Scores
    and sums are computed in at least float32.

    If all keys of a query are masked, the output for this query is the mean of all values, and the
    gradient with respect to this query is zero.

    >>> import jax.numpy as jnp
    >>> from eqxlike import nn
    >>> query, key, value = jnp.ones((5, 4, 8)), jnp.ones((5, 2, 8)), jnp.ones((5, 2, 8))
    >>> nn.dot_product_attention(query, key, value, is_causal=True).shape
    (5, 4, 8)

    **Arguments:**

    - `query`: shape `(q_seq, heads, size)`. For a batch, use `jax.vmap`.
    - `key`: shape `(kv_seq, kv_heads, size)`. `heads` is a multiple of `kv_heads`; each key head is
      shared by `heads / kv_heads` successive query heads.
    - `value`: shape `(kv_seq, kv_heads, value_size)`.
    - `mask`: shape `(q_seq, kv_seq)`, `(1, q_seq, kv_seq)` or `(heads, q_seq, kv_seq)`. `False`, or
      an integer 0, masks a pair of query and key. A float mask is added to the scores. `"causal"`
      means `is_causal=True`.
    - `bias`: floats that are added to the scores, shape `(heads, q_seq, kv_seq)`; each axis may
      have size 1.
    - `is_causal`: whether to mask the keys after each query's own position.
    - `window`: a pair `(before, after)`. Each query attends to the key at its own position, to at
      most `before` keys before this key, and to at most `after` keys after this key. `None` means
      all keys, and a single integer sets both numbers. With `is_causal`, `after` is 0. Mistral's
      sliding window of 4,096 keys is `is_causal=True, window=4095`.
    - `segment_ids`: integers, shape `(seq,)`; a query attends only to keys with the segment id of
      the query. Use segment ids for several sequences that are packed into one. Pass a pair of
      arrays if queries and keys have different segment ids.
    - `key_length`: number of keys before the padding; later keys are masked.
    - `query_offset`: position of the first query among the keys, for `is_causal` and `window`.
    - `scale`: factor of the scores; `1 / sqrt(size)` if `None`.
    - `implementation`: `"plain"` builds the matrix of all scores. `"blocks"` computes the scores in
      blocks of queries. `"cudnn"` is the fused kernel of NVIDIA's cuDNN, for float16 and bfloat16;
      a bias must have the dtype of the queries. `"auto"` uses cuDNN if the program is compiled for
      an NVIDIA GPU and cuDNN supports the attention; otherwise `"blocks"` for long sequences and
      `"plain"` for short ones.

    **Returns:** shape `(q_seq, heads, value_size)`.

    **Raises:**

    - `ValueError` if a shape is wrong.
    - `ValueError` if the implementation does not support the attention.
    - `TypeError` if a dtype is wrong.
    """
    what = "dot_product_attention"
    query, key, value = map(jnp.asarray, (query, key, value))
    for name, each in {"query": query, "key": key, "value": value}.items():
        check_input(what, each, ("sequence", "heads", "size"), name)
    (_, heads, size), (num_keys, kv_heads, key_size) = query.shape, key.shape
    fits = key_size == size and value.shape[:2] == key.shape[:2]
    if not fits or not heads or not kv_heads or heads % kv_heads:
        raise ValueError(
            f"{what} expected query (q_seq, heads, size), key (kv_seq, kv_heads, size) and value "
            "(kv_seq, kv_heads, value_size), with heads a multiple of kv_heads; got query "
            f"{query.shape}, key {key.shape} and value {value.shape}."
        )
    if num_keys == 0 or size == 0:
        raise ValueError(
            f"{what} expected at least one key with at least one feature, got key of shape "
            f"{key.shape}: a softmax over no keys is undefined."
        )
    return attend_with(
        implementation,
        *read_attention(
            lambda: what,
            (query, key, value),
            mask,
            bias=bias,
            is_causal=is_causal,
            window=window,
            segment_ids=segment_ids,
            key_length=key_length,
            query_offset=query_offset,
            scale=scale,
        ),
    )


def attend_with(
    implementation: Implementation,
    pattern: Pattern,
    inputs: Inputs,
    dropout: "WeightDropout | None" = None,
) -> Float[Array, "q_seq heads value_size"]:
    """The output of the attention, computed by `implementation`."""
    check_implementation(implementation)
    sizes, reason = (*inputs.query.shape, *inputs.key.shape), None
    if not all(isinstance(size, int) for size in sizes):
        reason = f"needs static lengths; got query {sizes[:3]} and key {sizes[3:]}"
    elif dropout is not None and dropout.keys is None:
        reason = (
            "does not support this dropout of attention weights, except in inference mode. "
            '"blocks" supports `nn.Dropout` with a number p, a Threefry key, and jax_enable_x64 off'
        )
    if reason is not None and implementation not in ("auto", "plain"):
        raise ValueError(f'implementation="{implementation}" {reason}. Use "auto" or "plain".')
    if reason is not None or sizes[0] == 0:  # A query of no rows has no scores.
        implementation = "plain"
    # Inside `shard_map`, inputs may vary over fewer mesh axes than the output. This cast makes all
    # inputs vary over all these axes. The transpose of the cast sums the cotangents of the inputs.
    axes = frozenset().union(*(varying_axes(each) for each in inputs if each is not None))
    inputs = jax.tree_util.tree_map(lambda each: vary(each, axes), inputs)
    if implementation == "plain":
        return _attend_plainly(pattern, inputs, dropout)
    if dropout is not None and dropout.keys is not None:
        pattern = dataclasses.replace(pattern, dropout_p=dropout.p)
        inputs = inputs._replace(dropout_keys=vary(jr.key_data(dropout.keys), axes))
    on_cpu = jax.default_backend() == "cpu"
    rows = _ROWS if on_cpu else _ROWS_ELSEWHERE
    if on_cpu and sizes[0] < 512 and pattern.bounds() != (None, None):
        rows = 64
    plan = Plan(pattern, rows)
    if implementation != "blocks":
        least = _LEAST_SCORES if on_cpu else _LEAST_SCORES_ELSEWHERE
        reason = find_unsupported(pattern, inputs)
        if reason is None:
            platform = "cuda" if implementation == "auto" else None
            plan = plan._replace(kernel=Kernel(platform, _output, _cotangents))
        elif implementation == "cudnn":
            raise ValueError(
                f'implementation="cudnn" does not support this attention: {reason}. '
                'Use "auto" to select a supported implementation.'
            )
        elif sizes[0] * sizes[3] < least:
            return _attend_plainly(pattern, inputs, dropout)
    return attend(plan, inputs)[0]


class WeightDropout(NamedTuple):
    """Dropout of attention weights.

    - `drop`: function that applies dropout to the array of all weights, axes `heads q_seq kv_seq`.
    - `p`: the probability of dropping a weight.
    - `keys`: one Threefry key for each head, with which `implementation="blocks"` reproduces the
      result of `drop`. `None` if `"blocks"` cannot reproduce this result.
    """

    drop: Callable[[Array], Array]
    p: Any
    keys: PRNGKeyArray | None


def check_implementation(implementation: Any) -> None:
    """Raises `ValueError` for an unknown implementation."""
    if implementation not in (names := get_args(Implementation)):
        raise ValueError(f"implementation must be one of {names}, got {implementation!r}.")


def _attend_plainly(
    pattern: Pattern, inputs: Inputs, dropout: WeightDropout | None
) -> Float[Array, "q_seq heads value_size"]:
    query, key, value, bias = inputs[:4]
    dtype = at_least_float32(query.dtype)
    (num_queries, heads, size), (num_keys, kv_heads, _) = query.shape, key.shape
    if heads == kv_heads:
        # XLA compiles this product faster than the product with an axis of size 1 for the groups.
        scores = jnp.einsum("qhd,khd->hqk", query, key, preferred_element_type=dtype)
    else:
        # One matrix product for each key head, for all query heads that share this key head.
        query = query.reshape(num_queries, kv_heads, heads // kv_heads, size)
        scores = jnp.einsum("qhgd,khd->hgqk", query, key, preferred_element_type=dtype)
        scores = scores.reshape(heads, num_queries, num_keys)
    scores = scores * pattern.scale
    least = jnp.finfo(dtype).min
    if bias is not None:
        biased = scores + bias.astype(dtype)
        # If all scores of a query are `-inf`, this line makes the weights of the query equal, as
        # for a boolean mask. Without this line the weights would be NaN.
        scores = jnp.where(biased <= least, least, biased)
    allowed = pattern.allowed(inputs)
    for mask in (allowed if allowed is None else allowed[None], inputs.mask):
        scores = scores if mask is None else jnp.where(mask, scores, least)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    if dropout is not None:
        # A query without any key has the mean of all values as its output, without dropout.
        attends = scores.max(-1, keepdims=True) != least
        weights = jnp.where(attends, dropout.drop(weights), weights)
    if heads == kv_heads:
        return jnp.einsum("hqk,khd->qhd", weights, value)
    weights = weights.reshape(kv_heads, heads // kv_heads, num_queries, num_keys)
    output = jnp.einsum("hgqk,khd->qhgd", weights, value)
    return output.reshape(num_queries, heads, value.shape[-1])


# --- Arguments ---


def read_attention(
    what: Callable[[], str],
    heads: tuple[Array, Array, Array],
    mask: Any = None,
    *,
    bias: Any = None,
    is_causal: bool = False,
    window: Any = None,
    segment_ids: Any = None,
    key_length: Any = None,
    query_offset: Any = 0,
    scale: float | Array | None = None,
) -> tuple[Pattern, Inputs]:
    """Checks the arguments of an attention. `what` returns the name of the caller for errors."""
    query, key, value = heads
    for name, each in {"query": query, "key": key, "value": value}.items():
        if not jnp.issubdtype(each.dtype, jnp.floating):
            raise TypeError(f"{what()} expected {name} of floats, got dtype {each.dtype}.")
    if isinstance(mask, str):
        if mask != "causal":
            raise ValueError(f'{what()} expected mask to be an array or "causal", got {mask!r}.')
        mask, is_causal = None, True
    shape = (query.shape[1], query.shape[0], key.shape[0])
    mask, bias = _read_mask(what, mask, shape), _read_bias(what, bias, shape)
    if mask is not None and jnp.issubdtype(mask.dtype, jnp.floating):
        mask, bias = None, mask if bias is None else bias + mask.astype(bias.dtype)
    if isinstance(scale, jax.Array):
        # A scale that is an array may be traced or trained, so it cannot be a static property of
        # the pattern.
        query, scale = query * scale.astype(query.dtype), 1.0
    is_static = isinstance(query_offset, int | np.integer)
    pattern = Pattern(
        scale=1 / math.sqrt(query.shape[-1]) if scale is None else float(scale),
        is_causal=bool(is_causal),
        window=read_window(what, window),
        offset=int(query_offset) if is_static else None,
    )
    return pattern, Inputs(
        query,
        key,
        value,
        bias,
        None if mask is None else mask.astype(bool),
        *_read_segments(what, segment_ids, shape[1:]),
        None if key_length is None else _integer(what, "key_length", key_length),
        None if is_static else _integer(what, "query_offset", query_offset),
    )


def read_window(what: Callable[[], str], window: Any) -> tuple[int | None, int | None]:
    """The number of keys in the window before and after a query; `None` for all keys."""
    if window is None:
        return None, None
    pair = window if isinstance(window, tuple | list) else (window, window)
    if len(pair) != 2:
        raise ValueError(f"{what()} expected window to be an integer or a pair, got {window!r}.")
    before, after = (
        None if each is None else whole_number(each, "window", least=0) for each in pair
    )
    return before, after


def _read_mask(what: Callable[[], str], mask: Any, shape: tuple[int, int, int]) -> Array | None:
    if mask is None:
        return None
    if not (is_array_like(mask) or isinstance(mask, list | tuple)):
        raise TypeError(f"{what()} expected mask to be an array, got {describe_node(mask)}.")
    mask = jnp.asarray(mask)
    if mask.shape not in (shape, (1, *shape[1:]), shape[1:]):
        hint = " For a batch, use `jax.vmap` or `eqxlike.filter_vmap`." if mask.ndim > 3 else ""
        raise ValueError(
            f"{what()} expected mask of shape {shape[1:]}, {(1, *shape[1:])} or {shape} (heads, "
            f"queries, keys), got shape {mask.shape}.{hint}"
        )
    if jnp.issubdtype(mask.dtype, jnp.complexfloating):
        raise TypeError(
            f"{what()} expected a mask of booleans, integers or floats, got an array of dtype "
            f"{mask.dtype}."
        )
    return mask.reshape(-1, *shape[1:])


def _read_bias(what: Callable[[], str], bias: Any, shape: tuple[int, int, int]) -> Array | None:
    if bias is None:
        return None
    bias = jnp.asarray(bias)
    sizes = (1, *bias.shape) if bias.ndim == 2 else bias.shape
    if len(sizes) != 3 or any(got not in (1, size) for got, size in zip(sizes, shape, strict=True)):
        raise ValueError(
            f"{what()} expected bias of shape {shape} (heads, queries, keys), where each size may "
            f"be 1, got shape {bias.shape}."
        )
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(f"{what()} expected a bias of floats, got dtype {bias.dtype}.")
    return bias.reshape(sizes)


def _read_segments(
    what: Callable[[], str], segment_ids: Any, lengths: tuple[int, ...]
) -> tuple[Array | None, Array | None]:
    if segment_ids is None:
        return None, None
    is_pair = isinstance(segment_ids, tuple) and len(segment_ids) == 2
    pair = segment_ids if is_pair else (segment_ids, segment_ids)
    query_segments, key_segments = map(jnp.asarray, pair)
    for each, length in zip((query_segments, key_segments), lengths, strict=True):
        if each.shape != (length,) or not jnp.issubdtype(each.dtype, jnp.integer):
            raise ValueError(
                f"{what()} expected segment_ids of integers and shape ({length},), got dtype "
                f"{each.dtype} and shape {each.shape}. If there are {lengths[0]} queries and "
                f"{lengths[1]} keys, pass a pair of arrays."
            )
    return query_segments, key_segments


def _integer(what: Callable[[], str], name: str, number: Any) -> Array:
    number = jnp.asarray(number)
    if number.shape != () or not jnp.issubdtype(number.dtype, jnp.integer):
        raise ValueError(
            f"{what()} expected {name} to be an integer or an integer array of shape (), got dtype "
            f"{number.dtype} and shape {number.shape}."
        )
    return number.astype(jnp.int32)


# --- Attention by cuDNN's fused kernel, through `jax.nn.dot_product_attention` ---


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
    """Returns a function from batched arrays to the cotangents of query, key and value.

    After the arguments of `_forward`, it takes the output, the log-sum-exp and the cotangent.
    """

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
