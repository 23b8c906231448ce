"""Multihead attention."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from .._check_numbers import whole_number
from .._module import Module, field
from ._dot_product_attention import (
    Implementation,
    WeightDropout,
    attend_with,
    check_implementation,
    read_attention,
    read_window,
)
from ._embedding import RotaryPositionalEmbedding
from ._inputs import check_input, describe
from ._kv_cache import KVCache
from ._linear import Dropout, Linear, warn_deterministic
from ._norm import RMSNorm
from ._parameters import THREEFRY, Initializer, split_in_program, split_key

Heads = Float[Array, "seq_length num_heads size"]

_PROJECTIONS = 2**32 - 1
"""Folding this number into the key of a call gives the key of the projections. The heads use the
keys of `jax.random.split(key, n)`. A small number is not safe: `fold_in(key, i)` may equal one of
the keys of the heads if `i < n`.
"""


NO_CACHE: Any = object()
"""Default of the parameter `cache`. With this default, the layer returns only its output."""


class MultiheadAttention(Module):
    """Multi-head attention, with learnt projections of query, key, value and output.

    Each head computes `softmax(Q K^T / sqrt(qk_size)) V`. The output projection is applied to the
    concatenated heads. The layer uses `nn.dot_product_attention`: the softmax is computed in at
    least float32, and the matrix of all scores is not built for long sequences. Vaswani, Shazeer,
    Parmar, Uszkoreit, Jones, Gomez, Kaiser & Polosukhin (2017), "Attention Is All You Need".

    >>> import eqxlike as eqx, jax, jax.numpy as jnp
    >>> attention = MultiheadAttention(num_heads=2, query_size=8, key=jax.random.key(0))
    >>> x = jnp.ones((5, 8))
    >>> eqx.filter_jit(attention)(x, x, x, mask="causal").shape
    (5, 8)
    """

    query_proj: Linear
    key_proj: Linear
    value_proj: Linear
    output_proj: Linear
    dropout: Dropout
    num_heads: int = field(static=True)
    query_size: int = field(static=True)
    key_size: int = field(static=True)
    value_size: int = field(static=True)
    output_size: int = field(static=True)
    qk_size: int = field(static=True)
    vo_size: int = field(static=True)
    use_query_bias: bool = field(static=True)
    use_key_bias: bool = field(static=True)
    use_value_bias: bool = field(static=True)
    use_output_bias: bool = field(static=True)
    num_kv_heads: int = field(static=True)
    rotary: RotaryPositionalEmbedding | None
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    window: tuple[int | None, int | None] = field(static=True)
    implementation: Implementation = field(static=True)

    def __init__(
        self,
        num_heads: int,
        query_size: int,
        key_size: int | None = None,
        value_size: int | None = None,
        output_size: int | None = None,
        qk_size: int | None = None,
        vo_size: int | None = None,
        use_query_bias: bool = False,
        use_key_bias: bool = False,
        use_value_bias: bool = False,
        use_output_bias: bool = False,
        dropout_p: float = 0.0,
        inference: bool = False,
        dtype: Any = None,
        *,
        num_kv_heads: int | None = None,
        rotary: RotaryPositionalEmbedding | None = None,
        window: int | tuple[int | None, int | None] | None = None,
        normalize_qk: bool = False,
        implementation: Implementation = "auto",
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `num_heads`: number of heads.
        - `query_size`: number of features of the query.
        - `key_size`, `value_size`, `output_size`: number of features of key, value and output;
          `query_size` if `None`.
        - `qk_size`: number of features of each head's queries and keys; `query_size // num_heads`
          if `None`.
        - `vo_size`: number of features of each head's values; `query_size // num_heads` if `None`.
        - `use_query_bias`, `use_key_bias`, `use_value_bias`, `use_output_bias`: whether the
          projections add a bias.
        - `dropout_p`: probability of dropping an attention weight.
        - `inference`: whether to disable dropout.
        - `dtype`: dtype of all weights and biases; JAX's default float if `None`.
        - `num_kv_heads`: number of key and value heads; `num_heads` if `None`. Successive groups of
          `num_heads // num_kv_heads` query heads share one key and value head (grouped-query
          attention). `num_kv_heads=1` is multi-query attention.
        - `rotary`: rotary position embedding of queries and keys. If `rotary.embedding_size` is
          smaller than `qk_size`, only the first features of each head are rotated.
        - `window`, `implementation`: as for `nn.dot_product_attention`.
        - `normalize_qk`: whether to apply an `RMSNorm` to each head's queries and keys, before
          `rotary`.
        - `weight_init`, `bias_init`: initializers of the four projections, as for `Linear`.
        - `key`: random key for the initial weights.

        **Raises:**

        - `ValueError` if a size is not an integer of at least 0, or `qk_size` is 0.
        - `ValueError` if `num_heads` is not a positive multiple of `num_kv_heads`.
        - `ValueError` if `rotary.embedding_size` is larger than `qk_size`.
        """

        def size_or(default: int, size: int | None, name: str, least: int = 0) -> int:
            return default if size is None else whole_number(size, name, least)

        self.num_heads = heads = whole_number(num_heads, "num_heads")
        self.num_kv_heads = kv_heads = size_or(heads, num_kv_heads, "num_kv_heads", least=1)
        self.query_size = size = whole_number(query_size, "query_size", least=0)
        self.key_size = size_or(size, key_size, "key_size")
        self.value_size = size_or(size, value_size, "value_size")
        self.output_size = size_or(size, output_size, "output_size")
        self.qk_size = size_or(size // heads, qk_size, "qk_size")
        self.vo_size = size_or(size // heads, vo_size, "vo_size")
        if heads % kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {heads} and {kv_heads}."
            )
        if self.qk_size == 0:
            raise ValueError(
                "qk_size, the number of features of each head's queries and keys, must be at least "
                f"1; got 0, with query_size={size} and num_heads={heads}."
            )
        if rotary is not None and rotary.embedding_size > self.qk_size:
            raise ValueError(
                f"rotary must have an embedding_size of at most qk_size={self.qk_size}, got "
                f"{rotary.embedding_size}."
            )
        check_implementation(implementation)
        keys = split_key(key, 4)
        make = functools.partial(Linear, dtype=dtype, weight_init=weight_init, bias_init=bias_init)
        self.query_proj = make(size, heads * self.qk_size, use_query_bias, key=keys[0])
        self.key_proj = make(self.key_size, kv_heads * self.qk_size, use_key_bias, key=keys[1])
        self.value_proj = make(
            self.value_size, kv_heads * self.vo_size, use_value_bias, key=keys[2]
        )
        self.output_proj = make(
            heads * self.vo_size, self.output_size, use_output_bias, key=keys[3]
        )
        self.dropout = Dropout(dropout_p, inference)
        self.use_query_bias = use_query_bias
        self.use_key_bias = use_key_bias
        self.use_value_bias = use_value_bias
        self.use_output_bias = use_output_bias
        self.rotary = rotary
        make_norm = functools.partial(RMSNorm, self.qk_size, use_bias=False, dtype=dtype)
        self.query_norm = make_norm() if normalize_qk else None
        self.key_norm = make_norm() if normalize_qk else None
        self.window = read_window(lambda: "MultiheadAttention", window)
        self.implementation = implementation

    @overload
    def __call__(
        self,
        query: Float[Array, "q_seq query_size"],
        key_: Float[Array, "kv_seq key_size"],
        value: Float[Array, "kv_seq value_size"],
        mask: Shaped[Array, "q_seq kv_seq"]
        | Shaped[Array, "#num_heads q_seq kv_seq"]
        | Literal["causal"]
        | None = None,
        *,
        bias: Float[Array, "#num_heads #q_seq #kv_seq"] | None = None,
        is_causal: bool = False,
        segment_ids: Int[Array, " seq"] | tuple[Array, Array] | None = None,
        key_length: int | Int[Array, ""] | None = None,
        query_offset: int | Int[Array, ""] = 0,
        positions: Array | tuple[Array, Array] | None = None,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Callable[[Heads, Heads, Heads], tuple[Heads, Heads, Heads]] | None = None,
    ) -> Float[Array, "q_seq output_size"]: ...

    @overload
    def __call__(
        self, *args: Any, cache: KVCache | None, **kwargs: Any
    ) -> tuple[Float[Array, "q_seq output_size"], KVCache | None]: ...

    def __call__(
        self,
        query: Float[Array, "q_seq query_size"],
        key_: Float[Array, "kv_seq key_size"],
        value: Float[Array, "kv_seq value_size"],
        mask: Shaped[Array, "q_seq kv_seq"]
        | Shaped[Array, "#num_heads q_seq kv_seq"]
        | Literal["causal"]
        | None = None,
        *,
        bias: Float[Array, "#num_heads #q_seq #kv_seq"] | None = None,
        is_causal: bool = False,
        segment_ids: Int[Array, " seq"] | tuple[Array, Array] | None = None,
        key_length: int | Int[Array, ""] | None = None,
        query_offset: int | Int[Array, ""] = 0,
        positions: Array | tuple[Array, Array] | None = None,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Callable[[Heads, Heads, Heads], tuple[Heads, Heads, Heads]] | None = None,
        cache: Any = NO_CACHE,
    ) -> Any:
        """**Arguments:**

        - `query`: shape `(q_seq, query_size)`.
        - `key_`: shape `(kv_seq, key_size)`.
        - `value`: shape `(kv_seq, value_size)`.
        - `mask`: shape `(q_seq, kv_seq)` or `(1, q_seq, kv_seq)` for all heads, or `(num_heads,
          q_seq, kv_seq)` for one mask for each head. `False`, or an integer 0, masks a pair of
          query and key. A float mask is added to the scores, as in PyTorch: `-jnp.inf` or `-1e9`
          masks a pair, and 0 leaves a pair unchanged. All other values are a bias, which may be
          trained. Convert a float mask of ones and zeros with `mask != 0`. `"causal"` means
          `is_causal=True`.
        - `bias`, `is_causal`, `segment_ids`, `key_length`, `query_offset`: as for
          `nn.dot_product_attention`.
        - `positions`: positions for `rotary`, shape `(seq,)`, or a pair of arrays for queries and
          keys. By default the first key has position 0, and the first query has position
          `query_offset`.
        - `key`: random key for dropout, split into one key for each head. It is required unless
          `dropout_p` is 0 or the layer is in inference mode. The projections get other keys, one
          for each row, but a `Linear` ignores its key.
        - `inference`: overrides `self.dropout.inference` for this call.
        - `deterministic`: deprecated name of `inference`.
        - `process_heads`: a function that takes the projected query, key and value, each of shape
          `(seq, num_heads, size)`, and returns three arrays of the same shapes. It is called after
          `rotary`.
        - `cache`: an `nn.KVCache` with the keys and values of earlier calls. This call adds its
          keys and values to the cache, and computes causal self-attention. A call with a cache
          accepts no other mask, no bias, and no segments, lengths or positions. With `cache=None`
          the layer returns `(output, None)`.

        **Returns:** an array of shape `(q_seq, output_size)`; `(array, new cache)` if `cache` is
        passed.

        **Raises:**

        - `ValueError` if an argument has the wrong shape, or `key_` has no rows.
        - `TypeError` if the mask is complex.
        - `RuntimeError` if dropout needs a key and `key` is `None`.
        """
        if deterministic is not None:
            inference = warn_deterministic("MultiheadAttention", deterministic)
        check_input(self, query, ("q_seq", self.query_size), "query")
        check_input(self, key_, ("kv_seq", self.key_size), "key_")
        check_input(self, value, (key_.shape[0], self.value_size), "value")
        if key_.shape[0] == 0:
            raise ValueError(
                f"{describe(self)} expected at least one row of key_ and value, got key_ of shape "
                f"{key_.shape}: a softmax over no keys is undefined. To ignore rows, set `mask` to "
                "False for them."
            )

        keys = (None,) * 4
        if key is not None:
            keys = split_in_program(jr.fold_in(key, _PROJECTIONS), 4)
        num_kv, qk_size, vo_size = self.num_kv_heads, self.qk_size, self.vo_size
        shapes = (self.num_heads, qk_size), (num_kv, qk_size), (num_kv, vo_size)
        projected = zip(self._project((query, key_, value), keys), shapes, strict=True)
        heads: Any = [each.reshape(each.shape[0], *shape) for each, shape in projected]
        for index, norm in enumerate((self.query_norm, self.key_norm)):
            if norm is not None:
                heads[index] = jax.vmap(jax.vmap(norm))(heads[index])
        options: dict[str, Any] = {
            "mask": mask,
            "bias": bias,
            "is_causal": is_causal,
            "window": self.window,
            "segment_ids": segment_ids,
            "key_length": key_length,
            "query_offset": query_offset,
        }
        has_cache = isinstance(cache, KVCache)
        if not has_cache and cache is not None and cache is not NO_CACHE:
            raise TypeError(
                f"{describe(self)} expected cache to be an nn.KVCache or None, got {cache!r}."
            )
        if has_cache:
            given = {
                "a mask": None if isinstance(mask, str) else mask,
                "bias": bias,
                "segment_ids": segment_ids,
                "key_length": key_length,
                "positions": positions,
            }
            unsupported = [name for name, each in given.items() if each is not None]
            if query.shape[0] != key_.shape[0]:
                unsupported.append(f"{query.shape[0]} queries and {key_.shape[0]} keys")
            if unsupported:
                raise ValueError(
                    f"{describe(self)} with a cache computes causal self-attention: it takes no "
                    "other masks, biases or positions, and needs as many keys as queries; got "
                    f"{', '.join(unsupported)}."
                )
            positions = (cache.start, cache.start)
        if self.rotary is not None:
            heads[:2] = self._rotate(heads[0], heads[1], positions, query_offset)
        elif positions is not None and not has_cache:
            raise ValueError(
                f"{describe(self)} got positions but has no rotary embedding: construct the layer "
                "with `rotary=nn.RotaryPositionalEmbedding(...)`."
            )
        if process_heads is not None:
            expected = [head.shape for head in heads]
            heads = process_heads(*heads)
            if (found := [jnp.shape(head) for head in heads]) != expected:
                raise ValueError(
                    "`process_heads` must return query, key and value heads with the shapes of its "
                    f"arguments: expected {expected}, got {found}."
                )
        if has_cache:
            key_heads, value_heads, options, cache = cache.extend(heads[1], heads[2], self.window)
            heads = (heads[0], key_heads, value_heads)
        attention = read_attention(lambda: describe(self), heads, **options)
        dropout = self._weight_dropout(key, inference)
        attended = attend_with(self.implementation, *attention, dropout)
        attended = attended.reshape(query.shape[0], self.num_heads * self.vo_size)
        output = project(self.output_proj, attended, keys[3])
        return output if cache is NO_CACHE else (output, cache)

    def _rotate(
        self, query: Heads, key: Heads, positions: Any, query_offset: Any
    ) -> tuple[Heads, Heads]:
        """Applies `rotary` to queries and keys."""
        rotary = self.rotary
        assert rotary is not None
        if positions is None:
            positions = (query_offset, 0)
        elif not isinstance(positions, tuple):
            if query.shape[0] != key.shape[0]:
                raise ValueError(
                    f"{describe(self)} got {query.shape[0]} queries, {key.shape[0]} keys and one "
                    "array of positions: pass a pair, `positions=(of_queries, of_keys)`."
                )
            positions = jnp.asarray(positions)
            positions = (positions, positions)
        elif len(positions) != 2:
            raise ValueError(
                f"{describe(self)} expected positions to be an array or a pair of arrays, got a "
                f"tuple of {len(positions)}."
            )
        of_queries, of_keys = positions
        size = rotary.embedding_size

        def rotate(heads: Heads, positions: Any) -> Heads:
            rotated = rotary(heads[..., :size], positions=positions)
            if size == heads.shape[-1]:
                return rotated
            return jnp.concatenate([rotated, heads[..., size:]], axis=-1)

        return rotate(query, of_queries), rotate(key, of_keys)

    def _project(
        self, inputs: tuple[Array, Array, Array], keys: Sequence[PRNGKeyArray | None]
    ) -> Sequence[Array]:
        """Projects the rows of query, key and value."""
        projections = (self.query_proj, self.key_proj, self.value_proj)
        return tuple(map(project, projections, inputs, keys))

    def _weight_dropout(
        self, key: PRNGKeyArray | None, inference: bool | None
    ) -> WeightDropout | None:
        layer, p = functools.partial(self.dropout, inference=inference), self.dropout.p
        inference = self.dropout.inference if inference is None else inference
        if inference or (isinstance(p, int | float) and p == 0):
            return None
        if key is None:
            return WeightDropout(layer, p, None)
        # One key for each head, so that the same key drops the same weights as in Equinox.
        keys = jr.split(key, self.num_heads)

        def drop(weights: Array) -> Array:
            return jax.vmap(lambda each, key: layer(each, key=key))(weights, keys)

        is_reproducible = (
            type(self.dropout) is Dropout
            and isinstance(p, int | float)
            and p < 1
            and jr.key_impl(key) == THREEFRY
            and jax.config.jax_threefry_partitionable  # pyright: ignore
            and jnp.result_type(float) == jnp.float32
        )
        return WeightDropout(drop, p, keys if is_reproducible else None)


def project(projection: Linear, x: Array, key: PRNGKeyArray | None) -> Array:
    """Applies `projection` to each row of `x`, with a separate key for each row."""
    if key is None:
        return jax.vmap(projection)(x)
    keys = jr.split(key, x.shape[0])
    return jax.vmap(lambda row, key: projection(row, key=key))(x, keys)
