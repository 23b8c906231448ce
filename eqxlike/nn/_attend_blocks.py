"""Attention in blocks of queries: exact, in memory that grows with the length, not with its square.

Rabe & Staats (2021), "Self-attention Does Not Need O(n^2) Memory"; Dao, Fu, Ermon, Rudra & Ré
(2022), "FlashAttention: Fast and Memory-Efficient Exact Attention".

Each of the three passes, for the output, for its tangents and for the cotangents, visits one block
of queries after another. A block needs the scores of its own queries alone, and each pass computes
them again. With a causal mask or a window, a block visits only the span of keys that its queries
may attend to.

Letters in the names of axes:

- `n`: blocks.
- `h`: heads of keys and values; `g`: query heads that share one of them.
- `r`: queries in a block, of all `g` heads; `c`: keys.
- `d`, `v`: features of queries and keys, features of values.

Scores have the axes `h c r`. With keys first, no product transposes the scores, which takes a CPU
longer than the product itself.
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
from ._threefry import threefry

_GROUPS = 4
"""A causal attention cuts its blocks into this many groups, which visit spans of different lengths:
four compute 5/8 of all scores, and each group is one loop to compile.
"""


@dataclasses.dataclass(frozen=True)
class Pattern:
    """The properties of an attention that are known when the program is traced.

    - `scale`: factor of the scores.
    - `is_causal`: whether query `i` attends to no key after `i + offset`.
    - `window`: how many keys before and after `i + offset` query `i` attends to; `None` for all.
    - `offset`: position of the first query among the keys; `None` if `Inputs.offset` holds it.
    - `dropout_p`: probability of dropping a weight, if `Inputs.dropout_keys` are there.
    """

    scale: float
    is_causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    offset: int | None = 0
    dropout_p: float = 0.0

    def bounds(self) -> tuple[int | None, int | None]:
        """The first and last key that query 0 attends to, if it is at its offset or else at 0.

        They are between -2**30 and 2**30, so that sums with indices do not overflow.
        """
        before, after = self.window
        if self.is_causal:
            after = 0
        offset, most = self.offset or 0, 2**30
        first = None if before is None else max(-most, min(offset - before, most))
        last = None if after is None else max(-most, min(offset + after, most))
        return first, last

    def allowed(self, inputs: "Inputs", rows: Any = None, columns: Any = None) -> Array | None:
        """Whether queries at the indices `rows` may attend to keys at the indices `columns`.

        Both have two axes, one of size 1; by default all queries are rows, and all keys columns.

        `None` if all may attend to all. The mask of the inputs is not included.
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
            parts.append(_at(inputs.query_segments, rows) == _at(inputs.key_segments, columns))
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
    """Another implementation of two passes, for one platform.

    - `platform`: the platform; `None` for all.
    - `output`: `output(pattern, inputs)` returns what the pass in blocks does: the output of axes
      `q_seq heads value_size`, and of axes `heads q_seq` the logarithms of the sums of weights.
    - `cotangents`: `cotangents(pattern, inputs, outputs, cotangents)` returns the cotangents of
      query, key and value.
    """

    platform: str | None
    output: Callable[..., list[Array]]
    cotangents: Callable[..., list[Array]]


class How(NamedTuple):
    """How to compute an attention.

    - `rows`: number of queries in a block.
    - `kernel`: replaces the blocks on its platform, if the bias has no derivative.
    """

    pattern: Pattern
    rows: int
    kernel: Kernel | None = None

    def run(self, name: str, in_blocks: Callable[..., Any], *args: Any) -> Any:
        """Calls a pass of the kernel where it is for this platform, and the blocks elsewhere."""
        if self.kernel is None:
            return in_blocks(*args)
        kernel = functools.partial(getattr(self.kernel, name), self.pattern)
        if self.kernel.platform is None:
            return kernel(*args)
        # The program of a single platform contains this platform's branch alone.
        return lax.platform_dependent(*args, default=in_blocks, **{self.kernel.platform: kernel})


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
@batch_first
def attend(how: How, inputs: Inputs) -> list[Array]:
    """The output of all heads, differentiable in every mode and to every order.

    A query that may attend to no key has the mean of all values as its output.

    **Returns:** the output, of axes `q_seq heads value_size`, and of axes `heads q_seq` the
    logarithm of each query's sum of weights.
    """
    return how.run("output", functools.partial(_run_output, how), inputs)


@functools.partial(attend.defjvp, symbolic_zeros=True)
@batch_first
def _differentiate(how: How, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (inputs,), (dots,) = primals, tangents
    outputs = attend(how, inputs)
    moving = [
        name
        for name in Inputs._fields[:4]
        if getattr(dots, name) is not None and has_tangent(getattr(dots, name))
    ]
    arrays, treedef = jax.tree_util.tree_flatten((inputs, outputs))

    def forward(residuals: list[Array], tangents: list[Array]) -> list[Array]:
        inputs, outputs = treedef.unflatten(residuals)
        dots = dict(zip(moving, tangents, strict=True))
        return _run_tangents(how, inputs, _in_blocks(how, inputs, outputs), dots)

    def transpose(
        residuals: list[Array], cotangents: list[Array], is_shared: tuple[bool, ...]
    ) -> list[Array]:
        del is_shared
        inputs, outputs = treedef.unflatten(residuals)
        if "bias" in moving:
            found = _run_cotangents(how, True, inputs, outputs, cotangents)
        else:
            found = _cotangents(how, inputs, outputs, cotangents)
        return [found[name] for name in moving]

    directions = [instantiate(getattr(dots, name)) for name in moving]
    return outputs, linear_call(forward, transpose, arrays, directions, outputs)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
@batch_first
def _cotangents(
    how: How, inputs: Inputs, outputs: list[Array], cotangents: list[Array]
) -> dict[str, Array]:
    """The cotangents of query, key and value."""

    def in_blocks(*args: Any) -> list[Array]:
        found = _cotangents_in_blocks(how, *args)
        return [found[name] for name in Inputs._fields[:3]]

    found = how.run("cotangents", in_blocks, inputs, outputs, cotangents)
    return dict(zip(Inputs._fields, found, strict=False))


@_cotangents.defjvp
@batch_first
def _differentiate_cotangents(how: How, primals: Any, tangents: Any) -> tuple[Any, Any]:
    _, moved = jax.jvp(functools.partial(_cotangents_in_blocks, how), primals, tangents)
    return _cotangents(how, *primals), moved


def _cotangents_in_blocks(
    how: How, inputs: Inputs, outputs: list[Array], cotangents: list[Array]
) -> dict[str, Array]:
    outputs = _in_blocks(how, inputs, outputs)
    return _run_cotangents(how, False, inputs, outputs, cotangents)


def _in_blocks(how: How, inputs: Inputs, outputs: list[Array]) -> list[Array]:
    """The outputs again, if they are a kernel's, which ignores the cotangents of the sums."""
    return outputs if how.kernel is None else attend(how._replace(kernel=None), inputs)


# --- The three passes, each traced once for all layers with the same sizes ---


@functools.partial(jax.jit, static_argnums=0)
def _run_output(how: How, inputs: Inputs) -> list[Array]:
    blocks = _Blocks(how, inputs)

    def visit(carry: None, place: Any, rows: Any, columns: Any) -> Any:
        (query,), (key, value) = rows, columns
        scores = blocks.scores(place, query, key)
        highest = scores.max(1)
        weights = jnp.exp(scores - highest[:, None])
        totals = weights.sum(1)
        # NaN attends, so that it is in the output.
        attends = highest != blocks.least
        kept = blocks.dropped(place, weights)
        output = _dot("hvc,hcr->hvr", value, kept) / totals[:, None]
        output = jnp.where(attends[:, None], output, blocks.mean_of(inputs.value))
        # With this, `exp(score - log_sum)` is 0 for every score.
        log_sums = jnp.where(attends, highest + jnp.log(totals), blocks.most)
        return carry, (output, log_sums)

    rows, columns = [blocks.cut(inputs.query)], [_first(inputs.key), _last(inputs.value)]
    _, (output, log_sums) = blocks.run(visit, None, rows, columns)
    return [blocks.join(output).astype(inputs.value.dtype), blocks.join_rows(log_sums)]


@functools.partial(jax.jit, static_argnums=0)
def _run_tangents(
    how: How, inputs: Inputs, outputs: list[Array], dots: dict[str, Array]
) -> list[Array]:
    blocks, pattern = _Blocks(how, inputs), how.pattern
    output, log_sums = outputs
    query_dot, key_dot, value_dot, bias_dot = map(dots.get, Inputs._fields[:4])
    bias_dot = blocks.padded(bias_dot)

    def visit(carry: None, place: Any, rows: Any, columns: Any) -> Any:
        query, query_dot, output, log_sums = rows
        key, value, key_dot, value_dot = columns
        weights = jnp.exp(blocks.scores(place, query, key) - log_sums[:, None])
        change = jnp.zeros_like(weights)
        if query_dot is not None:
            change += _dot("hcd,hrd->hcr", key, query_dot) * pattern.scale
        if key_dot is not None:
            change += _dot("hcd,hrd->hcr", key_dot, query) * pattern.scale
        if bias_dot is not None:
            change += blocks.select(bias_dot, place).astype(blocks.dtype)
        change = weights * change
        total = change.sum(1)
        moved = _dot("hvc,hcr->hvr", value, blocks.dropped(place, change))
        moved -= output.swapaxes(1, 2).astype(blocks.dtype) * total[:, None]
        if value_dot is not None:
            moved += _dot("hvc,hcr->hvr", value_dot, blocks.dropped(place, weights))
            attends = log_sums < blocks.most
            moved = jnp.where(attends[:, None], moved, blocks.mean_of(dots["value"]))
        return carry, (moved, total)

    rows = [
        blocks.cut(inputs.query),
        blocks.cut(query_dot),
        blocks.cut(output),
        blocks.cut_rows(log_sums),
    ]
    columns = [_first(inputs.key), _last(inputs.value), _first(key_dot), _last(value_dot)]
    _, (moved, totals) = blocks.run(visit, None, rows, columns)
    return [blocks.join(moved).astype(output.dtype), blocks.join_rows(totals)]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_cotangents(
    how: How, with_bias: bool, inputs: Inputs, outputs: list[Array], cotangents: list[Array]
) -> dict[str, Array]:
    blocks, pattern = _Blocks(how, inputs), how.pattern
    (output, log_sums), (of_output, of_log_sums) = outputs, cotangents
    products = of_output.astype(blocks.dtype) * output.astype(blocks.dtype)
    shift = of_log_sums - products.sum(-1).T

    def visit(carry: Any, place: Any, rows: Any, columns: Any) -> Any:
        query, of_output, shift, log_sums = rows
        key, value, key_last = columns
        of_key, of_value, of_bias = carry
        weights = jnp.exp(blocks.scores(place, query, key) - log_sums[:, None])
        of_weights = blocks.dropped(place, _dot("hcv,hrv->hcr", value, of_output))
        of_scores = weights * (of_weights + shift[:, None])
        of_query = _dot("hdc,hcr->hdr", key_last, of_scores)
        of_key = place.add(of_key, _dot("hcr,hrd->hcd", of_scores, query))
        kept = blocks.dropped(place, weights)
        of_value = place.add(of_value, _dot("hcr,hrv->hcv", kept, of_output))
        if with_bias:
            of_bias = blocks.add_to(of_bias, of_scores, place)
        return (of_key, of_value, of_bias), of_query

    rows = [
        blocks.cut(inputs.query),
        blocks.cut(of_output),
        blocks.cut_rows(shift),
        blocks.cut_rows(log_sums),
    ]
    columns = [_first(inputs.key), _first(inputs.value), _last(inputs.key)]
    start = (
        blocks.zeros(columns[0][0]),
        blocks.zeros(columns[1][0]),
        blocks.zeros(blocks.padded(inputs.bias)) if with_bias else None,
    )
    (of_key, of_value, of_bias), of_query = blocks.run(visit, start, rows, columns)
    # Each value has the same share in the output of a query that attends to no key.
    is_idle = (log_sums == blocks.most).T[..., None]
    of_mean = jnp.where(is_idle, of_output.astype(blocks.dtype), 0).sum(0) / len(inputs.value)
    of_value += of_mean.reshape(blocks.heads, blocks.groups, -1).sum(1)[:, None]
    found = {
        "query": blocks.join(of_query) * pattern.scale,
        "key": of_key.swapaxes(0, 1) * pattern.scale,
        "value": of_value.swapaxes(0, 1),
    }
    if inputs.bias is not None and with_bias:
        found["bias"] = of_bias[tuple(map(slice, inputs.bias.shape))]
    return {name: each.astype(getattr(inputs, name).dtype) for name, each in found.items()}


# --- Blocks of queries and their spans of keys ---


class _Place(NamedTuple):
    """A block of queries and its span of keys: their first indices, and the length of the span."""

    row: Any
    column: Any
    span: int

    def take(self, array: Array, axis: int) -> Array:
        """The part of an array for the span, cut along `axis`."""
        if isinstance(self.column, int):
            return lax.slice_in_dim(array, self.column, self.column + self.span, axis=axis)
        return lax.dynamic_slice_in_dim(array, self.column, self.span, axis)

    def add(self, array: Array, part: Array) -> Array:
        """Adds to the part of an array for the span, along axis 1."""
        if part.shape == array.shape:
            return array + part
        summed = self.take(array, 1) + part
        return lax.dynamic_update_slice_in_dim(array, summed, self.column, 1)


class _Blocks:
    """The arrays of an attention in blocks of `size` queries.

    - `heads`, `groups`: the axes `h` and `g`.
    - `dtype`: dtype of the scores.
    - `least`, `most`: the score of a key that is masked, and the sum of weights of a query that
      attends to no key.
    """

    def __init__(self, how: How, inputs: Inputs):
        self.pattern, self.inputs = how.pattern, inputs
        self.length, num_heads, _ = inputs.query.shape
        self.size = size = min(how.rows, self.length)
        self.heads = inputs.key.shape[1]
        self.groups = num_heads // self.heads
        self.count = -(-self.length // size)
        dtypes = (each.dtype for each in inputs[:3])
        self.dtype = at_least_float32(max(dtypes, key=lambda dtype: jnp.finfo(dtype).bits))
        self.least, self.most = jnp.finfo(self.dtype).min, jnp.finfo(self.dtype).max
        self.bias, self.mask = self.padded(inputs.bias), self.padded(inputs.mask)

    def run(
        self,
        visit: Callable[[Any, _Place, Sequence[Any], Sequence[Any]], tuple[Any, Any]],
        carry: Any,
        rows: Sequence[Array | None],
        columns: Sequence[tuple[Array, int] | None],
    ) -> tuple[Any, Any]:
        """Calls `visit` for each block, and stacks what it returns for the blocks.

        **Arguments:**

        - `visit`: `visit(carry, place, rows, columns)` returns a carry and the arrays of a block.
        - `rows`: arrays with an axis of blocks in front; `visit` gets those of one block.
        - `columns`: arrays with their axis of keys; `visit` gets the parts for one span.
        """
        stacked = []
        for first, last, span, start in self._spans():
            place = _Place(first * self.size, 0, span)
            fixed = None if start else [each and place.take(*each) for each in columns]

            def body(carry: Any, turn: Any, span=span, start=start, fixed=fixed) -> Any:
                row, *rows = turn
                place = _Place(row, start(row) if start else 0, span)
                moved = fixed or [each and place.take(*each) for each in columns]
                return visit(carry, place, rows, moved)

            if last - first == 1:
                turn = [each if each is None else each[first] for each in rows]
                carry, found = body(carry, (first * self.size, *turn))
                found = jax.tree_util.tree_map(lambda each: each[None], found)
            else:
                turns = [each if each is None else each[first:last] for each in rows]
                starts = np.arange(first, last, dtype=np.int32) * self.size
                carry, found = lax.scan(body, carry, (starts, *turns))
            stacked.append(found)
        return carry, jax.tree_util.tree_map(lambda *each: jnp.concatenate(each), *stacked)

    def _spans(self) -> Iterator[tuple[int, int, int, Callable[[Any], Any] | None]]:
        """Groups of blocks: the first and last one, and their span of keys, with its start.

        The start is a function of the block's first row, or `None` for a span that starts at 0.
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
        """Zeros with the sharding of `like`, and its axes of `jax.vmap` and `jax.shard_map`."""
        axes = [varying_axes(each) for each in self.inputs if each is not None]
        zeros = (jnp.isnan(like) & False).astype(self.dtype)
        return vary(zeros, frozenset().union(*axes))

    def cut(self, array: Any) -> Any:
        """From axes `q_seq heads size` to `n h r size`."""
        if array is None:
            return None
        # One axis at a time: JAX reshapes arrays with an explicit sharding in no other way.
        blocks = self._padded_rows(array)
        blocks = blocks.reshape(self.count, self.size, *blocks.shape[1:])
        blocks = blocks.reshape(*blocks.shape[:2], self.heads, self.groups, blocks.shape[-1])
        blocks = blocks.transpose(0, 2, 3, 1, 4)
        return blocks.reshape(*blocks.shape[:2], self.groups * self.size, blocks.shape[-1])

    def cut_rows(self, array: Array) -> Array:
        """From axes `heads q_seq` to `n h r`."""
        return self.cut(array.T[..., None])[..., 0]

    def join(self, blocks: Array) -> Array:
        """From axes `n h size r` to `q_seq heads size`."""
        split = blocks.reshape(*blocks.shape[:3], self.groups, self.size)
        split = split.transpose(0, 4, 1, 3, 2)
        joined = split.reshape(self.count * self.size, *split.shape[2:])
        joined = joined.reshape(len(joined), self.heads * self.groups, joined.shape[-1])
        return joined[: self.length]

    def join_rows(self, blocks: Array) -> Array:
        """From axes `n h r` to `heads q_seq`."""
        return self.join(blocks[:, :, None])[..., 0].T

    def _padded_rows(self, array: Array) -> Array:
        padding = [(0, -len(array) % self.size)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, padding)

    def mean_of(self, value: Array) -> Array:
        """The mean over all keys, axes `h v 1`."""
        return value.astype(self.dtype).mean(0)[..., None]

    def scores(self, place: _Place, query: Array, key: Array) -> Array:
        """The scores of a block, axes `h c r`; `least` for keys that are masked."""
        scores = _dot("hcd,hrd->hcr", key, query) * self.pattern.scale
        if self.bias is not None:
            biased = scores + self.select(self.bias, place).astype(scores.dtype)
            scores = jnp.where(biased <= self.least, self.least, biased)
        # Not of NumPy: each mask of a block would be a constant of the program.
        columns = (place.column + jnp.arange(place.span, dtype=jnp.int32))[:, None]
        rows = (place.row + jnp.arange(self.size, dtype=jnp.int32))[None]
        may_attend = self.pattern.allowed(self.inputs, rows, columns)
        if may_attend is not None:
            # The same for all heads: axes `c`, rows of one query head.
            may_attend = jnp.broadcast_to(may_attend, (place.span, self.size))
            scores = jnp.where(jnp.tile(may_attend, (1, self.groups)), scores, self.least)
        if self.mask is not None:
            scores = jnp.where(self.select(self.mask, place), scores, self.least)
        return scores

    def dropped(self, place: _Place, weights: Array) -> Array:
        """Weights of a block, axes `h c r`, after the dropout that `jax.random.bernoulli` gives."""
        keys, p = self.inputs.dropout_keys, self.pattern.dropout_p
        if keys is None:
            return weights
        # A weight has the number of its place among all weights of its head.
        columns = (place.column + jnp.arange(place.span, dtype=jnp.int32))[None, :, None, None]
        rows = (place.row + jnp.arange(self.size, dtype=jnp.int32))[None, None, None]
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
        """A mask or bias with whole blocks of queries, unless it is the same for all queries."""
        if array is None or array.shape[1] == 1:
            return array
        return self._padded_rows(array.swapaxes(0, 1)).swapaxes(0, 1)

    def select(self, array: Array, place: _Place) -> Array:
        """The part of a padded mask or bias for a block, axes `h c r`."""
        part = lax.dynamic_slice(array, *self._part(array, place)).swapaxes(1, 2)
        heads = 1 if len(part) == 1 else self.heads
        part = part.reshape(heads, len(part) // heads, *part.shape[1:]).swapaxes(1, 2)
        part = jnp.broadcast_to(part, (heads, part.shape[1], self.groups, self.size))
        return part.reshape(heads, part.shape[1], -1)

    def add_to(self, array: Array, scores: Array, place: _Place) -> Array:
        """Adds the cotangents of scores to their part of a padded bias."""
        starts, sizes = self._part(array, place)
        part = scores.reshape(self.heads, place.span, self.groups, self.size)
        part = part.transpose(0, 2, 3, 1).reshape(-1, self.size, place.span)
        part = part.sum([axis for axis in range(3) if sizes[axis] == 1], keepdims=True)
        summed = lax.dynamic_slice(array, starts, sizes) + part
        return lax.dynamic_update_slice(array, summed, starts)

    def _part(self, array: Array, place: _Place) -> tuple[Any, Any]:
        """Where the part for a block starts, and its sizes."""
        heads, rows, columns = array.shape
        starts = (0, 0 if rows == 1 else place.row, 0 if columns == 1 else place.column)
        return [jnp.asarray(each, jnp.int32) for each in starts], (
            heads,
            min(rows, self.size),
            min(columns, place.span),
        )


def _first(array: Any) -> Any:
    """From axes `kv_seq heads size` to `h c size`, and the axis of keys."""
    return None if array is None else (array.swapaxes(0, 1), 1)


def _last(array: Any) -> Any:
    """From axes `kv_seq heads size` to `h size c`, and the axis of keys."""
    return None if array is None else (array.transpose(1, 2, 0), 2)


def _at(array: Array, places: Any) -> Array:
    """The elements at successive indices, which may reach beyond the end."""
    return array.at[places].get(mode="clip")


def _dot(equation: str, array: Array, other: Array) -> Array:
    """A product of blocks in the lower of two precisions, summed in at least float32."""
    low, high = sorted((array.dtype, other.dtype), key=lambda dtype: jnp.finfo(dtype).bits)
    return jnp.einsum(
        equation,
        array.astype(low),
        other.astype(low),
        preferred_element_type=at_least_float32(high),
    )
