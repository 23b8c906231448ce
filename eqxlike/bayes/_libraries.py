"""Access to NumPyro and BlackJAX: distributions, links, and Markov chains.

A link `t` is a bijection from linked space, which is unconstrained, to the support of a
distribution. For `x = t(u)`, the density of `u` is the density of `x` times `|det dx/du|`.
"""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._check_numbers import check_number, check_scale, hint_to_call
from .._compat import OLD_EMITTERS, Tracer


def distributions() -> Any:
    """The module `numpyro.distributions`.

    **Raises:** `ImportError` that says how to install the library.
    """
    return _imported("numpyro.distributions", "Priors, likelihoods and inference need NumPyro")


def blackjax() -> Any:
    """The module `blackjax`.

    **Raises:** `ImportError` that says how to install the library.
    """
    return _imported("blackjax", "This method needs BlackJAX")


def hmc_util() -> Any:
    """The module `numpyro.infer.hmc_util`.

    **Raises:** `ImportError` that says how to install the library.
    """
    return _imported("numpyro.infer.hmc_util", "The warm-up of NUTS and HMC needs NumPyro")


def _imported(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(f"{what}: `pip install 'eqxlike[bayes]'`.") from error


@contextlib.contextmanager
def as_libraries_compute() -> Iterator[None]:
    """Context manager that allows NumPyro, BlackJAX and Optax to promote dtypes and ranks.

    It also disables the check for key reuse. The libraries rely on JAX's defaults, but a user's
    program may have made these defaults stricter.
    """
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.debug_key_reuse(False),
    ):
        yield


# Compiler options for programs that run once. Optimisation level 1 halves the compilation time.
# Level 0 divides the compilation time by three, but the program may run two to ten times as long.
ONCE = OLD_EMITTERS | {"xla_backend_optimization_level": 1}
ONCE_AND_BRIEFLY = OLD_EMITTERS | {"xla_backend_optimization_level": 0}


# --- Distributions ---


def summed_log_prob(distribution: Any, value: Array) -> Float[Array, ""]:
    """The log density of `value`, summed over its entries."""
    with as_libraries_compute():
        return distribution.log_prob(value).sum()


def is_distribution(value: Any) -> bool:
    return isinstance(value, distributions().Distribution)


class Missing(AttributeError, NotImplementedError, ValueError):
    """Raised for a property that a posterior or a distribution lacks.

    `Missing` is an `AttributeError`, so that `hasattr` is false. It is also a `NotImplementedError`
    and a `ValueError`, because user code may catch these.
    """


# --- Links ---


def constrained(distribution: Any, linked: Array) -> Array:
    """`x = t(u)`, a value in the support of the distribution."""
    with as_libraries_compute():
        return _link_of(distribution)(linked)


def unconstrained(distribution: Any, value: Array) -> Array:
    """`u = t^-1(x)`: the inverse of `constrained`."""
    with as_libraries_compute():
        return _link_of(distribution).inv(value)


def log_det_jacobian(distribution: Any, linked: Array) -> Float[Array, ""]:
    """`log |det dx/du|`, summed over all values."""
    link = _link_of(distribution)
    with as_libraries_compute():
        return link.log_abs_det_jacobian(linked, link(linked)).sum()


def is_free(distribution: Any) -> bool:
    """Whether the link is the identity, because the support is unconstrained."""
    return isinstance(_link_of(distribution), distributions().transforms.IdentityTransform)


def is_normal(distribution: Any) -> bool:
    """Whether a distribution consists of independent normals."""
    kinds = distributions()
    if isinstance(distribution, kinds.ExpandedDistribution | kinds.Independent):
        distribution = distribution.base_dist
    return isinstance(distribution, kinds.Normal)


def _link_of(distribution: Any) -> Any:
    return distributions().biject_to(distribution.support)


# --- Checks of distributions ---


# Points in linked space at which positivity is tested. Farther out, float32 would round the values
# of some links to the ends of the support.
_PROBES = (-8.0, 0.0, 8.0)


def check_positive(value: Any, name: str, *, is_array: bool = False) -> None:
    """Raises `ValueError` unless `value` is positive, or a distribution over positive numbers.

    **Arguments:**

    - `is_array`: whether arrays of positive numbers, and distributions over arrays, are allowed
      too.
    """
    if not is_distribution(value):
        if not is_array or np.ndim(value) == 0:
            check_scale(value, name)
            return
        check_number(value, name)
        if not (isinstance(value, Tracer) or np.all((value > 0) & np.isfinite(value))):
            raise ValueError(f"{name} must be positive and finite, got {value}.")
        return
    _check_continuous(value, name)
    shape = value.shape()
    if shape != () and not is_array:
        raise ValueError(f"{name} must be a distribution of shape (), got shape {shape}.")
    link = _link_of(value)
    values = [link(jnp.full(shape, probe)) for probe in _PROBES]
    # If a link changes the shape, as it does for a simplex, the entries are not independent.
    if not all(each.shape == shape and bool(jnp.all(each > 0)) for each in values):
        raise ValueError(
            f"{name} must be a distribution over positive numbers, such as `Gamma(2.0, 1.0)`; "
            f"the support of {type(value).__name__} is {value.support}."
        )


def check_prior(distribution: Any, name: str) -> None:
    """Raises `TypeError` for anything but a distribution, and `ValueError` for improper priors.

    A proper prior is continuous, and its density has a finite integral.
    """
    check_distribution(distribution, name)
    improper = distributions().ImproperUniform
    base = getattr(distribution, "base_dist", distribution)
    if isinstance(distribution, improper) or isinstance(base, improper):
        raise ValueError(
            f"{name} is improper: the density of ImproperUniform has no finite integral, so "
            "the posterior may be improper too. Use a wide `Normal` instead."
        )
    _check_continuous(distribution, name)


def _check_continuous(distribution: Any, name: str) -> None:
    try:
        _link_of(distribution)
    except NotImplementedError:
        raise ValueError(
            f"{name} must be a continuous distribution; the support of "
            f"{type(distribution).__name__} is {distribution.support}."
        ) from None


def check_distribution(value: Any, name: str) -> None:
    """Raises `TypeError` unless `value` is a NumPyro distribution.

    `name` is the name of the argument in the error message.
    """
    kind = distributions().Distribution
    check_kind(value, kind, name, "a distribution from `numpyro.distributions`")


def check_kind(value: Any, kind: Any, name: str, wanted: str) -> None:
    """Raises `TypeError` unless `value` is an instance of `kind`. The message calls it `wanted`."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {wanted}, got {value!r}{hint_to_call(value)}.")
