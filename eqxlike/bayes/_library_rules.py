"""Dtypes, ranks and keys as the libraries expect them that `bayes` computes with."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def as_libraries_compute() -> Iterator[None]:
    """Lets NumPyro, BlackJAX and Optax mix dtypes and ranks and carry keys through loops, as they
    do inside, in a program that allows none of it.
    """
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.debug_key_reuse(False),
    ):
        yield
