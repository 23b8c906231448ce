"""The key-value cache of transformers, for generating one token after another."""

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
from .._transforms._stacked import Stacked

_NO_LIMIT = 2**31 - 1


class KVCache(Module):
    """Key-value cache: the keys and values of earlier tokens, for all attention layers of a model.

    A cache is for one sequence; use `jax.vmap` for a batch. The model passes the cache from layer
    to layer: each `MultiheadAttention` that gets a cache returns a pair of its output and the new
    cache. The cache stores the layers in the order of their calls. The last layer advances `start`.

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

    keys: tuple[Float[Array, "heads slots size"], ...] | Float[Array, "layers heads slots size"]
    values: tuple[Array, ...] | Array
    start: Int[Array, ""]
    limit: Int[Array, ""]
    turn: Int[Array, ""] | None
    layer: int = field(static=True)
    windows: tuple[int | None, ...] = field(static=True)
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
        stacked: bool = False,
        dtype: Any = None,
    ):
        """**Arguments:**

        - `num_layers`: number of attention layers.
        - `length`: the largest number of tokens, including the prompt. Calls beyond this length
          return NaN.
        - `num_heads`: number of heads of keys and values.
        - `size`, `value_size`: number of features of each key and value. `value_size` is `size` if
          `None`.
        - `window`: number of earlier tokens that the layers attend to; `None` for all earlier
          tokens. With a window, the cache stores `window + 1` tokens, and overwrites the oldest
          token.
        - `stacked`: whether the layers are in a `ScanStack`. The cache is then one array for all
          layers.
        - `dtype`: dtype of the stored keys and values; JAX's default float if `None`.
        """
        num_layers, length = whole_number(num_layers, "num_layers"), whole_number(length, "length")
        num_heads, size = whole_number(num_heads, "num_heads"), whole_number(size, "size")
        value_size = size if value_size is None else whole_number(value_size, "value_size")
        if window is not None and (window := whole_number(window, "window", 0)) + 1 >= length:
            window = None
        slots, dtype = length if window is None else window + 1, parameter_dtype(dtype)

        def zeros(size: int) -> Any:
            if stacked:
                return jnp.zeros((num_layers, num_heads, slots, size), dtype)
            return tuple(jnp.zeros((num_heads, slots, size), dtype) for _ in range(num_layers))

        self.keys, self.values = zeros(size), zeros(value_size)
        self.start = jnp.zeros((), jnp.int32)
        self.limit = jnp.full((), _NO_LIMIT, jnp.int32)
        self.turn = jnp.zeros((), jnp.int32) if stacked else None
        self.layer = 0
        self.windows = (window,) * num_layers
        self.is_prefill = False

    @classmethod
    def for_model(cls, model: Any, length: int, *, dtype: Any = None) -> Self:
        """An empty cache with the sizes of a model's `MultiheadAttention` layers.

        **Arguments:**

        - `model`: a model or a layer.
        - `length`: as in the constructor.
        - `dtype`: as in the constructor; the dtype of the key projection's weight if `None`.

        **Raises:** `ValueError` if the model has no attention layers, or has a `ScanStack` and
        attention layers of different sizes.
        """
        layers, is_stacked = list(_attention_layers(model)), _has_stack(model)
        if not layers:
            raise ValueError(
                "KVCache.for_model expected a model with MultiheadAttention layers, found none in "
                f"{type(model).__name__}. For a function, pass the model that it calls. For other "
                "layers, use `KVCache(num_layers, length, num_heads, size)`."
            )
        if dtype is None:
            weight = getattr(getattr(layers[0], "key_proj", None), "weight", None)
            dtype = getattr(weight, "dtype", None)
        sizes = [(each.num_kv_heads, each.qk_size, each.vo_size) for each in layers]
        windows = [_window(each.window) for each in layers]
        if not is_stacked:
            parts = [
                cls(1, length, *each, window=window, dtype=dtype)
                for each, window in zip(sizes, windows, strict=True)
            ]
            fields = ("keys", "values", "windows")
            joined = {name: tuple(getattr(part, name)[0] for part in parts) for name in fields}
            return parts[0].with_fields(**joined)
        if len(set(sizes)) > 1:
            raise ValueError(
                "KVCache.for_model expected attention layers with equal num_kv_heads, qk_size and "
                f"vo_size, because the model has a ScanStack; got {sorted(set(sizes))}."
            )
        window = windows[0] if len(set(windows)) == 1 else None
        return cls(len(layers), length, *sizes[0], window=window, stacked=True, dtype=dtype)

    def positions(self, num: int) -> Int[Array, " num"]:
        """The positions of the next `num` tokens, for learned position embeddings."""
        return self.start + jnp.arange(num, dtype=jnp.int32)

    def room(self) -> int | None:
        """The largest number of tokens; `None` if all layers have a window."""
        layers = zip(self.windows, self.keys, strict=True)
        return min((keys.shape[1] for window, keys in layers if window is None), default=None)

    def prefill(self, num_tokens: int | Int[Array, ""] | None = None) -> Self:
        """The empty cache for a call with a whole prompt. In this call, tokens attend only to the
        prompt.

        **Arguments:**

        - `num_tokens`: number of tokens of the prompt without padding on the right; all tokens if
          `None`.
        """
        limit = jnp.asarray(_NO_LIMIT if num_tokens is None else num_tokens, jnp.int32)
        return self.with_fields(start=jnp.zeros_like(limit), limit=limit, is_prefill=True)

    def decode(self) -> Self:
        """The cache for the calls after the prompt."""
        return self.with_fields(limit=jnp.full((), _NO_LIMIT, jnp.int32), is_prefill=False)

    def extend(
        self,
        key: Float[Array, "seq heads size"],
        value: Float[Array, "seq heads value_size"],
        window: int | tuple[int | None, int | None] | None = None,
    ) -> tuple[Array, Array, dict[str, Any], Self]:
        """Stores the keys and values of new tokens, for an attention layer of your own.

        **Arguments:**

        - `key`, `value`: shape `(seq, heads, size)`, as for `nn.dot_product_attention`.
        - `window`: the layer's window.

        **Returns:** the keys and values to attend to, the keyword arguments for
        `nn.dot_product_attention`, and the cache for the next layer.
        """
        olds = self._read(self.keys), self._read(self.values)
        (heads, slots, size), value_size = olds[0].shape, olds[1].shape[-1]
        num, before, ring = key.shape[0], _window(window), self.windows[self.layer]
        expected = (num, heads, size), (num, heads, value_size)
        if (key.shape, value.shape) != expected or (ring is not None and before != ring):
            raise ValueError(
                f"KVCache expected keys and values of shapes {expected[0]} and {expected[1]} and "
                f"a window of {ring}; got {key.shape}, {value.shape} and {before}. Make the cache "
                "with `KVCache.for_model(model, length)`."
            )
        if ring is None:
            if num > slots:
                raise ValueError(f"KVCache has room for {slots} tokens, got {num}.")
            # Tokens beyond the end would silently overwrite other tokens, so their values become
            # NaN.
            value = jnp.where(self.start + num > slots, jnp.nan, value)
        end = jnp.minimum(self.start + num, self.limit)
        keys, values = (
            self._store(stack, old, new.swapaxes(0, 1).astype(old.dtype), end)
            for stack, old, new in zip((self.keys, self.values), olds, (key, value), strict=True)
        )

        def read(stored: Array, like: Array) -> Array:
            return stored.swapaxes(0, 1).astype(like.dtype)

        options: dict[str, Any] = {"is_causal": True, "window": window}
        if not self.is_prefill and ring is not None and num > 1:
            # A new token may overwrite a key that another new token attends to. The attention
            # therefore reads the keys as they were before this call.
            options = {"mask": self._mask(num, slots)}
            key = jnp.concatenate([read(olds[0], key), key])
            value = jnp.concatenate([read(olds[1], value), value])
        elif not self.is_prefill:
            if num == 1 and (ring is not None or before is None):
                options = {"key_length": end}
            else:
                options["query_offset"] = self.start
            key, value = read(self._read(keys), key), read(self._read(values), value)
        return key, value, options, self._next(keys, values, end)

    def with_fields(self, **fields: Any) -> Self:
        """A copy with new values of these fields."""
        new = copy.copy(self)
        stored_fields(new).update(fields)
        return new

    def _read(self, stack: Any) -> Array:
        """The stored keys or values of the current layer."""
        if self.turn is None:
            return stack[self.layer]
        return lax.dynamic_index_in_dim(stack, self.turn, 0, keepdims=False)

    def _store(self, stack: Any, old: Array, new: Array, end: Array) -> Any:
        """The keys or values of all layers, with the new tokens of the current layer.

        `old` holds the stored tokens of the layer, of shape `(heads, slots, size)`; `new` has shape
        `(heads, seq, size)`.
        """
        (_, num, _), slots, ring = new.shape, old.shape[1], self.windows[self.layer]
        slot = self.start if ring is None else self.start % slots
        if ring is not None and num > 1:
            rows = _newest(slots, end) - self.start
            moved = jnp.take(new, jnp.clip(rows, 0, num - 1), axis=1)
            slot, new = 0, jnp.where((rows >= 0)[None, :, None], moved, old)
        if self.turn is not None:
            places = jnp.asarray([self.turn, 0, slot, 0], jnp.int32)
            return lax.dynamic_update_slice(stack, new[None], list(places))
        new = lax.dynamic_update_slice_in_dim(old, new, slot, axis=1)
        return (*stack[: self.layer], new, *stack[self.layer + 1 :])

    def _mask(self, num: int, slots: int) -> Array:
        """The attention mask of new tokens, shape `(num, slots + num)`. Stored keys precede new
        keys.
        """
        queries = self.positions(num)
        keys = jnp.concatenate([_newest(slots, self.start), queries])
        distance = queries[:, None] - keys[None]
        return (distance >= 0) & (distance < slots) & (keys >= 0)[None]

    def _next(self, keys: Any, values: Any, end: Array) -> Self:
        """The cache for the next layer; after the last layer, the cache for the next tokens."""
        num_layers = len(self.windows)
        if self.turn is None:
            layer = (self.layer + 1) % num_layers
            start = self.start if layer else end
            return self.with_fields(keys=keys, values=values, layer=layer, start=start)
        is_last = self.turn + 1 == num_layers
        turn, start = jnp.where(is_last, 0, self.turn + 1), jnp.where(is_last, end, self.start)
        return self.with_fields(keys=keys, values=values, turn=turn, start=start)


def _newest(slots: int, end: Array) -> Array:
    """For each slot of a window, the position of its token once all tokens before `end` are stored.

    The position is negative for an empty slot.
    """
    return end - 1 - (end - 1 - jnp.arange(slots, dtype=jnp.int32)) % slots


def _window(window: Any) -> int | None:
    """The number of earlier tokens in a window."""
    return window[0] if isinstance(window, tuple | list) else window


def _has_stack(model: Any) -> bool:
    nodes = jtu.tree_leaves(model, is_leaf=lambda node: isinstance(node, Stacked))
    return any(isinstance(node, Stacked) for node in nodes)


def _attention_layers(model: Any) -> Iterator[Any]:
    """Yields all attention layers. A stacked layer is repeated for each layer of the stack."""

    def has_heads(node: Any) -> bool:
        return all(hasattr(node, name) for name in ("num_kv_heads", "qk_size", "vo_size", "window"))

    nodes = jtu.tree_leaves(
        model, is_leaf=lambda node: isinstance(node, Stacked) or has_heads(node)
    )
    for node in nodes:
        if isinstance(node, Stacked):
            is_split = isinstance(node.layers, tuple) and isinstance(node.layers[0], Stacked)
            yield from list(_attention_layers(node.layers)) * (1 if is_split else node.depth)
        elif has_heads(node):
            yield node
