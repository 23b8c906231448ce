"""Parts of a key for the places in a model."""

import hashlib

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, PRNGKeyArray


def key_at(key: PRNGKeyArray, path: str) -> PRNGKeyArray:
    """The part of `key` that belongs to the place `path` in a model.

    It depends on nothing but the two, so that a layer which is added takes nothing from the others;
    and is the same in each process, which Python's `hash` of a string is not.
    """
    # 64 bits: among the 32 that one `fold_in` takes, two of ten thousand arrays would share theirs
    # in one model of a hundred.
    digest = hashlib.blake2b(path.encode(), digest_size=8).digest()
    return _fold_in(key, np.frombuffer(digest, "<u4"))


@jax.jit
def _fold_in(key: PRNGKeyArray, words: Array) -> PRNGKeyArray:
    high, low = jnp.asarray(words)
    return jr.fold_in(jr.fold_in(key, high), low)
