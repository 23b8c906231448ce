"""Priors of parameters, and likelihoods of targets."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, PyTree

from .. import Module, field
from .._check_numbers import check_number, hint_to_call, positive_number
from .._compat import Tracer
from ..extend import Which, path_matches
from ._libraries import (
    check_distribution,
    check_positive,
    distributions,
    is_distribution,
    summed_log_prob,
)

# --- Priors ---


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
                found[pattern_name(which, place)] = dict(hyper)
        return found

    def of_leaf(self, path: str, leaf: jax.ShapeDtypeStruct, hyper: Mapping[str, Any]) -> Any:
        place = self._place(path, leaf, {path: leaf})
        own = hyper.get(pattern_name(self.which[place], place), {})
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


def pattern_name(which: Which, place: int) -> str:
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


# --- Likelihoods ---


Struct = jax.ShapeDtypeStruct


class Likelihood(Module):
    """The distribution of targets, given the outputs of the network.

    A custom likelihood must define one method, `distribution`. If the likelihood has unknowns of
    its own, also define `unknowns`, which returns their priors. By default, `log_prob` uses
    `distribution`. Override `log_prob` to compute the log density in another way. Inference uses
    `log_prob`, and predictions use `distribution`.
    """

    def unknowns(self) -> Mapping[str, Any]:
        """The priors of the likelihood's own unknowns, by name."""
        return {}

    @abc.abstractmethod
    def distribution(self, output: Any, unknowns: Mapping[str, Any]) -> Any:
        """The distribution of the target of one example.

        **Arguments:**

        - `output`: the output of the network for this example.
        - `unknowns`: the values of the likelihood's unknowns by name, in standard space.

        **Returns:** a NumPyro distribution.
        """

    def log_prob(self, output: Any, unknowns: Mapping[str, Any], y: Any) -> Float[Array, ""]:
        """The log density of the target of one example."""
        return summed_log_prob(self.distribution(output, unknowns), y)

    def check(self, output: Any, y: Struct) -> None:
        """Raises `ValueError` or `TypeError` for incompatible shapes or dtypes.

        **Arguments:**

        - `output`: the shapes and dtypes of the network's output for one example.
        - `y`: the shape and dtype of the target of one example.
        """

    def check_values(self, output: Any, y: Array) -> None:
        """Raises `ValueError` if targets, shape `(N, ...)`, have values that are not allowed.

        Called after `check`, with finite targets.
        """


class HasScale(Likelihood):
    """Base of likelihoods with a scale. The scale is known, unknown, or an output of the network.

    With `"head"`, the network returns all centres, then one number for each scale. The softplus of
    this number is the scale.
    """

    scale: Any = field(default=1.0, converter=lambda s: np.asarray(s) if type(s) is list else s)

    def __check_init__(self):
        name = f"{type(self).__name__}: scale"
        if not isinstance(self.scale, str):
            check_positive(self.scale, name, is_array=True)
        elif self.scale != "head":
            raise ValueError(
                f'{name} must be a number, an array, a distribution or "head", got {self.scale!r}.'
            )

    def unknowns(self) -> dict[str, Any]:
        return {"scale": self.scale} if is_distribution(self.scale) else {}

    def loc_and_scale(self, output: Array, unknowns: Mapping[str, Any]) -> tuple[Array, Array]:
        """The centre and scale of the targets of one example."""
        if not isinstance(self.scale, str):
            scale = jnp.asarray(unknowns.get("scale", self.scale), output.dtype)
            return output, jnp.broadcast_to(scale, output.shape)
        loc, raw = output if output.shape == (2,) else output.reshape(2, -1)
        return loc, jax.nn.softplus(raw)

    def check(self, output: Any, y: Struct) -> None:
        name = type(self).__name__
        if isinstance(self.scale, str):
            if len(y.shape) > 1 or y.shape == (1,):
                hint = "; pass `y[:, 0]`" if y.shape == (1,) else ""
                raise ValueError(
                    f'{name}: with scale="head" the target of an example must have shape (), or '
                    f"(k,) with k at least 2; got {y.shape}{hint}."
                )
            wanted = (2,) if y.shape == () else (2 * y.shape[0],)
            what = f"{wanted}: a centre and a scale (before softplus) for each target"
        else:
            wanted, what = y.shape, f"{y.shape}, the shape of a target"
            of = self.scale
            shape = of.shape() if is_distribution(of) else jnp.shape(of)
            if shape not in ((), y.shape):
                raise ValueError(
                    f"{name}: scale must have shape (), or the shape of the target of an example, "
                    f"{y.shape}; got shape {shape}."
                )
        check_output(name, output, wanted, what)
        if not jnp.issubdtype(y.dtype, jnp.floating):
            raise TypeError(
                f"{name} expects floating-point targets, got dtype {y.dtype}. Pass "
                "`y.astype(float)`."
            )


def check_output(name: str, output: Any, wanted: tuple[int, ...] | None, what: str) -> None:
    """Raises `TypeError` or `ValueError` unless the network returns one array of shape `wanted`."""
    if not isinstance(output, Struct):
        raise TypeError(
            f"{name} expects the network to return one array per example, but it returns a "
            f"{type(output).__name__}."
        )
    if wanted is None or output.shape != wanted:
        hint = ' A last layer of size "scalar" returns shape ().' if wanted == () else ""
        if wanted == (1,) and output.shape == ():
            hint = " Pass `y[:, 0]`."
        raise ValueError(
            f"{name} expects the network to return, for one example, an array of shape {what}; got "
            f"shape {output.shape}.{hint}"
        )


def check_counts(name: str, y: Struct, what: str, shape: tuple[int, ...] = ()) -> None:
    """Raises `ValueError` unless a target is an array of integers or booleans with this `shape`.

    **Arguments:**

    - `shape`: the shape of the network's output, without its axis of classes.
    """
    is_whole = jnp.issubdtype(y.dtype, jnp.integer) or jnp.issubdtype(y.dtype, jnp.bool_)
    if not is_whole or y.shape != shape:
        wanted = f"integers of shape {shape}" if shape else "one integer"
        hint = ""
        if y.shape == shape:
            hint = " Pass `y.astype(int)`."
        elif y.shape == (*shape, 1):
            hint = " Pass `y[..., 0]`." if shape else " Pass `y[:, 0]`."
        elif y.shape[: len(shape)] == shape:
            hint = " Pass `y.argmax(axis=-1)` if labels are one-hot."
        raise ValueError(
            f"{name} expects {wanted} as the target of an example, {what}; got shape {y.shape} "
            f"and dtype {y.dtype}.{hint}"
        )


def check_range(name: str, y: Array, most: int | None, why: str) -> None:
    """Raises `ValueError` unless targets lie between 0 and `most`.

    If `most` is `None`, there is no upper limit. Traced targets are not checked.
    """
    if isinstance(y, Tracer):
        return
    least, greatest = int(y.min()), int(y.max())
    if least < 0 or (most is not None and greatest > most):
        wanted = "0 or more" if most is None else f"0 to {most}"
        hint = ""
        if most is not None and (least, greatest) == (-1, 1):
            hint = " For labels -1 and 1, pass `(y > 0).astype(int)`."
        elif most is not None and (least, greatest) == (1, most + 1):
            hint = " Classes count from 0: pass `y - 1`."
        raise ValueError(
            f"{name} expects targets of {wanted}, {why}; got targets from {least} to {greatest}."
            f"{hint}"
        )


# --- Normal targets ---


class Gaussian(HasScale):
    """Normal targets, with the network's output as their mean.

    - `scale`: the standard deviation, in the unit of the targets. It may be a number; an array with
      the shape of an example's target; a NumPyro distribution over positive numbers or arrays of
      positive numbers; or `"head"`. With a distribution, the scale is an unknown. With `"head"`,
      the network returns the scale.

    With `"head"`, the network returns `2 * k` numbers for the k targets of an example. The first k
    numbers are the means. The softplus of the last k numbers gives the scales.

    >>> import jax.numpy as jnp
    >>> output = jnp.array([10.0, 20.0, 0.0, 1.0])  # for targets of shape (2,)
    >>> target = Gaussian(scale="head").distribution(output, {})
    >>> target.loc.tolist(), [round(scale, 2) for scale in target.scale.tolist()]
    ([10.0, 20.0], [0.69, 1.31])
    """

    def distribution(self, output: Any, unknowns: Mapping[str, Any]) -> Any:
        return distributions().Normal(*self.loc_and_scale(output, unknowns))


# --- Targets with outliers ---


class StudentT(HasScale):
    """Student's t targets, centred at the network's output. Heavy tails allow outliers.

    - `scale`: as for `Gaussian`, including `"head"`. The standard deviation is larger than the
      scale, and infinite for 2 or fewer degrees of freedom.
    - `degrees_of_freedom`: a number, or a NumPyro distribution over positive numbers. Fewer degrees
      of freedom mean heavier tails.
    """

    degrees_of_freedom: Any = 4.0

    def __check_init__(self):
        check_positive(self.degrees_of_freedom, "StudentT: degrees_of_freedom")

    def unknowns(self) -> dict[str, Any]:
        own = self.degrees_of_freedom
        return super().unknowns() | ({"degrees_of_freedom": own} if is_distribution(own) else {})

    def distribution(self, output: Any, unknowns: Mapping[str, Any]) -> Any:
        loc, scale = self.loc_and_scale(output, unknowns)
        degrees_of_freedom = unknowns.get("degrees_of_freedom", self.degrees_of_freedom)
        return distributions().StudentT(jnp.asarray(degrees_of_freedom, loc.dtype), loc, scale)


# --- Two classes ---


class Bernoulli(Likelihood):
    """Targets 0 and 1, or booleans. The network returns the logit of target 1, shape `()`."""

    def distribution(self, output: Any, unknowns: Mapping[str, Any]) -> Any:
        return distributions().Bernoulli(logits=output)

    def check(self, output: Any, y: Struct) -> None:
        check_output("Bernoulli", output, (), "(), the logit of 1")
        check_counts("Bernoulli", y, "0 or 1")

    def check_values(self, output: Any, y: Array) -> None:
        check_range("Bernoulli", y, 1, "the two classes")


# --- Several classes ---


class Categorical(Likelihood):
    """Targets 0 to C - 1, or booleans for 0 and 1. The network returns C logits.

    An example may have several targets, such as the tokens of a text. For labels of shape `(T,)`
    the network returns logits of shape `(T, C)`. The log density of the example is the sum over its
    labels.
    """

    def distribution(self, output: Any, unknowns: Mapping[str, Any]) -> Any:
        return distributions().Categorical(logits=output)

    def log_prob(self, output: Any, unknowns: Mapping[str, Any], y: Any) -> Float[Array, ""]:
        # NumPyro uses labels as indices, and booleans are no valid indices.
        return super().log_prob(output, unknowns, jnp.asarray(y).astype(jnp.int32))

    def check(self, output: Any, y: Struct) -> None:
        shape = getattr(output, "shape", ())
        wanted = shape if shape and shape[-1] > 1 else None
        check_output(
            "Categorical", output, wanted, "(C,), or (*T, C): a logit for each of C classes"
        )
        check_counts("Categorical", y, "the number of a class", shape[:-1])

    def check_values(self, output: Any, y: Any) -> None:
        check_range("Categorical", y, output.shape[-1] - 1, "one class for each logit")


# --- Counts ---


class Poisson(Likelihood):
    """Counts as targets. The network returns the logarithm of the rate, shape `()`."""

    def distribution(self, output: Any, unknowns: Mapping[str, Any]) -> Any:
        return distributions().Poisson(jnp.exp(output))

    def log_prob(self, output: Any, unknowns: Mapping[str, Any], y: Any) -> Float[Array, ""]:
        # NumPyro takes the logarithm of the rate. If the rate rounds to 0, the gradient is NaN.
        y = jnp.asarray(y).astype(output.dtype)
        return y * output - jnp.exp(output) - jax.lax.lgamma(y + 1)

    def check(self, output: Any, y: Struct) -> None:
        check_output("Poisson", output, (), "(), the logarithm of the rate")
        check_counts("Poisson", y, "a count")

    def check_values(self, output: Any, y: Array) -> None:
        check_range("Poisson", y, None, "counts")
