"""Token embeddings and rotary position embeddings."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, Real, Shaped

from .._check_numbers import positive_number, real_number, whole_number
from .._dtypes import parameter_dtype
from .._module import Module, field
from .._pytree import describe_node
from ._inputs import check_input, check_not_stacked, describe
from ._parameters import Initializer, normal


class Embedding(Module):
    """A lookup table with one learnt vector for each token.

    >>> import jax, jax.numpy as jnp
    >>> layer = Embedding(num_embeddings=100, embedding_size=8, key=jax.random.key(0))
    >>> layer(3).shape, jax.vmap(layer)(jnp.array([1, 4, 1, 5])).shape
    ((8,), (4, 8))
    """

    num_embeddings: int = field(static=True)
    embedding_size: int = field(static=True)
    weight: Shaped[Array, "num_embeddings embedding_size"]

    def __init__(
        self,
        num_embeddings: int | None = None,
        embedding_size: int | None = None,
        weight: Shaped[Array, "num_embeddings embedding_size"] | None = None,
        dtype: Any = None,
        *,
        weight_init: Initializer | None = None,
        key: PRNGKeyArray | None = None,
    ):
        """**Arguments:**

        - `num_embeddings`: number of rows, the size of the vocabulary.
        - `embedding_size`: length of each row.
        - `weight`: an existing table, shape `(num_embeddings, embedding_size)`. The sizes and `key`
          are then optional.
        - `dtype`: dtype of a new table; JAX's default float if `None`.
        - `weight_init`: initializer of a new table; standard normal by default, as in PyTorch.
        - `key`: random key for a new table.

        **Raises:**

        - `ValueError` if a size is not an integer of at least 0.
        - `ValueError` if there is no `weight`, and a size or `key` is missing.
        - `ValueError` if `weight` does not match the sizes.
        """
        if num_embeddings is not None:
            num_embeddings = whole_number(num_embeddings, "num_embeddings", least=0)
        if embedding_size is not None:
            embedding_size = whole_number(embedding_size, "embedding_size", least=0)
        if weight is None:
            if num_embeddings is None or embedding_size is None or key is None:
                raise ValueError(
                    "Embedding needs either `weight`, or all of `num_embeddings`, "
                    "`embedding_size` and `key`."
                )
            draw: Callable[..., Array] = normal if weight_init is None else weight_init
            weight = draw(key, (num_embeddings, embedding_size), parameter_dtype(dtype))
        if not hasattr(weight, "shape"):
            raise TypeError(
                f"Embedding expected `weight` to be an array, got {describe_node(weight)}."
            )
        if len(weight.shape) != 2:
            raise ValueError(
                "Embedding expected a `weight` of shape (num_embeddings, embedding_size), got "
                f"shape {weight.shape}."
            )
        self.num_embeddings, self.embedding_size = rows, columns = weight.shape
        if num_embeddings not in (None, rows) or embedding_size not in (None, columns):
            raise ValueError(
                f"Embedding expected a `weight` of shape ({num_embeddings}, {embedding_size}), "
                f"given by the sizes; got shape {weight.shape}."
            )
        self.weight = weight

    def __call__(
        self, x: int | Int[Array, ""], *, key: PRNGKeyArray | None = None
    ) -> Shaped[Array, " embedding_size"]:
        """**Arguments:**

        - `x`: index of a row. Negative indices count from the end. As in all JAX indexing, an index
          out of bounds is clamped.
        - `key`: ignored; accepted so that all layers have the same signature.

        **Returns:** shape `(embedding_size,)`.

        **Raises:** `ValueError` if `x` is not a scalar; `TypeError` if `x` is not an integer.
        """
        check_input(self, x, ())
        check_not_stacked(self, self.weight, 2)
        if jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            raise TypeError(
                f"{describe(self)} expected x to be an integer, the index of a row; got dtype "
                f"{jnp.result_type(x)}. Convert it: `x.astype(int)`."
            )
        return self.weight[x]


def _embedding_size(size: int) -> int:
    return whole_number(size, "embedding_size", least=0)


def _theta(theta: float) -> float:
    return real_number(theta, "theta")


_BY_LENGTH = {"factor": None, "original_max_position_embeddings": None}
_SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": None},
    "dynamic": _BY_LENGTH,
    "llama3": {**_BY_LENGTH, "low_freq_factor": None, "high_freq_factor": None},
    "yarn": {
        **_BY_LENGTH,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
        "attention_factor": 0.0,
    },
}
"""The entries of each type of scaling, with their defaults; `None` marks a required entry."""


def _scaling(scaling: Any) -> tuple[tuple[str, Any], ...] | None:
    """The entries of `scaling`, checked and sorted."""
    if scaling is None:
        return None
    try:
        given = {name: value for name, value in dict(scaling).items() if value is not None}
    except (TypeError, ValueError):
        raise TypeError(
            "scaling must be a mapping, such as {'rope_type': 'linear', 'factor': 2.0}; got "
            f"{scaling!r}."
        ) from None
    # Older config files use "type" instead of "rope_type", and some files contain both.
    kind = given.pop("type", None)
    kind = given.pop("rope_type", kind)
    if kind not in _SCALINGS:
        raise ValueError(
            f"scaling expected 'rope_type' to be one of {', '.join(map(repr, _SCALINGS))}; got "
            f"{kind!r}."
        )
    entries = _SCALINGS[kind]
    if unknown := sorted(given.keys() - entries.keys()):
        hint = " Pass 'rope_theta' as `theta=`." if "rope_theta" in unknown else ""
        known = ", ".join(map(repr, entries)) or "no entries"
        raise ValueError(f"scaling of type {kind!r} takes {known}; got {unknown}.{hint}")
    for name, default in entries.items():
        if default is None and name not in given:
            of_model = name == "original_max_position_embeddings"
            hint = ", the `max_position_embeddings` of the trained model" if of_model else ""
            raise ValueError(f"scaling of type {kind!r} needs {name!r}{hint}; got {given}.")
        if name in given and name != "truncate":
            given[name] = positive_number(given[name], f"scaling[{name!r}]")
    if kind == "llama3" and given["low_freq_factor"] >= given["high_freq_factor"]:
        raise ValueError(f"scaling expected 'low_freq_factor' < 'high_freq_factor'; got {given}.")
    return None if kind == "default" else (("rope_type", kind), *sorted(given.items()))


class RotaryPositionalEmbedding(Module):
    """Rotary position embedding: rotates pairs of features by an angle that grows with position.

    Features `j` and `j + embedding_size / 2` at position `m` are rotated by the angle `m *
    theta**(-2 * j / embedding_size)`. The inner product of a query and a key then depends only on
    the distance between their positions. The layer has no parameters. Su, Lu, Pan, Murtadha, Wen &
    Liu (2021), "RoFormer: Enhanced Transformer with Rotary Position Embedding".

    >>> import jax, jax.numpy as jnp
    >>> rope = RotaryPositionalEmbedding(embedding_size=8)
    >>> jax.jit(rope)(jnp.ones((5, 8))).shape
    (5, 8)
    >>> heads = jnp.ones((5, 2, 8))  # Positions, heads, features.
    >>> jax.jit(rope)(heads, positions=100).shape  # Positions 100 to 104.
    (5, 2, 8)

    `scaling` adapts the rotation to sequences that are longer than in training. Pass the
    `rope_scaling` of a model's `config.json`. The results are the same as in Hugging Face's
    transformers:

    - `"linear"`: divides all angles by `factor`. Chen, Wong, Chen & Tian (2023), "Extending Context
      Window of Large Language Models via Positional Interpolation".
    - `"dynamic"`: increases `theta` with the length, once the length exceeds
      `original_max_position_embeddings`. The length is the largest position of the call, plus 1.
      During decoding the length grows from call to call, while cached keys keep their angles.
    - `"llama3"`: divides low frequencies by `factor`. A frequency is low if it has fewer than
      `low_freq_factor` rotations in the original length. Frequencies with up to `high_freq_factor`
      rotations are divided by a number between 1 and `factor`. Llama Team (2024), "The Llama 3 Herd
      of Models".
    - `"yarn"`: divides frequencies of fewer than `beta_slow` rotations by `factor`, and keeps
      frequencies of more than `beta_fast` rotations. Between these two limits, the new frequency is
      a weighted mean of the divided and the unchanged frequency, with a weight that is linear in
      `j`. The rotated features are multiplied by `attention_factor`, by default `0.1 * log(factor)
      + 1`. Peng, Quesnelle, Fan & Shippole (2023), "YaRN: Efficient Context Window Extension of
      Large Language Models".

    >>> scaling = {"rope_type": "linear", "factor": 2.0}
    >>> scaled = RotaryPositionalEmbedding(8, scaling=scaling)
    >>> x = jnp.ones((5, 8))
    >>> bool(jnp.allclose(scaled(x), rope(x, positions=jnp.arange(5) / 2)))
    True
    """

    embedding_size: int = field(static=True, converter=_embedding_size)
    theta: float = field(static=True, default=10_000.0, converter=_theta)
    dtype: Any = field(static=True, default_factory=lambda: parameter_dtype(None).type)
    scaling: Mapping[str, Any] | tuple[tuple[str, Any], ...] | None = field(
        static=True, default=None, kw_only=True, converter=_scaling
    )

    def __check_init__(self) -> None:
        if self.embedding_size % 2 != 0:
            raise ValueError(
                f"embedding_size must be even, since features are rotated in pairs; got "
                f"{self.embedding_size}."
            )
        if self.embedding_size < 4 and dict(self.scaling or ()).get("rope_type") == "dynamic":
            raise ValueError(
                "scaling of type 'dynamic' needs an embedding_size of at least 4; got "
                f"{self.embedding_size}."
            )

    def __call__(
        self,
        x: Float[Array, "seq_length embedding_size"]
        | Float[Array, "seq_length heads embedding_size"],
        *,
        positions: int | Real[Array, ""] | Real[Array, " seq_length"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> (
        Float[Array, "seq_length embedding_size"] | Float[Array, "seq_length heads embedding_size"]
    ):
        """**Arguments:**

        - `x`: shape `(seq_length, embedding_size)`, or `(seq_length, heads, embedding_size)` if
          `positions` is passed.
        - `positions`: position of each row, shape `(seq_length,)`; or the position of the first
          row, shape `()`. By default the first row has position 0.
        - `key`: ignored; accepted so that all layers have the same signature.

        **Returns:** an array with the shape and dtype of `x`. Angles are computed in `self.dtype`.

        **Raises:** `ValueError` if `x` or `positions` has another shape; `TypeError` if `positions`
        are neither integers nor floats.
        """
        has_heads = positions is not None and jnp.ndim(x) == 3
        heads = ("heads",) if has_heads else ()
        check_input(self, x, ("seq_length", *heads, self.embedding_size))
        rows = jnp.arange(x.shape[0], dtype=self.dtype)
        if positions is None:
            positions = rows
        else:
            expected = x.shape[:1] if getattr(positions, "ndim", 0) else ()
            check_input(self, positions, expected, "positions")
            dtype = jnp.result_type(positions)
            if not any(jnp.issubdtype(dtype, kind) for kind in (jnp.integer, jnp.floating)):
                raise TypeError(
                    f"{describe(self)} expected positions to be integers or floats, got dtype "
                    f"{dtype}."
                )
            positions = jnp.asarray(positions).astype(self.dtype)
            positions = positions if positions.ndim else positions + rows
        frequencies, factor = self._frequencies(positions)
        angles = jnp.outer(positions, frequencies)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        if factor != 1:
            cos, sin = factor * cos, factor * sin
        if has_heads:
            cos, sin = cos[:, None], sin[:, None]
        first, second = jnp.split(x.astype(self.dtype), 2, axis=-1)
        rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return rotated.astype(x.dtype)

    def _frequencies(self, positions: Array) -> tuple[Array, float]:
        """Returns the angle of each pair of features at position 1, and the features' factor."""
        half, theta = self.embedding_size // 2, self.theta
        exponents = jnp.arange(half, dtype=self.dtype) / half
        if self.scaling is None:
            return theta**-exponents, 1.0
        kind = dict(self.scaling)["rope_type"]
        entries = _SCALINGS[kind] | dict(self.scaling)
        factor = entries["factor"]
        if kind == "linear":
            return theta**-exponents / factor, 1.0
        length = entries["original_max_position_embeddings"]
        if kind == "dynamic":
            excess = jnp.maximum(jnp.max(positions, initial=0) + 1 - length, 0)
            growth = (1 + excess * (factor / length)) ** (half / (half - 1))
            return (theta * growth) ** -exponents, 1.0
        # `kept` is 1 for unchanged frequencies, and 0 for frequencies that are divided by `factor`.
        rows, attention = np.arange(half), 1.0
        if kind == "llama3":
            low, high = entries["low_freq_factor"], entries["high_freq_factor"]
            rotations = length * theta ** -(rows / half) / (2 * math.pi)
            kept = np.clip((rotations - low) / (high - low), 0, 1)
        else:
            ends = [
                half * math.log(length / (entries[beta] * 2 * math.pi)) / math.log(theta)
                for beta in ("beta_fast", "beta_slow")
            ]
            if entries["truncate"]:
                ends = [math.floor(ends[0]), math.ceil(ends[1])]
            start, end = max(ends[0], 0), min(ends[1], self.embedding_size - 1)
            kept = 1 - np.clip((rows - start) / (end - start or 1e-3), 0, 1)
            growth = 0.1 * max(math.log(factor), 0)
            attention = entries["attention_factor"] or growth + 1
        return theta**-exponents * jnp.asarray(kept + (1 - kept) / factor, self.dtype), attention
