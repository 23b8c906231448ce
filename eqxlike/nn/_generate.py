"""Text generation with language models: a token sampler, and the loop."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from .._check_numbers import whole_number
from .._compat import Tracer, vary, varying_axes
from .._module import Module
from .._pytree import describe_node
from .._transforms import filter_jit
from ._kv_cache import KVCache


class Sampler(Module):
    """Draws a token from the logits of a language model.

    The filters are applied in the order of the arguments, as in Hugging Face's transformers. All
    settings are arrays, so a new value does not recompile the program.

    >>> import jax, jax.numpy as jnp
    >>> from eqxlike import nn
    >>> sampler = nn.Sampler(temperature=0.7, top_p=0.9)
    >>> int(sampler(jnp.array([0.0, 9.0, 1.0]), key=jax.random.key(0)))
    1
    """

    temperature: Float[Array, ""]
    top_k: Int[Array, ""] | None
    top_p: Float[Array, ""] | None
    min_p: Float[Array, ""] | None

    def __init__(
        self,
        temperature: float | Array = 1.0,
        top_k: int | Array | None = None,
        top_p: float | Array | None = None,
        min_p: float | Array | None = None,
    ):
        """**Arguments:**

        - `temperature`: the divisor of the logits. 0 chooses the most likely token.
        - `top_k`: keeps the `top_k` most likely tokens. Fan, Lewis & Dauphin (2018), "Hierarchical
          Neural Story Generation".
        - `top_p`: keeps the smallest set of most likely tokens whose total probability is at least
          `top_p`. Holtzman, Buys, Du, Forbes & Choi (2020), "The Curious Case of Neural Text
          Degeneration".
        - `min_p`: keeps tokens whose probability is at least `min_p` times the largest probability.
          Nguyen et al. (2024), "Turning Up the Heat: Min-p Sampling".

        **Raises:** `ValueError` if an argument is out of range.
        """
        _check_range("temperature", temperature, 0, np.inf)
        if top_k is not None and not isinstance(top_k, Tracer):
            top_k = whole_number(top_k, "top_k")
        _check_range("top_p", top_p, 0, 1)
        _check_range("min_p", min_p, 0, 1)
        self.temperature = jnp.asarray(temperature, jnp.float32)
        self.top_k = None if top_k is None else jnp.asarray(top_k, jnp.int32)
        self.top_p = None if top_p is None else jnp.asarray(top_p, jnp.float32)
        self.min_p = None if min_p is None else jnp.asarray(min_p, jnp.float32)

    def __call__(
        self, logits: Float[Array, "*batch vocabulary"], *, key: PRNGKeyArray
    ) -> Int[Array, " *batch"]:
        """**Returns:** the index of one token for each row of logits."""
        tokens = lax.cond(
            self.temperature == 0,
            lambda: jnp.argmax(logits, -1),
            lambda: jr.categorical(key, self.filter(logits)),
        )
        return tokens.astype(jnp.int32)

    def filter(
        self, logits: Float[Array, "*batch vocabulary"]
    ) -> Float[Array, "*batch vocabulary"]:
        """The logits divided by the temperature, with `-inf` for removed tokens."""
        scores = logits.astype(jnp.float32) / jnp.where(self.temperature == 0, 1, self.temperature)
        least = jnp.full((*scores.shape[:-1], 1), -jnp.inf)
        if self.top_k is not None or self.top_p is not None:
            ordered = jnp.sort(scores, axis=-1, descending=True)
            ranks = lax.broadcasted_iota(jnp.int32, ordered.shape, ordered.ndim - 1)
            is_kept = ranks < (ordered.shape[-1] if self.top_k is None else self.top_k)
            if self.top_p is not None:
                kept = jax.nn.softmax(jnp.where(is_kept, ordered, -jnp.inf), axis=-1)
                likelier = jnp.cumsum(kept, axis=-1) - kept
                # The most likely token is always kept. With `top_p=1` all tokens are kept, although
                # rounded sums reach 1 before the last token.
                is_kept &= (likelier < self.top_p) | (ranks == 0) | (self.top_p >= 1)
            least = jnp.min(jnp.where(is_kept, ordered, jnp.inf), axis=-1, keepdims=True)
        if self.min_p is not None:
            highest = scores.max(-1, keepdims=True)
            least = jnp.maximum(least, highest + jnp.log(self.min_p))
        return jnp.where(scores < least, -jnp.inf, scores)


def _check_range(name: str, value: Any, least: float, most: float) -> None:
    if value is None or isinstance(value, Tracer):
        return
    known = np.asarray(value)  # Not `jnp.asarray`: inside `jax.jit`, comparisons would be traced.
    is_number = known.shape == () and jnp.issubdtype(known.dtype, jnp.number)
    if not is_number or not least <= known <= most:
        wanted = f"from {least} to {most}" if most < np.inf else f"of at least {least}"
        raise ValueError(f"Sampler expected {name} {wanted}, got {value!r}.")


def generate(
    model: Callable[..., Any],
    prompt: Int[Array, "*batch seq"],
    *,
    max_new_tokens: int,
    cache: KVCache | None = None,
    lengths: Int[Array, " batch"] | None = None,
    sampler: Sampler | None = None,
    eos: int | Sequence[int] | None = None,
    key: PRNGKeyArray | None = None,
) -> Int[Array, "*batch max_new_tokens"]:
    """Generates text with a causal language model, in one compiled program.

    The model gets the tokens of one sequence, of shape `(seq,)`, and returns logits of shape `(seq,
    vocabulary)`. A model with an argument `cache` is called as `logits, cache = model(tokens,
    cache=cache)`, and reads each token once. Any other model is called as `logits = model(tokens)`
    and reads the whole sequence again for each new token.

    >>> import jax, jax.numpy as jnp
    >>> from eqxlike import nn
    >>> model = lambda tokens: jax.nn.one_hot(tokens + 1, 10)  # The next token is one larger.
    >>> prompt = jnp.array([1, 2, 3])
    >>> nn.generate(model, prompt, max_new_tokens=4, sampler=nn.Sampler(temperature=0)).tolist()
    [4, 5, 6, 7]

    **Arguments:**

    - `model`: the model. Changing the values of its arrays does not recompile the program.
    - `prompt`: integers of shape `(seq,)`, or `(batch, seq)` for a batch. Each length of a prompt
      needs a separate compilation. To compile less often, pad prompts to a few lengths and pass
      `lengths`.
    - `max_new_tokens`: number of tokens to generate.
    - `cache`: an empty cache for one sequence; by default the result of `KVCache.for_model`. Pass a
      cache to choose, for example, its dtype.
    - `lengths`: number of tokens of each prompt without padding, shape `(batch,)`. Padding is on
      the right.
    - `sampler`: function that chooses each token; `nn.Sampler()` if `None`.
    - `eos`: token that ends a sequence, or several such tokens. Generation stops when all sequences
      have ended.
    - `key`: random key for the sampler. Optional if `sampler.temperature` is 0.

    **Returns:** the new tokens. After a sequence has ended, its last token is repeated.

    **Raises:** `ValueError` or `TypeError` if an argument is invalid.
    """
    prompt = jnp.asarray(prompt)
    if prompt.ndim not in (1, 2) or not prompt.size:
        raise ValueError(
            "generate expected a prompt of shape (seq,) or (batch, seq) with at least one token, "
            f"got shape {prompt.shape}."
        )
    if not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise TypeError(f"generate expected a prompt of integers, got dtype {prompt.dtype}.")
    max_new_tokens = whole_number(max_new_tokens, "max_new_tokens")
    sampler = Sampler() if sampler is None else sampler
    if key is None:
        temperature = getattr(sampler, "temperature", None)
        is_known = temperature is not None and not isinstance(temperature, Tracer)
        if not is_known or np.asarray(temperature).any():
            raise ValueError(
                "generate needs a key to draw tokens: pass `key=jax.random.key(0)`, or "
                "`sampler=nn.Sampler(temperature=0)` for the most likely tokens."
            )
        key = jr.key(0)
    tokens = jnp.atleast_2d(prompt.astype(jnp.int32))
    if lengths is not None:
        lengths = _read_lengths(lengths, tokens.shape)
    ends = jnp.zeros(0, jnp.int32) if eos is None else jnp.atleast_1d(jnp.asarray(eos))
    if ends.ndim != 1 or not jnp.issubdtype(ends.dtype, jnp.integer):
        raise TypeError(f"generate expected eos to be one or several integers, got {eos!r}.")
    total = tokens.shape[1] + max_new_tokens
    if not isinstance(cache, KVCache | None):
        raise TypeError(f"generate expected cache to be an nn.KVCache, got {describe_node(cache)}.")
    if _takes_cache(model):
        cache = KVCache.for_model(model, total) if cache is None else cache
        if cache.start.shape or (not isinstance(cache.start, Tracer) and int(cache.start)):
            raise ValueError(
                "generate expected an empty cache for one sequence, such as `KVCache.for_model` "
                f"makes, got a cache with start={cache.start}. To continue a cache, write a loop: "
                "`logits, cache = model(tokens, cache=cache)`."
            )
        if (room := cache.room()) is not None and room < total:
            raise ValueError(
                f"generate got a cache of length {room} for a prompt of {tokens.shape[1]} and "
                f"{max_new_tokens} new tokens: make the cache with `length={total}`."
            )
    elif cache is not None:
        raise ValueError(
            "generate got a cache, but the model has no argument `cache`: write "
            "`def __call__(self, tokens, cache=None)`."
        )
    ends = ends.astype(jnp.int32)
    found = _generate(model, tokens, cache, lengths, sampler, ends, key, max_new_tokens)
    return found[0] if prompt.ndim == 1 else found


def _read_lengths(lengths: Any, shape: tuple[int, ...]) -> Array:
    lengths = jnp.asarray(lengths)
    if lengths.shape != shape[:1] or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"generate expected integer lengths of shape {shape[:1]}, one for each row of the "
            f"prompt; got dtype {lengths.dtype} and shape {lengths.shape}."
        )
    if not isinstance(lengths, Tracer):
        known = np.asarray(lengths)
        if (known < 1).any() or (known > shape[1]).any():
            raise ValueError(
                f"generate expected lengths from 1 to {shape[1]}, got {known.tolist()}."
            )
    return lengths.astype(jnp.int32)


def _takes_cache(model: Callable[..., Any]) -> bool:
    """Whether a model, or the model inside a wrapper, has an argument `cache`."""
    try:
        parameters = inspect.signature(model).parameters
    except (TypeError, ValueError):
        return False
    is_open = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    inner = getattr(model, "model", None) if is_open else None
    return "cache" in parameters or (inner is not None and _takes_cache(inner))


@filter_jit
def _generate(
    model: Callable[..., Any],
    tokens: Int[Array, "batch seq"],
    cache: KVCache | None,
    lengths: Int[Array, " batch"] | None,
    sampler: Callable[..., Array],
    ends: Int[Array, " ends"],
    key: PRNGKeyArray,
    max_new_tokens: int,
) -> Int[Array, "batch max_new_tokens"]:
    batch = tokens.shape[0]

    def choose(logits: Array, index: Any) -> Array:
        return sampler(logits, key=jr.fold_in(key, index))

    if cache is None:
        first, advance, memory = _without_cache(model, tokens, lengths, max_new_tokens)
    else:
        first, advance, memory = _with_cache(model, tokens, lengths, cache)

    def is_end(token: Array) -> Array:
        return (token[:, None] == ends[None]).any(1)

    def step(carry: Any) -> Any:
        index, token, has_ended, memory, new = carry
        logits, memory = advance(memory, token, index)
        token = jnp.where(has_ended, token, choose(logits, index))
        new = lax.dynamic_update_index_in_dim(new, token, index, 1)
        return index + 1, token, has_ended | is_end(token), memory, new

    def goes_on(carry: Any) -> Array:
        index, _, has_ended, _, _ = carry
        return (index < max_new_tokens) & ~has_ended.all()

    token = choose(first, jnp.zeros((), jnp.int32))
    new = jnp.broadcast_to(token[:, None], (batch, max_new_tokens))
    start = (jnp.ones((), jnp.int32), token, is_end(token), memory, new)
    index, token, _, _, new = lax.while_loop(goes_on, step, start)
    # The positions after the last step still hold the first token. Overwrite the first token with
    # the last token.
    is_done = jnp.arange(max_new_tokens, dtype=jnp.int32)[None] < index
    return jnp.where(is_done, new, token[:, None])


def _with_cache(
    model: Callable[..., Any], tokens: Array, lengths: Array | None, cache: KVCache
) -> tuple[Array, Callable[..., Any], Any]:
    """Reads the prompt with a model that takes a cache.

    **Returns:** the logits after the prompt, the function `advance(memory, token, index)` that
    reads one more token, and the first `memory`.
    """
    # Without `lengths`, all rows have the same start, so that a token is written to the same slot
    # in all rows.
    axis = None if lengths is None else 0

    def call(tokens: Array, memory: Any, *, is_prefill: bool) -> tuple[Array, Any]:
        def of_row(tokens: Array, keys: Array, values: Array, start: Array, num: Any) -> Any:
            own = cache.with_fields(keys=keys, values=values, start=start)
            own = own.prefill(num) if is_prefill else own.decode()
            found = model(tokens, cache=own)
            if not (isinstance(found, tuple) and isinstance(found[-1], KVCache)):
                raise TypeError(
                    "generate expected the model to return a pair of logits and the new cache, got "
                    f"{describe_node(found)}."
                )
            logits, new = found
            if new.layer:
                raise ValueError(
                    f"generate got a cache for {len(new.windows)} layers, but the model called "
                    f"{new.layer} attention layers with it."
                )
            _check_logits(logits, tokens)
            return logits, new.keys, new.values, new.start

        mapped = jax.vmap(of_row, (0, 0, 0, axis, axis), (0, 0, 0, axis))
        keys, values, start = memory
        logits, *memory = mapped(tokens, keys, values, start, lengths)
        return logits, memory

    batch = tokens.shape[0]
    axes = varying_axes(tokens)
    stores = jtu.tree_map(
        lambda each: vary(jnp.broadcast_to(each, (batch, *each.shape)), axes),
        [cache.keys, cache.values],
    )
    start = jnp.zeros((batch,) * (lengths is not None), jnp.int32)
    logits, memory = call(tokens, [*stores, start], is_prefill=True)

    def advance(memory: Any, token: Array, index: Array) -> tuple[Array, Any]:
        logits, memory = call(token[:, None], memory, is_prefill=False)
        return logits[:, 0], memory

    return _take_positions(logits, _row_lengths(tokens, lengths) - 1), advance, memory


def _without_cache(
    model: Callable[..., Any], tokens: Array, lengths: Array | None, max_new_tokens: int
) -> tuple[Array, Callable[..., Any], Any]:
    """Replaces `_with_cache` for a model that reads the whole sequence again for each token."""

    def call(tokens: Array) -> Array:
        found = model(tokens)
        logits = found[0] if isinstance(found, tuple) else found
        _check_logits(logits, tokens)
        return logits

    def advance(tokens: Array, token: Array, index: Array) -> tuple[Array, Any]:
        positions = ends + index - 1
        tokens = jax.vmap(lambda row, position, new: row.at[position].set(new))(
            tokens, positions, token
        )
        return _take_positions(jax.vmap(call)(tokens), positions), tokens

    ends = _row_lengths(tokens, lengths)
    first = _take_positions(jax.vmap(call)(tokens), ends - 1)
    return first, advance, jnp.pad(tokens, ((0, 0), (0, max_new_tokens)))


def _check_logits(logits: Any, tokens: Array) -> None:
    if jnp.ndim(logits) != 2 or logits.shape[0] != tokens.shape[0]:
        raise ValueError(
            f"generate expected the model to return logits of shape ({tokens.shape[0]}, "
            f"vocabulary) for {tokens.shape[0]} tokens, got {describe_node(logits)}."
        )


def _row_lengths(tokens: Array, lengths: Array | None) -> Array:
    """The number of tokens of each row, without the padding."""
    batch, seq = tokens.shape
    return jnp.full(batch, seq, jnp.int32) if lengths is None else lengths


def _take_positions(logits: Array, positions: Array) -> Array:
    """The logits at one position of each row."""
    return jnp.take_along_axis(logits, positions[:, None, None], axis=1)[:, 0]
