"""Priors of parameters: the base class, normal and horseshoe priors, and priors by path."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, PyTree

from .. import Module, field
from .._check_numbers import check_number, hint_to_call, positive_number
from .._compat import Tracer
from ..extend import Which, path_matches
from ._libraries import check_distribution, check_positive, distributions, is_distribution

Leaves = Mapping[str, jax.ShapeDtypeStruct]
"""The parameters of a model by path, such as `layers[0].weight`."""


def by_path(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by path."""
    leaves = jtu.tree_leaves_with_path(tree)
    return {jtu.keystr(path).removeprefix("."): leaf for path, leaf in leaves}


Hyperpriors = Mapping[str, Any]
"""A nested mapping from names to distributions."""


class Prior(Module):
    """The prior distribution of the parameters of a model.

    A custom prior must define one method, `of_leaf`.
    """

    def hyperpriors(self, leaves: Leaves) -> Hyperpriors:
        """The distributions of the prior's own unknowns, by name.

        **Arguments:**

        - `leaves`: the parameters that have this prior.
        """
        return {}

    @abc.abstractmethod
    def of_leaf(self, path: str, leaf: jax.ShapeDtypeStruct, hyper: Mapping[str, Any]) -> Any:
        """The distribution of one parameter.

        **Arguments:**

        - `path`: path of the parameter in the model.
        - `leaf`: shape and dtype of the parameter.
        - `hyper`: values of the unknowns in `hyperpriors`, in standard space.

        **Returns:** a NumPyro distribution with the shape of the parameter, or with a shape that
        can be expanded to the parameter's shape.
        """


class IndependentPrior(Prior):
    """The same distribution for every parameter."""

    distribution: Any

    def __check_init__(self):
        check_distribution(self.distribution, "prior")

    def of_leaf(self, path: str, leaf: jax.ShapeDtypeStruct, hyper: Mapping[str, Any]) -> Any:
        return self.distribution


def as_prior(prior: Any) -> Prior:
    """Converts a NumPyro distribution to a `Prior`; a `Prior` is returned unchanged.

    **Raises:** `TypeError` if `prior` is neither a prior nor a distribution.
    """
    if isinstance(prior, Prior):
        return prior
    if is_distribution(prior):
        return IndependentPrior(prior)
    raise TypeError(
        "prior must be a distribution from `numpyro.distributions` or a bayes.Prior, such as "
        f"`bayes.normal(0.0, 1.0)`; got {prior!r}{hint_to_call(prior)}."
    )


def fitted(distribution: Any, path: str, leaf: jax.ShapeDtypeStruct) -> Any:
    """Expands a distribution to the shape of a parameter.

    **Raises:** `ValueError` if the shapes are incompatible.
    """
    event_dim = len(distribution.event_shape)
    batch = leaf.shape[: len(leaf.shape) - event_dim]
    try:
        expanded = distribution.expand(batch)
    except (ValueError, TypeError):
        expanded = None
    if expanded is None or expanded.batch_shape + expanded.event_shape != leaf.shape:
        raise ValueError(
            f"The prior of {path} has an incompatible shape: the parameter has shape {leaf.shape}, "
            f"and {type(distribution).__name__} has batch shape {distribution.batch_shape} and "
            f"event shape {distribution.event_shape}."
        )
    return expanded


# --- Normal and horseshoe priors ---


def _normal(loc: Array, scale: Array) -> Any:
    # Do not validate a traced scale, because NumPyro cannot check its value. Validation would only
    # mask values that are not finite, and make value and gradient 1.4 times as slow for two layers
    # of width 64.
    validates = False if isinstance(scale, Tracer) else None
    return distributions().Normal(loc, scale, validate_args=validates)


class NormalPrior(Prior):
    """The prior that `bayes.normal` returns."""

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

    - `loc`: the mean.
    - `scale`: the standard deviation, or a NumPyro distribution over positive numbers. With a
      distribution, all parameters share one unknown scale.

    >>> import numpyro.distributions as dist
    >>> hierarchical = normal(0.0, dist.HalfCauchy(1.0))
    """
    return NormalPrior(loc, scale)


class HorseshoePrior(Prior):
    """The prior that `bayes.horseshoe` returns."""

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
    """The horseshoe prior: most parameters are near zero, and a few may be large.

    A parameter has the prior `Normal(0, shrinkage * local)`. `shrinkage ~ HalfCauchy(scale)` is
    shared by all parameters, and each parameter has its own `local ~ HalfCauchy(1)`. `shrinkage`
    and all `local` are unknowns (Carvalho, Polson and Scott, 2010, "The horseshoe estimator for
    sparse signals").

    **Arguments:**

    - `scale`: scale of the prior of `shrinkage`. A smaller scale keeps more parameters near zero.
    """
    return HorseshoePrior(scale)


# --- Priors by path ---


class PriorByPath(Prior):
    """The prior that `bayes.prior_by_path` returns."""

    which: tuple[Which, ...] = field(static=True)
    priors: tuple[Prior, ...]

    def hyperpriors(self, leaves: Leaves) -> dict[str, Any]:
        found: dict[str, Any] = {}
        places = {path: self._place(path, leaf, leaves) for path, leaf in leaves.items()}
        for place, (which, prior) in enumerate(zip(self.which, self.priors, strict=True)):
            own = {path: leaves[path] for path, its_place in places.items() if its_place == place}
            if not own:
                raise ValueError(
                    f"prior_by_path: {which!r} matches no parameter, or only parameters that an "
                    f"earlier pattern matches. The parameters are {', '.join(leaves)}."
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
    """Chooses the prior of each parameter by its path. The first matching pattern is used.

    **Arguments:**

    - `priors`: mapping from a pattern to a prior or a NumPyro distribution. A pattern is a path
      such as `layers[0].weight`, or a function of path and `jax.ShapeDtypeStruct` that returns a
      bool. In a path, `*` matches a name or an index, and `**` matches anything.

    **Returns:** the prior. In `Unknowns.prior`, the unknowns of each prior are stored under its
    pattern.

    **Raises:** `ValueError` if there is no pattern. `TypeError` for a pattern that is neither a
    string nor a function. `Posterior` raises `ValueError` for a parameter without a matching
    pattern, and for a pattern without a matching parameter.

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


# --- Priors of Bayesian layers ---


class PriorOfLayers(Prior):
    """The priors of Bayesian layers of `nn`: normal, with mean zero.

    - `scales`: standard deviations of the layers' arrays, by path.
    """

    scales: dict[str, Array]

    def of_leaf(self, path: str, leaf: jax.ShapeDtypeStruct, hyper: Mapping[str, Any]) -> Any:
        if path not in self.scales:
            raise ValueError(
                f"Posterior: {path} has no prior, because it is in no Bayesian layer. Pass a prior "
                'for all parameters, such as `bayes.prior_by_path({"layers[0].*": ..., '
                '"**": ...})`, or freeze the parameter.'
            )
        scale = self.scales[path].astype(leaf.dtype)
        return _normal(jnp.zeros((), leaf.dtype), scale)
