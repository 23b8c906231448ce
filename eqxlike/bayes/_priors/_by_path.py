"""Priors that differ from one part of a model to another."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from ..._module import field
from ..._pytree import Which, path_matches
from ._prior import Leaves, Prior, as_prior


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


def prior_by_path(
    priors: Mapping[Which, Any] | Sequence[tuple[Which, Any]],
) -> PriorByPath:
    """Priors by patterns of the paths of parameters; the first pattern that matches counts.

    **Arguments:**

    - `priors`: from a pattern to a prior, or a distribution of NumPyro. A pattern is a path such as
      `layers[0].weight`, in which `*` stands for a name or an index and `**` for anything; or a
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
