"""Exact attention in blocks of queries, in memory that grows linearly with the length.

Rabe & Staats (2021), "Self-attention Does Not Need O(n^2) Memory"; Dao, Fu, Ermon, Rudra & Ré
(2022), "FlashAttention: Fast and Memory-Efficient Exact Attention".

There are three passes: for the output, for the tangents and for the cotangents. Each pass loops
over blocks of queries, and recomputes the scores of one block at a time. With a causal mask or a
window, a block visits only the span of keys that its queries may attend to.

Letters in the names of axes:

- `n`: blocks.
- `h`: heads of keys and values.
- `g`: query heads that share one key head.
- `r`: queries of a block, for all `g` heads that share a key head.
- `c`: keys.
- `d`: features of queries and keys.
- `v`: features of values.

`x_dot` is the tangent of `x`, and `x_bar` is its cotangent.

Scores have the axes `h c r`. With the axis of keys before the axis of queries, no matrix product
needs a transpose of the scores. On a CPU this transpose takes longer than the product.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from .._compat import vary, varying_axes
from .._dtypes import at_least_float32
from .._transforms._derivatives._linear_call import (
    batch_first,
    has_tangent,
    instantiate,
    linear_call,
)
from ._parameters import threefry

_GROUPS = 4
"""Causal attention divides its blocks into this many groups, each with its own span of keys. Four
groups compute 5/8 of all scores. More groups compute fewer scores, but each group adds a loop that
XLA must compile.
"""


@dataclasses.dataclass(frozen=True)
class Pattern:
    """The static properties of an attention.

    - `scale`: factor of the scores.
    - `is_causal`: whether the keys after position `i + offset` are masked for query `i`.
    - `window`: a pair `(before, after)`. Query `i` attends to at most `before` keys before position
      `i + offset`, and to at most `after` keys after this position. `None` in place of a number
      means no limit.
    - `offset`: position of the first query among the keys; `None` if the array `Inputs.offset`
      holds this position.
    - `dropout_p`: probability of dropping a weight; unused if `Inputs.dropout_keys` is `None`.
    """

    scale: float
    is_causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    offset: int | None = 0
    dropout_p: float = 0.0

    def bounds(self) -> tuple[int | None, int | None]:
        """The first and last key that query 0 attends to. Each is `None` if there is no limit.

        Query 0 has the position `offset`, or 0 if `offset` is `None`. Both results are clipped to
        [-2**30, 2**30], so that sums with indices do not overflow.
        """
        before, after = self.window
        if self.is_causal:
            after = 0
        offset, most = self.offset or 0, 2**30
        first = None if before is None else max(-most, min(offset - before, most))
        last = None if after is None else max(-most, min(offset + after, most))
        return first, last

    def allowed(self, inputs: "Inputs", rows: Any = None, columns: Any = None) -> Array | None:
        """A boolean array: whether each query in `rows` may attend to each key in `columns`. `None`
        if every query may attend to every key.

        `rows` and `columns` are index arrays with two axes that broadcast. By default they contain
        all queries and all keys. The result does not include `inputs.mask`.
        """
        if rows is None:
            rows = jnp.arange(inputs.query.shape[0], dtype=jnp.int32)[:, None]
            columns = jnp.arange(inputs.key.shape[0], dtype=jnp.int32)[None]
        (first, last), parts = self.bounds(), []
        positions = rows if self.offset is not None else rows + inputs.offset
        if first is not None:
            parts.append(columns >= positions + first)
        if last is not None:
            parts.append(columns <= positions + last)
        if inputs.key_length is not None:
            parts.append(columns < inputs.key_length)
        if inputs.query_segments is not None and inputs.key_segments is not None:
            parts.append(
                _clipped(inputs.query_segments, rows) == _clipped(inputs.key_segments, columns)
            )
        return functools.reduce(jnp.logical_and, parts) if parts else None


class Inputs(NamedTuple):
    """The arrays of an attention. The first four are differentiable."""

    query: Float[Array, "q_seq heads size"]
    key: Float[Array, "kv_seq kv_heads size"]
    value: Float[Array, "kv_seq kv_heads value_size"]
    bias: Float[Array, "#heads #q_seq #kv_seq"] | None = None
    mask: Bool[Array, "#heads #q_seq #kv_seq"] | None = None
    query_segments: Int[Array, " q_seq"] | None = None
    key_segments: Int[Array, " kv_seq"] | None = None
    key_length: Int[Array, ""] | None = None
    offset: Int[Array, ""] | None = None
    dropout_keys: UInt32[Array, "heads 2"] | None = None


class Kernel(NamedTuple):
    """A kernel that replaces two of the three passes on one platform.

    - `platform`: the platform; `None` for all platforms.
    - `output`: `output(pattern, inputs)` returns the output, axes `q_seq heads value_size`, and the
      log-sum-exp of each query's scores, axes `heads q_seq`, as `attend` does.
    - `cotangents`: `cotangents(pattern, inputs, outputs, cotangents)` returns the cotangents of
      query, key and value.
    """

    platform: str | None
    output: Callable[..., list[Array]]
    cotangents: Callable[..., list[Array]]


class Plan(NamedTuple):
    """How to compute an attention.

    - `rows`: number of queries in a block.
    - `kernel`: a kernel that replaces the computation in blocks on its platform. It is not used if
      the bias is differentiated.
    """

    pattern: Pattern
    rows: int
    kernel: Kernel | None = None

    def run(self, name: str, in_blocks: Callable[..., Any], *args: Any) -> Any:
        """Runs one of the three passes, called `name`, on `args`.

        On the platform of the kernel, the kernel runs it. On other platforms, `in_blocks` runs it.
        """
        if self.kernel is None:
            return in_blocks(*args)
        kernel = functools.partial(getattr(self.kernel, name), self.pattern)
        if self.kernel.platform is None:
            return kernel(*args)
        # A program for a single platform contains only the branch of that platform.
        return lax.platform_dependent(*args, default=in_blocks, **{self.kernel.platform: kernel})


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
@batch_first
def attend(plan: Plan, inputs: Inputs) -> list[Array]:
    """The output of all heads, differentiable in every mode and to every order.

    A query without any key has the mean of all values as its output.

    **Returns:** the output, axes `q_seq heads value_size`, and the log-sum-exp of each query's
    scores, axes `heads q_seq`.
    """
    return plan.run("output", functools.partial(_run_output, plan), inputs)


@functools.partial(attend.defjvp, symbolic_zeros=True)
@batch_first
def _differentiate(plan: Plan, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (inputs,), (input_dots,) = primals, tangents
    outputs = attend(plan, inputs)
    moving = [i for i in range(4) if input_dots[i] is not None and has_tangent(input_dots[i])]
    arrays, treedef = jax.tree_util.tree_flatten((inputs, outputs))

    def forward(residuals: list[Array], tangents: list[Array]) -> list[Array]:
        inputs, outputs = treedef.unflatten(residuals)
        input_dots = dict(zip(moving, tangents, strict=True))
        return _run_tangents(plan, inputs, _outputs_in_blocks(plan, inputs, outputs), input_dots)

    def transpose(
        residuals: list[Array], cotangents: list[Array], is_shared: tuple[bool, ...]
    ) -> list[Array]:
        inputs, outputs = treedef.unflatten(residuals)
        if Inputs._fields.index("bias") in moving:
            results = _run_cotangents(plan, True, inputs, outputs, cotangents)
        else:
            results = _cotangents(plan, inputs, outputs, cotangents)
        return [results[i] for i in moving]

    directions = [instantiate(input_dots[i]) for i in moving]
    return outputs, linear_call(forward, transpose, arrays, directions, outputs)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
@batch_first
def _cotangents(
    plan: Plan, inputs: Inputs, outputs: list[Array], cotangents: list[Array]
) -> list[Array]:
    """The cotangents of query, key and value."""
    in_blocks = functools.partial(_cotangents_in_blocks, plan)
    return plan.run("cotangents", in_blocks, inputs, outputs, cotangents)


@_cotangents.defjvp
@batch_first
def _differentiate_cotangents(plan: Plan, primals: Any, tangents: Any) -> tuple[Any, Any]:
    _, dots = jax.jvp(functools.partial(_cotangents_in_blocks, plan), primals, tangents)
    return _cotangents(plan, *primals), dots


def _cotangents_in_blocks(
    plan: Plan, inputs: Inputs, outputs: list[Array], cotangents: list[Array]
) -> list[Array]:
    outputs = _outputs_in_blocks(plan, inputs, outputs)
    return _run_cotangents(plan, False, inputs, outputs, cotangents)


def _outputs_in_blocks(plan: Plan, inputs: Inputs, outputs: list[Array]) -> list[Array]:
    """Returns outputs that were computed in blocks, not by a kernel.

    If a kernel may have computed `outputs`, computes them again in blocks. Second derivatives need
    the cotangents of the log-sum-exp, which a kernel ignores.
    """
    return outputs if plan.kernel is None else attend(plan._replace(kernel=None), inputs)


# --- The three passes. Each pass is traced once for all layers with the same sizes ---


@functools.partial(jax.jit, static_argnums=0)
def _run_output(plan: Plan, inputs: Inputs) -> list[Array]:
    blocks = _Blocks(plan, inputs)

    def visit(carry: None, tile: Any, rows: Any, columns: Any) -> Any:
        (query,), (key, value) = rows, columns
        scores = blocks.scores(tile, query, key)
        highest = scores.max(1)
        weights = jnp.exp(scores - highest[:, None])
        sums = weights.sum(1)
        # If `highest` is NaN, `attends` is `True`, so that NaN propagates to the output.
        attends = highest != blocks.least
        kept = blocks.dropped(tile, weights)
        output = _dot("hvc,hcr->hvr", value, kept) / sums[:, None]
        output = jnp.where(attends[:, None], output, blocks.mean_of(inputs.value))
        # For a query without any key, `log_sum` is `most`, a number so large that `exp(score -
        # log_sum)` is 0 for every score.
        log_sums = jnp.where(attends, highest + jnp.log(sums), blocks.most)
        return carry, (output, log_sums)

    rows, columns = [blocks.cut(inputs.query)], [_to_hcd(inputs.key), _to_hdc(inputs.value)]
    _, (output, log_sums) = blocks.run(visit, None, rows, columns)
    return [blocks.join(output).astype(inputs.value.dtype), blocks.join_rows(log_sums)]


@functools.partial(jax.jit, static_argnums=0)
def _run_tangents(
    plan: Plan, inputs: Inputs, outputs: list[Array], input_dots: dict[int, Array]
) -> list[Array]:
    blocks, pattern = _Blocks(plan, inputs), plan.pattern
    output, log_sums = outputs
    query_dot, key_dot, value_dot, bias_dot = map(input_dots.get, range(4))
    bias_dot = blocks.padded(bias_dot)
    mean_dot: Any = None if value_dot is None else blocks.mean_of(value_dot)

    def visit(carry: None, tile: Any, rows: Any, columns: Any) -> Any:
        query, query_dot, output, log_sums = rows
        key, value, key_dot, value_dot = columns
        weights = jnp.exp(blocks.scores(tile, query, key) - log_sums[:, None])
        scores_dot = jnp.zeros_like(weights)
        if query_dot is not None:
            scores_dot += _dot("hcd,hrd->hcr", key, query_dot) * pattern.scale
        if key_dot is not None:
            scores_dot += _dot("hcd,hrd->hcr", key_dot, query) * pattern.scale
        if bias_dot is not None:
            scores_dot += blocks.select(bias_dot, tile).astype(blocks.dtype)
        weights_dot = weights * scores_dot
        log_sums_dot = weights_dot.sum(1)
        output_dot = _dot("hvc,hcr->hvr", value, blocks.dropped(tile, weights_dot))
        output_dot -= output.swapaxes(1, 2).astype(blocks.dtype) * log_sums_dot[:, None]
        if value_dot is not None:
            output_dot += _dot("hvc,hcr->hvr", value_dot, blocks.dropped(tile, weights))
            attends = log_sums < blocks.most
            output_dot = jnp.where(attends[:, None], output_dot, mean_dot)
        return carry, (output_dot, log_sums_dot)

    rows = [
        blocks.cut(inputs.query),
        blocks.cut(query_dot),
        blocks.cut(output),
        blocks.cut_rows(log_sums),
    ]
    columns = [_to_hcd(inputs.key), _to_hdc(inputs.value), _to_hcd(key_dot), _to_hdc(value_dot)]
    _, (output_dot, log_sums_dot) = blocks.run(visit, None, rows, columns)
    return [blocks.join(output_dot).astype(output.dtype), blocks.join_rows(log_sums_dot)]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_cotangents(
    plan: Plan, with_bias: bool, inputs: Inputs, outputs: list[Array], cotangents: list[Array]
) -> list[Array]:
    blocks, pattern = _Blocks(plan, inputs), plan.pattern
    (output, log_sums), (output_bar, log_sums_bar) = outputs, cotangents
    products = output_bar.astype(blocks.dtype) * output.astype(blocks.dtype)
    shift = log_sums_bar - products.sum(-1).T

    def visit(carry: Any, tile: Any, rows: Any, columns: Any) -> Any:
        query, output_bar, shift, log_sums = rows
        key, value, key_last = columns
        key_bar, value_bar, bias_bar = carry
        weights = jnp.exp(blocks.scores(tile, query, key) - log_sums[:, None])
        weights_bar = blocks.dropped(tile, _dot("hcv,hrv->hcr", value, output_bar))
        scores_bar = weights * (weights_bar + shift[:, None])
        query_bar = _dot("hdc,hcr->hdr", key_last, scores_bar)
        key_bar = tile.add(key_bar, _dot("hcr,hrd->hcd", scores_bar, query))
        kept = blocks.dropped(tile, weights)
        value_bar = tile.add(value_bar, _dot("hcr,hrv->hcv", kept, output_bar))
        if with_bias:
            bias_bar = blocks.add_to(bias_bar, scores_bar, tile)
        return (key_bar, value_bar, bias_bar), query_bar

    rows = [
        blocks.cut(inputs.query),
        blocks.cut(output_bar),
        blocks.cut_rows(shift),
        blocks.cut_rows(log_sums),
    ]
    columns = [_to_hcd(inputs.key), _to_hcd(inputs.value), _to_hdc(inputs.key)]
    start = (
        blocks.zeros(columns[0][0]),
        blocks.zeros(columns[1][0]),
        blocks.zeros(blocks.padded(inputs.bias)) if with_bias else None,
    )
    (key_bar, value_bar, bias_bar), query_bar = blocks.run(visit, start, rows, columns)
    # The output of a query without any key is the mean of all values.
    has_no_key = (log_sums == blocks.most).T[..., None]
    mean_bar = jnp.where(has_no_key, output_bar.astype(blocks.dtype), 0).sum(0) / len(inputs.value)
    value_bar += mean_bar.reshape(blocks.heads, blocks.groups, -1).sum(1)[:, None]
    results = [
        (blocks.join(query_bar) * pattern.scale).astype(inputs.query.dtype),
        (key_bar.swapaxes(0, 1) * pattern.scale).astype(inputs.key.dtype),
        value_bar.swapaxes(0, 1).astype(inputs.value.dtype),
    ]
    if inputs.bias is not None and with_bias:
        unpadded = bias_bar[tuple(map(slice, inputs.bias.shape))]
        results.append(unpadded.astype(inputs.bias.dtype))
    return results


# --- Blocks of queries and their spans of keys ---


class _Tile(NamedTuple):
    """A block of queries and its span of keys.

    - `row`, `column`: indices of the first query and the first key.
    - `span`: number of keys.
    """

    row: Any
    column: Any
    span: int

    def take(self, array: Array, axis: int) -> Array:
        """The slice of `array` for the span of keys, along `axis`."""
        if isinstance(self.column, int):
            return lax.slice_in_dim(array, self.column, self.column + self.span, axis=axis)
        return lax.dynamic_slice_in_dim(array, self.column, self.span, axis)

    def add(self, array: Array, part: Array) -> Array:
        """Adds `part` to the slice of `array` for the span of keys, along axis 1."""
        if part.shape == array.shape:
            return array + part
        summed = self.take(array, 1) + part
        return lax.dynamic_update_slice_in_dim(array, summed, self.column, 1)


class _Blocks:
    """The arrays of an attention in blocks of `size` queries.

    - `heads`, `groups`: sizes of the axes `h` and `g`.
    - `dtype`: dtype of the scores.
    - `least`: the score of a masked key.
    - `most`: the log-sum-exp of a query without any key.
    """

    def __init__(self, plan: Plan, inputs: Inputs):
        self.pattern, self.inputs = plan.pattern, inputs
        self.length, num_heads, _ = inputs.query.shape
        self.size = size = min(plan.rows, self.length)
        self.heads = inputs.key.shape[1]
        self.groups = num_heads // self.heads
        self.count = -(-self.length // size)
        dtypes = (each.dtype for each in inputs[:3])
        self.dtype = at_least_float32(max(dtypes, key=lambda dtype: jnp.finfo(dtype).bits))
        self.least, self.most = jnp.finfo(self.dtype).min, jnp.finfo(self.dtype).max
        self.bias, self.mask = self.padded(inputs.bias), self.padded(inputs.mask)

    def run(
        self,
        visit: Callable[[Any, _Tile, Sequence[Any], Sequence[Any]], tuple[Any, Any]],
        carry: Any,
        rows: Sequence[Array | None],
        columns: Sequence[tuple[Array, int] | None],
    ) -> tuple[Any, Any]:
        """Calls `visit` for each block, and stacks the results along the axis of blocks.

        **Arguments:**

        - `visit`: `visit(carry, tile, rows, columns)` returns a carry and the arrays of a block.
        - `rows`: arrays with a leading axis of blocks; `visit` gets the slice of one block.
        - `columns`: pairs `(array, axis)`, where `axis` is the array's axis of keys. `visit` gets
          the slice of each array for one span of keys.
        """
        stacked = []
        for first, last, span, start in self._spans():
            tile = _Tile(first * self.size, 0, span)
            fixed = None if start else [each and tile.take(*each) for each in columns]

            def body(carry: Any, xs: Any, span=span, start=start, fixed=fixed) -> Any:
                row, *rows = xs
                tile = _Tile(row, start(row) if start else 0, span)
                parts = fixed or [each and tile.take(*each) for each in columns]
                return visit(carry, tile, rows, parts)

            if last - first == 1:
                xs = [each if each is None else each[first] for each in rows]
                carry, results = body(carry, (first * self.size, *xs))
                results = jax.tree_util.tree_map(lambda each: each[None], results)
            else:
                xs = [each if each is None else each[first:last] for each in rows]
                starts = np.arange(first, last, dtype=np.int32) * self.size
                carry, results = lax.scan(body, carry, (starts, *xs))
            stacked.append(results)
        return carry, jax.tree_util.tree_map(lambda *each: jnp.concatenate(each), *stacked)

    def _spans(self) -> Iterator[tuple[int, int, int, Callable[[Any], Any] | None]]:
        """Yields `(first block, end block, span, start)` for each group of blocks.

        `start` maps the first query of a block to the first key of the block's span. If `start` is
        `None`, the first key is 0.
        """
        num_keys = len(self.inputs.key)
        first, last = self.pattern.bounds()
        if self.pattern.offset is None or last is None:
            yield 0, self.count, num_keys, None
        elif first is not None and (span := last - first + self.size) < num_keys:

            def start(row: Any) -> Any:
                if isinstance(row, int):
                    return max(0, min(row + first, num_keys - span))
                return jnp.clip(row + first, 0, num_keys - span)

            yield 0, self.count, span, start
        else:
            step = -(-self.count // _GROUPS)
            for block in range(0, self.count, step):
                end = min(block + step, self.count)
                yield block, end, max(1, min(end * self.size + last, num_keys)), None

    def zeros(self, like: Array) -> Array:
        """Returns zeros with the shape, the sharding and the `vmap` axes of `like`. The zeros vary
        over the mesh axes of all inputs.
        """
        axes = [varying_axes(each) for each in self.inputs if each is not None]
        zeros = (jnp.isnan(like) & False).astype(self.dtype)
        return vary(zeros, frozenset().union(*axes))

    def cut(self, array: Any) -> Any:
        """Cuts an array with axes `q_seq heads size` into blocks with axes `n h r size`."""
        if array is None:
            return None
        # Reshapes one axis at a time, because JAX supports no other reshape of explicitly sharded
        # arrays.
        blocks = self._padded_rows(array)
        blocks = blocks.reshape(self.count, self.size, *blocks.shape[1:])
        blocks = blocks.reshape(*blocks.shape[:2], self.heads, self.groups, blocks.shape[-1])
        blocks = blocks.transpose(0, 2, 3, 1, 4)
        return blocks.reshape(*blocks.shape[:2], self.groups * self.size, blocks.shape[-1])

    def cut_rows(self, array: Array) -> Array:
        """Cuts an array with axes `heads q_seq` into blocks with axes `n h r`."""
        return self.cut(array.T[..., None])[..., 0]

    def join(self, blocks: Array) -> Array:
        """Joins blocks with axes `n h size r` to an array with axes `q_seq heads size`."""
        split = blocks.reshape(*blocks.shape[:3], self.groups, self.size)
        split = split.transpose(0, 4, 1, 3, 2)
        joined = split.reshape(self.count * self.size, *split.shape[2:])
        joined = joined.reshape(len(joined), self.heads * self.groups, joined.shape[-1])
        return joined[: self.length]

    def join_rows(self, blocks: Array) -> Array:
        """Joins blocks with axes `n h r` to an array with axes `heads q_seq`."""
        return self.join(blocks[:, :, None])[..., 0].T

    def _padded_rows(self, array: Array) -> Array:
        padding = [(0, -len(array) % self.size)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, padding)

    def mean_of(self, value: Array) -> Array:
        """The mean over all keys, axes `h v 1`."""
        return value.astype(self.dtype).mean(0)[..., None]

    def scores(self, tile: _Tile, query: Array, key: Array) -> Array:
        """The scores of a block, axes `h c r`. The score of a masked key is `least`."""
        scores = _dot("hcd,hrd->hcr", key, query) * self.pattern.scale
        if self.bias is not None:
            biased = scores + self.select(self.bias, tile).astype(scores.dtype)
            scores = jnp.where(biased <= self.least, self.least, biased)
        # These indices are JAX arrays: with `np.arange`, the mask of each block would be a constant
        # of the program.
        columns = (tile.column + jnp.arange(tile.span, dtype=jnp.int32))[:, None]
        rows = (tile.row + jnp.arange(self.size, dtype=jnp.int32))[None]
        may_attend = self.pattern.allowed(self.inputs, rows, columns)
        if may_attend is not None:
            # All heads share this mask. Its axes are `c` and the queries of one head.
            may_attend = jnp.broadcast_to(may_attend, (tile.span, self.size))
            scores = jnp.where(jnp.tile(may_attend, (1, self.groups)), scores, self.least)
        if self.mask is not None:
            scores = jnp.where(self.select(self.mask, tile), scores, self.least)
        return scores

    def dropped(self, tile: _Tile, weights: Array) -> Array:
        """Applies dropout to the weights of a block, axes `h c r`. It uses the same random numbers
        as `jax.random.bernoulli`.
        """
        keys, p = self.inputs.dropout_keys, self.pattern.dropout_p
        if keys is None:
            return weights
        # The Threefry counter for a weight is its flat index in the weight matrix of its head.
        columns = (tile.column + jnp.arange(tile.span, dtype=jnp.int32))[None, :, None, None]
        rows = (tile.row + jnp.arange(self.size, dtype=jnp.int32))[None, None, None]
        high, low = rows.astype(jnp.uint32), columns.astype(jnp.uint32)
        if self.length * (num_keys := len(self.inputs.key)) < 2**32:
            high, low = jnp.zeros((1, 1, 1, 1), jnp.uint32), high * np.uint32(num_keys) + low
        keys = keys.reshape(self.heads, 1, self.groups, 1, 2)
        high, low = threefry(keys[..., 0], keys[..., 1], high, low)
        digits = (high ^ low) >> 9 | np.uint32(0x3F800000)
        uniform = lax.bitcast_convert_type(digits, jnp.float32) - 1
        is_kept = (uniform < np.float32(1 - p)).reshape(weights.shape)
        return jnp.where(is_kept, weights / (1 - p), 0)

    def padded(self, array: Any) -> Any:
        """A mask or bias, padded to whole blocks unless its axis of queries has size 1."""
        if array is None or array.shape[1] == 1:
            return array
        return self._padded_rows(array.swapaxes(0, 1)).swapaxes(0, 1)

    def select(self, array: Array, tile: _Tile) -> Array:
        """The slice of a padded mask or bias for a block, axes `h c r`."""
        part = lax.dynamic_slice(array, *self._part(array, tile)).swapaxes(1, 2)
        heads = 1 if len(part) == 1 else self.heads
        part = part.reshape(heads, len(part) // heads, *part.shape[1:]).swapaxes(1, 2)
        part = jnp.broadcast_to(part, (heads, part.shape[1], self.groups, self.size))
        return part.reshape(heads, part.shape[1], -1)

    def add_to(self, array: Array, scores: Array, tile: _Tile) -> Array:
        """Adds the cotangents of a block's scores to `array`, the cotangents of a padded bias."""
        starts, sizes = self._part(array, tile)
        part = scores.reshape(self.heads, tile.span, self.groups, self.size)
        part = part.transpose(0, 2, 3, 1).reshape(-1, self.size, tile.span)
        part = part.sum([axis for axis in range(3) if sizes[axis] == 1], keepdims=True)
        summed = lax.dynamic_slice(array, starts, sizes) + part
        return lax.dynamic_update_slice(array, summed, starts)

    def _part(self, array: Array, tile: _Tile) -> tuple[Any, Any]:
        """The start indices and sizes of a block's slice of a padded mask or bias."""
        heads, rows, columns = array.shape
        starts = (0, 0 if rows == 1 else tile.row, 0 if columns == 1 else tile.column)
        return [jnp.asarray(each, jnp.int32) for each in starts], (
            heads,
            min(rows, self.size),
            min(columns, tile.span),
        )


def _to_hcd(array: Any) -> Any:
    """Transposes axes `kv_seq heads size` to `h c size`. Returns the array and its axis of keys."""
    return None if array is None else (array.swapaxes(0, 1), 1)


def _to_hdc(array: Any) -> Any:
    """Transposes axes `kv_seq heads size` to `h size c`. Returns the array and its axis of keys."""
    return None if array is None else (array.transpose(1, 2, 0), 2)


def _clipped(array: Array, indices: Any) -> Array:
    """The elements at `indices`; an index past the end gives the last element."""
    return array.at[indices].get(mode="clip")


def _dot(equation: str, array: Array, other: Array) -> Array:
    """An einsum in the lower precision of the two arrays, accumulated in at least float32."""
    low, high = sorted((array.dtype, other.dtype), key=lambda dtype: jnp.finfo(dtype).bits)
    return jnp.einsum(
        equation,
        array.astype(low),
        other.astype(low),
        preferred_element_type=at_least_float32(high),
    )
