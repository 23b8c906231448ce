"""Priors: what one is, those of one scale, and a prior for each path."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, PyTree

from .. import Module, field
from .._check_numbers import check_number, positive_number
from .._compat import Tracer
from ..extend import Which, path_matches
from ._libraries import check_distribution, check_positive, distributions, is_distribution

Leaves = Mapping[str, jax.ShapeDtypeStruct]
"""The unknown arrays of a model by their paths, such as `layers[0].weight`."""


def by_path(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by their paths."""
    leaves = jtu.tree_leaves_with_path(tree)
    return {jtu.keystr(path).removeprefix("."): leaf for path, leaf in leaves}


Hyperpriors = Mapping[str, Any]
"""Distributions by name, or further such mappings."""


class Prior(Module):
    """What is believed of the parameters of a model before it sees data.

    A prior of your own has one method to write, `of_leaf`.
    """

    def hyperpriors(self, leaves: Leaves) -> Hyperpriors:
        """The distributions of what the prior itself does not know, by name.

        **Arguments:**

        - `leaves`: the parameters that the prior is for.
        """
        return {}

    @abc.abstractmethod
    def of_leaf(self, path: str, leaf: jax.ShapeDtypeStruct, hyper: Mapping[str, Any]) -> Any:
        """The distribution of one parameter.

        **Arguments:**

        - `path`: where it is in the model.
        - `leaf`: its shape and dtype.
        - `hyper`: the values of `hyperpriors`, in standard space.

        **Returns:** a distribution of NumPyro, whose draws have the shape of the parameter, or one
        that can be expanded to it.
        """


class IndependentPrior(Prior):
    """One distribution for each number among the parameters."""

    distribution: Any

    def __check_init__(self):
        check_distribution(self.distribution, "prior")

    def of_leaf(self, path: str, leaf: jax.ShapeDtypeStruct, hyper: Mapping[str, Any]) -> Any:
        return self.distribution


def as_prior(prior: Any) -> Prior:
    """`prior`, with a distribution of NumPyro standing for all parameters.

    **Raises:** `TypeError` if it is neither a prior nor a distribution.
    """
    if isinstance(prior, Prior):
        return prior
    if is_distribution(prior):
        return IndependentPrior(prior)
    raise TypeError(
        "prior must be a distribution of `numpyro.distributions` or a prior of eqxlike.bayes, such "
        f"as `bayes.normal(0.0, 1.0)`; got {prior!r}."
    )


def fitted(distribution: Any, path: str, leaf: jax.ShapeDtypeStruct) -> Any:
    """The distribution with draws of the shape of the parameter.

    **Raises:** `ValueError` if it cannot have that shape.
    """
    event_dim = len(distribution.event_shape)
    batch = leaf.shape[: len(leaf.shape) - event_dim]
    try:
        expanded = distribution.expand(batch)
    except (ValueError, TypeError):
        expanded = None
    if expanded is None or expanded.batch_shape + expanded.event_shape != leaf.shape:
        raise ValueError(
            f"The prior of {path} does not fit: the parameter has shape {leaf.shape}, and draws of "
            f"{type(distribution).__name__} have batch shape {distribution.batch_shape} and event "
            f"shape {distribution.event_shape}."
        )
    return expanded


# --- Priors around zero whose width may itself be unknown ---


def _normal(loc: Array, scale: Array) -> Any:
    # NumPyro cannot check a traced scale. It would only mask values that are not finite, which took
    # value and gradient of two layers of 64 from 1.0 to 1.4 of the time of a hand-written density.
    validates = False if isinstance(scale, Tracer) else None
    return distributions().Normal(loc, scale, validate_args=validates)


class NormalPrior(Prior):
    """What `bayes.normal` returns."""

    loc: float
    scale: Any

    def __check_init__(self):
        check_number(self.loc, "normal: loc")
        check_positive(self.scale, "normal: scale")

    def hyperpriors(self, leaves: Leaves) -> dict[str, Any]:
        return {"scale": self.scale} if is_distribution(self.scale) else {}

    def of_leaf(self, path: str, leaf: jax.ShapeDtypeStruct, hyper: Mapping[str, Any]) -> Any:
        scale = hyper.get("scale", self.scale)
        loc, scale = (jnp.asarray(each, leaf.dtype) for each in (self.loc, scale))
        return _normal(loc, scale)


def normal(loc: float = 0.0, scale: Any = 1.0) -> NormalPrior:
    """Independent normal priors.

    **Arguments:**

    - `loc`: the mean of each parameter.
    - `scale`: its standard deviation; or a distribution of NumPyro over positive numbers: then all
      parameters share one scale, which is an unknown too.

    >>> import numpyro.distributions as dist
    >>> hierarchical = normal(0.0, dist.HalfCauchy(1.0))
    """
    return NormalPrior(loc, scale)


class HorseshoePrior(Prior):
    """What `bayes.horseshoe` returns."""

    scale: float

    def __check_init__(self):
        positive_number(self.scale, "horseshoe: scale")

    def hyperpriors(self, leaves: Leaves) -> dict[str, Any]:
        half_cauchy = distributions().HalfCauchy
        local = {
            path: half_cauchy(jnp.ones((), leaf.dtype)).expand(leaf.shape)
            for path, leaf in leaves.items()
        }
        return {"shrinkage": half_cauchy(self.scale), "local": local}

    def of_leaf(self, path: str, leaf: jax.ShapeDtypeStruct, hyper: Mapping[str, Any]) -> Any:
        scale = hyper["shrinkage"].astype(leaf.dtype) * hyper["local"][path]
        return _normal(jnp.zeros((), leaf.dtype), scale)


def horseshoe(scale: float = 1.0) -> HorseshoePrior:
    """The horseshoe: most parameters near zero, and some anywhere.

    Each is `Normal(0, shrinkage * local)`, with `shrinkage ~ HalfCauchy(scale)` shared by all and
    `local ~ HalfCauchy(1)` for each; all of them are unknowns (Carvalho, Polson and Scott, 2010,
    "The horseshoe estimator for sparse signals").

    **Arguments:**

    - `scale`: the smaller, the more parameters are near zero.
    """
    return HorseshoePrior(scale)


# --- Priors that differ from one part of a model to another ---


class PriorByPath(Prior):
    """What `bayes.prior_by_path` returns."""

    which: tuple[Which, ...] = field(static=True)
    priors: tuple[Prior, ...]

    def hyperpriors(self, leaves: Leaves) -> dict[str, Any]:
        found: dict[str, Any] = {}
        places = {path: self._place(path, leaf, leaves) for path, leaf in leaves.items()}
        for place, (which, prior) in enumerate(zip(self.which, self.priors, strict=True)):
            own = {path: leaves[path] for path, its_place in places.items() if its_place == place}
            if not own:
                raise ValueError(
                    f"prior_by_path: {which!r} matches no parameter that an earlier pattern left. "
                    f"The parameters are {', '.join(leaves)}."
                )
            if hyper := prior.hyperpriors(own):
                found[_name(which, place)] = dict(hyper)
        return found

    def of_leaf(self, path: str, leaf: jax.ShapeDtypeStruct, hyper: Mapping[str, Any]) -> Any:
        place = self._place(path, leaf, {path: leaf})
        own = hyper.get(_name(self.which[place], place), {})
        return self.priors[place].of_leaf(path, leaf, own)

    def _place(self, path: str, leaf: jax.ShapeDtypeStruct, leaves: Leaves) -> int:
        for place, which in enumerate(self.which):
            if path_matches(which, path, leaf):
                return place
        raise ValueError(
            f"prior_by_path: no pattern matches {path}; the patterns are "
            f"{', '.join(map(repr, self.which))}. `**` matches every parameter."
        )


def prior_by_path(priors: Mapping[Which, Any] | Sequence[tuple[Which, Any]]) -> PriorByPath:
    """Priors by patterns of the paths of parameters; the first pattern that matches counts.

    **Arguments:**

    - `priors`: from a pattern to a prior, or a distribution of NumPyro. A pattern is a path such as
      `layers[0].weight`, in which `*` matches a name or an index and `**` anything; or a
      function of path and `jax.ShapeDtypeStruct` that returns a bool.

    **Returns:** the prior; `Unknowns.prior` has what one of them does not know under its pattern.

    **Raises:** `ValueError` for no pattern, `TypeError` for one that is neither a string nor a
    function. `Posterior` raises `ValueError` for a parameter that no pattern matches, and for a
    pattern that matches none.

    >>> import numpyro.distributions as dist
    >>> prior = prior_by_path({"layers[*].weight": dist.Laplace(0.0, 1.0), "**": dist.Normal()})
    """
    pairs = list(priors.items() if isinstance(priors, Mapping) else priors)
    if not pairs:
        raise ValueError("prior_by_path needs at least one pattern.")
    for which, _ in pairs:
        if not (isinstance(which, str) or callable(which)):
            raise TypeError(
                "prior_by_path: a pattern must be a string or a function of path and leaf, got "
                f"{which!r}."
            )
    which, own = zip(*pairs, strict=True)
    return PriorByPath(tuple(which), tuple(map(as_prior, own)))


def _name(which: Which, place: int) -> str:
    return which if isinstance(which, str) else f"{getattr(which, '__name__', 'pattern')} {place}"


# --- The priors that Bayesian layers have themselves ---


class PriorOfLayers(Prior):
    """Normal priors around zero, as wide as the layers of `nn` say whose weights are random.

    - `scales`: the standard deviations of their arrays, by path.
    """

    scales: dict[str, Array]

    def of_leaf(self, path: str, leaf: jax.ShapeDtypeStruct, hyper: Mapping[str, Any]) -> Any:
        if path not in self.scales:
            raise ValueError(
                f"Posterior: {path} is in no layer with random weights, and so has no prior yet. "
                'Give one for all parameters, such as `bayes.prior_by_path({"layers[0].*": ..., '
                '"**": ...})`, or freeze it.'
            )
        scale = self.scales[path].astype(leaf.dtype)
        return _normal(jnp.zeros((), leaf.dtype), scale)
