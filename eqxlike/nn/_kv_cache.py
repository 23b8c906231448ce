"""The cache of keys and values with which a transformer generates one token after another."""

import copy
from collections.abc import Iterator
from typing import Any, ClassVar, Self

import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Float, Int

from .._check_numbers import whole_number
from .._dtypes import parameter_dtype
from .._module import Module, field, stored_fields
from .._transforms import Stacked

_NO_LIMIT = 2**31 - 1


class KVCache(Module):
    """The keys and values of the tokens that a model has read, for all of its attention layers.

    It belongs to one sequence; use `jax.vmap` for a batch. The model passes it from layer to layer:
    each `MultiheadAttention` that gets a cache returns the pair of its output and the new cache.
    The layers take turns in the order in which they are called, and the last one advances `start`.

    >>> import jax, jax.numpy as jnp
    >>> from eqxlike import nn
    >>> attention = nn.MultiheadAttention(num_heads=2, query_size=8, key=jax.random.key(0))
    >>> x = jnp.ones((5, 8))
    >>> cache = nn.KVCache.for_model(attention, length=16)
    >>> y, cache = attention(x[:4], x[:4], x[:4], cache=cache)
    >>> last, cache = attention(x[4:], x[4:], x[4:], cache=cache)
    >>> last.shape, int(cache.start)
    ((1, 8), 5)

    Attention with a cache is causal. In a `ScanStack` the cache is part of the layers' input:
    `x, cache = stack((x, cache))`.
    """

    keeps_precision: ClassVar[bool] = True

    keys: Float[Array, "layers heads slots size"]
    values: Float[Array, "layers heads slots value_size"]
    layer: Int[Array, ""]
    start: Int[Array, ""]
    limit: Int[Array, ""]
    window: int | None = field(static=True)
    is_prefill: bool = field(static=True)

    def __init__(
        self,
        num_layers: int,
        length: int,
        num_heads: int,
        size: int,
        value_size: int | None = None,
        *,
        window: int | None = None,
        dtype: Any = None,
    ):
        """**Arguments:**

        - `num_layers`: number of attention layers.
        - `length`: the largest number of tokens, prompt included. The outputs of calls that exceed
          it are NaN.
        - `num_heads`, `size`, `value_size`: heads of keys and values, and their features.
          `value_size` is `size` if `None`.
        - `window`: if all layers attend to this number of earlier tokens only, the cache stores
          `window + 1` tokens, and overwrites the oldest.
        - `dtype`: dtype of the stored keys and values; JAX's default float if `None`.
        """
        num_layers, length = whole_number(num_layers, "num_layers"), whole_number(length, "length")
        num_heads, size = whole_number(num_heads, "num_heads"), whole_number(size, "size")
        value_size = size if value_size is None else whole_number(value_size, "value_size")
        if window is not None and (window := whole_number(window, "window", 0)) + 1 >= length:
            window = None
        slots = length if window is None else window + 1
        dtype = parameter_dtype(dtype)
        self.keys = jnp.zeros((num_layers, num_heads, slots, size), dtype)
        self.values = jnp.zeros((num_layers, num_heads, slots, value_size), dtype)
        self.layer = self.start = jnp.zeros((), jnp.int32)
        self.limit = jnp.full((), _NO_LIMIT, jnp.int32)
        self.window = window
        self.is_prefill = False

    @classmethod
    def for_model(cls, model: Any, length: int, *, dtype: Any = None) -> Self:
        """An empty cache with the sizes of a model's `MultiheadAttention` layers.

        **Arguments:**

        - `model`: a model or a layer.
        - `length`: as in the constructor.
        - `dtype`: as in the constructor; the dtype of the key projection's weight if `None`.

        **Raises:** `ValueError` if the model has no attention layers, or layers of different sizes.
        """
        layers = list(_attention_layers(model))
        found = {(each.num_kv_heads, each.qk_size, each.vo_size) for each in layers}
        if len(found) != 1:
            raise ValueError(
                "KVCache.for_model expected a model whose MultiheadAttention layers agree in "
                "num_kv_heads, qk_size and vo_size; got "
                + (f"layers with {sorted(found)}." if found else f"none in {type(model).__name__}.")
            )
        windows = {_window(each.window) for each in layers}
        window = windows.pop() if len(windows) == 1 else None
        if dtype is None:
            dtype = getattr(getattr(layers[0].key_proj, "weight", None), "dtype", None)
        (sizes,) = found
        return cls(len(layers), length, *sizes, window=window, dtype=dtype)

    def positions(self, num: int) -> Int[Array, " num"]:
        """The positions of the next `num` tokens, for learned position embeddings."""
        return self.start + jnp.arange(num, dtype=jnp.int32)

    def prefill(self, num_tokens: int | Int[Array, ""] | None = None) -> Self:
        """The empty cache for a call with a whole prompt, which attends to the prompt alone.

        **Arguments:**

        - `num_tokens`: the prompt's tokens from this index on are padding; by default none is.
        """
        limit = _NO_LIMIT if num_tokens is None else num_tokens
        limit = jnp.asarray(limit, jnp.int32)
        return self.with_fields(start=jnp.zeros_like(limit), limit=limit, is_prefill=True)

    def decode(self) -> Self:
        """The cache for the calls after the one with the prompt."""
        limit = jnp.full_like(self.limit, _NO_LIMIT)
        return self.with_fields(limit=limit, is_prefill=False)

    def extend(
        self,
        key: Float[Array, "seq heads size"],
        value: Float[Array, "seq heads value_size"],
        window: int | tuple[int | None, int | None] | None = None,
    ) -> tuple[Array, Array, dict[str, Any], Self]:
        """Stores the keys and values of new tokens, for an attention layer of your own.

        **Arguments:**

        - `key`, `value`: shape `(seq, heads, size)`, as `nn.dot_product_attention` takes them.
        - `window`: the layer's window.

        **Returns:** the keys and values to attend to, the keyword arguments for
        `nn.dot_product_attention`, and the cache for the next layer.
        """
        num_layers, heads, slots, size = self.keys.shape
        num = key.shape[0]
        before = _window(window)
        expected = (num, heads, size), (num, heads, self.values.shape[-1])
        if (key.shape, value.shape) != expected or (
            self.window is not None and before != self.window
        ):
            raise ValueError(
                f"KVCache expected keys and values of shapes {expected[0]} and {expected[1]} and "
                f"a window of {self.window}; got {key.shape}, {value.shape} and {before}. Make the "
                "cache with `KVCache.for_model(model, length)`."
            )
        if self.window is None:
            if num > slots:
                raise ValueError(f"KVCache has room for {slots} tokens, got {num}.")
            # Tokens beyond the end would overwrite others.
            value = jnp.where(self.start + num > slots, jnp.nan, value)
        stored = [
            self._store(stack, new.swapaxes(0, 1).astype(stack.dtype))
            for stack, new in ((self.keys, key), (self.values, value))
        ]
        if self.is_prefill:
            options = {"is_causal": True, "window": window}
        elif self.window is None:
            options = {"is_causal": True, "window": window, "query_offset": self.start}
            if num == 1 and before is None:
                options = {"key_length": self.start + 1}
        elif num == 1:
            options = {"key_length": self.start + 1}
        else:
            # New tokens overwrite keys that their predecessors attend to.
            options = {"mask": self._mask(num)}
        if not self.is_prefill:
            olds = (self.keys, self.values) if "mask" in options else stored
            read = [
                lax.dynamic_index_in_dim(each, self.layer, 0, keepdims=False).swapaxes(0, 1)
                for each in olds
            ]
            read = [each.astype(new.dtype) for each, new in zip(read, (key, value), strict=True)]
            if "mask" in options:
                key, value = (
                    jnp.concatenate(pair) for pair in zip(read, (key, value), strict=True)
                )
            else:
                key, value = read
        is_last = self.layer + 1 == num_layers
        cache = self.with_fields(
            keys=stored[0],
            values=stored[1],
            layer=jnp.where(is_last, 0, self.layer + 1),
            start=jnp.where(is_last, self._end(num), self.start),
        )
        return key, value, options, cache

    def with_fields(self, **fields: Any) -> Self:
        """A copy with other arrays."""
        new = copy.copy(self)
        stored_fields(new).update(fields)
        return new

    def _end(self, num: int) -> Array:
        """The position after the last of `num` new tokens that are no padding."""
        return jnp.minimum(self.start + num, self.limit)

    def _newest(self, end: Array) -> Array:
        """The position of the token in each slot of a window, when tokens before `end` are stored.

        It is negative for a slot that is empty.
        """
        slots = self.keys.shape[2]
        return end - 1 - (end - 1 - jnp.arange(slots, dtype=jnp.int32)) % slots

    def _store(self, stack: Array, new: Array) -> Array:
        """Writes new tokens, of axes `heads seq size`, to the current layer."""
        num, slots = new.shape[1], stack.shape[2]
        if self.window is None or num == 1:
            slot = self.start if self.window is None else self.start % slots
            return lax.dynamic_update_slice(stack, new[None], (self.layer, 0, slot, 0))
        rows = self._newest(self._end(num)) - self.start
        old = lax.dynamic_index_in_dim(stack, self.layer, 0, keepdims=False)
        moved = jnp.take(new, jnp.clip(rows, 0, num - 1), axis=1)
        moved = jnp.where((rows >= 0)[None, :, None], moved, old)
        return lax.dynamic_update_index_in_dim(stack, moved, self.layer, 0)

    def _mask(self, num: int) -> Array:
        """Whether new tokens attend to the stored tokens and, after these, to the new ones."""
        queries = self.positions(num)
        keys = jnp.concatenate([self._newest(self.start), queries])
        distance = queries[:, None] - keys[None]
        return (distance >= 0) & (distance < self.keys.shape[2]) & (keys >= 0)[None]


def _window(window: Any) -> int | None:
    """The number of earlier tokens in a window."""
    return window[0] if isinstance(window, tuple | list) else window


def _attention_layers(model: Any) -> Iterator[Any]:
    """The layers with keys and values of several heads; a layer of a stack once for each turn."""

    def is_found(node: Any) -> bool:
        return node is not model and (isinstance(node, Stacked) or hasattr(node, "num_kv_heads"))

    if isinstance(model, Stacked):
        is_split = isinstance(model.layers, tuple) and isinstance(model.layers[0], Stacked)
        yield from list(_attention_layers(model.layers)) * (1 if is_split else model.depth)
    elif hasattr(model, "num_kv_heads"):
        yield model
    else:
        for node in jtu.tree_leaves(model, is_leaf=is_found):
            if is_found(node):
                yield from _attention_layers(node)
