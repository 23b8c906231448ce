"""Vectors for tokens, and for positions."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from .._check_numbers import real_number, whole_number
from .._dtypes import parameter_dtype
from .._module import Module, field
from ._inputs import check_input, check_not_stacked, describe
from ._parameters import Initializer, normal


class Embedding(Module):
    """A table with one learnt vector for each token.

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

        - `num_embeddings`: number of rows.
        - `embedding_size`: length of each row.
        - `weight`: the table itself, of shape `(num_embeddings, embedding_size)`: then the sizes
          may be left out.
        - `dtype`: of a table that is drawn; JAX's default float if `None`.
        - `weight_init`: what draws it; standard normal by default, as in PyTorch.
        - `key`: for the draw.

        **Raises:** `ValueError` for a size that is not a non-negative integer, if there is neither
        a `weight` nor both sizes and a key, or if `weight` has another shape than the sizes say.
        """
        if num_embeddings is not None:
            num_embeddings = whole_number(num_embeddings, "num_embeddings", least=0)
        if embedding_size is not None:
            embedding_size = whole_number(embedding_size, "embedding_size", least=0)
        if weight is None:
            if num_embeddings is None or embedding_size is None or key is None:
                raise ValueError(
                    "Embedding needs either `weight`, or `num_embeddings`, `embedding_size` and "
                    "`key` to draw one."
                )
            draw: Callable[..., Array] = normal if weight_init is None else weight_init
            weight = draw(key, (num_embeddings, embedding_size), parameter_dtype(dtype))
        elif weight.ndim != 2:
            raise ValueError(
                "Embedding expected a `weight` of shape (num_embeddings, embedding_size), got "
                f"shape {weight.shape}."
            )
        rows, columns = weight.shape
        if num_embeddings not in (None, rows) or embedding_size not in (None, columns):
            raise ValueError(
                f"Embedding expected a `weight` of shape ({num_embeddings}, {embedding_size}), as "
                f"the sizes say, got shape {weight.shape}."
            )
        self.num_embeddings = rows
        self.embedding_size = columns
        self.weight = weight

    def __call__(
        self, x: int | Int[Array, ""], *, key: PRNGKeyArray | None = None
    ) -> Shaped[Array, " embedding_size"]:
        """**Arguments:**

        - `x`: which row. Negative indices count from the end, and as everywhere in JAX one that
          lies outside is moved to the nearest end.
        - `key`: ignored; layers share one signature.

        **Returns:** shape `(embedding_size,)`.

        **Raises:** `ValueError` if `x` is not a scalar, `TypeError` if it is not an integer.
        """
        del key
        check_input(self, x, ())
        check_not_stacked(self, self.weight, 2)
        if jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            raise TypeError(
                f"{describe(self)} expected x to be an integer, the number of a row; got dtype "
                f"{jnp.result_type(x)}. Write `x.astype(int)`."
            )
        return self.weight[x]


def _embedding_size(size: int) -> int:
    return whole_number(size, "embedding_size", least=0)


def _theta(theta: float) -> float:
    return real_number(theta, "theta")


class RotaryPositionalEmbedding(Module):
    """Turns pairs of features by an angle that grows with the position in the sequence.

    Su, Lu, Pan, Murtadha, Wen & Liu (2021), "RoFormer: Enhanced Transformer with Rotary Position
    Embedding". Features `j` and `j + embedding_size / 2` at position `m` turn by `m *
    theta**(-2 * j / embedding_size)`, so that the inner product of a query and a key depends on the
    distance of their positions alone. It has no parameters.

    >>> import jax, jax.numpy as jnp
    >>> rope = RotaryPositionalEmbedding(embedding_size=8)
    >>> jax.jit(rope)(jnp.ones((5, 8))).shape
    (5, 8)
    >>> heads = jnp.ones((5, 2, 8))  # Positions, heads, features.
    >>> jax.jit(jax.vmap(rope, in_axes=1, out_axes=1))(heads).shape
    (5, 2, 8)
    """

    embedding_size: int = field(static=True, converter=_embedding_size)
    theta: float = field(static=True, default=10_000.0, converter=_theta)
    dtype: Any = field(static=True, default_factory=lambda: parameter_dtype(None).type)

    def __check_init__(self) -> None:
        if self.embedding_size % 2 != 0:
            raise ValueError(
                f"embedding_size must be even, since features turn in pairs; got "
                f"{self.embedding_size}."
            )

    def __call__(
        self, x: Float[Array, "seq_length embedding_size"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "seq_length embedding_size"]:
        """**Arguments:**

        - `x`: shape `(seq_length, embedding_size)`; the first row is at position 0.
        - `key`: ignored; layers share one signature.

        **Returns:** the shape and dtype of `x`. Angles are computed in `self.dtype`.

        **Raises:** `ValueError` if `x` has another shape.
        """
        del key
        check_input(self, x, ("seq_length", self.embedding_size))
        half = self.embedding_size // 2
        exponents = jnp.arange(half, dtype=self.dtype) / half
        positions = jnp.arange(x.shape[0], dtype=self.dtype)
        angles = jnp.outer(positions, self.theta**-exponents)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        first, second = jnp.split(x.astype(self.dtype), 2, axis=-1)
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return turned.astype(x.dtype)
