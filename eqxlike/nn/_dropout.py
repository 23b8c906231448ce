"""Dropout."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, PRNGKeyArray, Shaped

from .._dtypes import explain_key
from .._module import Module
from .._pytree import is_array
from .._traceback import stacklevel_of_user
from ._inputs import describe


def warn_deterministic(layer_name: str, deterministic: bool) -> bool:
    """Warns that `deterministic` is deprecated, and returns its value for use as `inference`."""
    warnings.warn(
        f"{layer_name}'s `deterministic=` is deprecated: use `inference=`.",
        DeprecationWarning,
        stacklevel=stacklevel_of_user(),
    )
    return deterministic


def _check_probability(p: Any) -> None:
    is_floating = is_array(p) and jnp.issubdtype(p.dtype, jnp.floating)
    is_number = isinstance(p, (int, float)) and not isinstance(p, bool)
    if not (is_floating or is_number):
        raise TypeError(
            "Dropout expects a probability p in [0, 1], as a number or a floating-point array; got "
            f"{p!r}, of type {type(p).__name__}."
        )
    # A JAX array is not checked, because it may be traced or on another device.
    if isinstance(p, (int, float, np.floating)) and not 0 <= p <= 1:
        raise ValueError(f"Dropout expects a probability p in [0, 1], got {p!r}.")


class Dropout(Module):
    """Sets each entry to zero with probability `p` and divides the other entries by `1 - p`.

    In inference mode the layer returns its input; `nn.inference_mode` switches a whole model.
    Srivastava, Hinton, Krizhevsky, Sutskever & Salakhutdinov (2014), "Dropout: A simple way to
    prevent neural networks from overfitting".

    >>> import jax, jax.numpy as jnp
    >>> layer = Dropout(p=0.5)
    >>> kept = layer(jnp.ones(1000), key=jax.random.key(0)) > 0
    >>> bool(400 < kept.sum() < 600)
    True
    >>> layer(jnp.ones(2), inference=True).tolist()
    [1.0, 1.0]
    """

    p: float
    inference: bool

    def __init__(
        self, p: float = 0.5, inference: bool = False, *, deterministic: bool | None = None
    ):
        """**Arguments:**

        - `p`: probability of dropping an entry, in [0, 1]; a number, or a floating-point array of
          shape `()`.
        - `inference`: whether to return inputs unchanged.
        - `deterministic`: deprecated name of `inference`.

        **Raises:** `ValueError` if `p` is outside [0, 1]; `TypeError` if `p` is not a number.
        """
        if deterministic is not None:
            inference = warn_deterministic("Dropout", deterministic)
        _check_probability(p)
        self.p = p
        self.inference = inference

    def __call__(
        self,
        x: Shaped[Array, "*shape"],
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
    ) -> Shaped[Array, "*shape"]:
        """**Arguments:**

        - `x`: any shape.
        - `key`: random key that determines the dropped entries. It is required unless the layer is
          in inference mode or `p == 0`.
        - `inference`: overrides `self.inference` for this call.
        - `deterministic`: deprecated name of `inference`.

        **Returns:** an array with the shape of `x`. The array has the dtype of `x` if this dtype is
        floating or complex.

        **Raises:** `RuntimeError` if a key is required and `key` is `None`.
        """
        if deterministic is not None:
            inference = warn_deterministic("Dropout", deterministic)
        if inference is None:
            inference = self.inference
        p = self.p
        if inference or (isinstance(p, (int, float)) and p == 0):
            return x
        if key is None:
            raise RuntimeError(
                f"{describe(self)} needs a key outside inference mode: write `layer(x, key=key)`, "
                "or switch the model with `nn.inference_mode(model)`."
            )
        if isinstance(p, (int, float)):
            if p == 1:
                # For `p == 1`, `x / (1 - p)` would divide by zero, and the gradient would be NaN.
                return jnp.zeros_like(x)
            keep = 1 - p
        else:
            keep = 1 - jax.lax.stop_gradient(p)
        try:
            mask = jr.bernoulli(key, keep, jnp.shape(x))
        except (TypeError, ValueError) as error:
            explain_key(error, key, "Dropout")
            raise
        if not isinstance(keep, (int, float)) and jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            keep = jnp.asarray(keep, jnp.result_type(x))
        return jnp.where(mask, x / keep, 0)
