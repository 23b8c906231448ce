"""A model with priors, a likelihood and data: the log density of what is not known."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from .._dtypes import wider
from .._module import Module
from .._partition import Rest, split
from .._pytree import is_inexact_array
from .._transforms import filter_eval_shape, filter_jit
from ..nn import BayesianLayer, StateIndex, inference_mode, posterior_mean
from ..nn._bayesian import posterior_scales, prior_scales
from ._data import check_data, num_examples, struct_of_example
from ._library_rules import as_libraries_compute
from ._likelihoods import Likelihood
from ._links import check_continuous, check_proper, constrained, log_det_jacobian, unconstrained
from ._numpyro import check_distribution, is_distribution, summed_log_prob
from ._priors import Prior, as_prior, fitted, prior_of_layers
from ._unknowns import Unknowns

Data = tuple[PyTree[Array], PyTree[Array]]


class Posterior(Module):
    """The distribution of the unknowns of a model, given data, as a log density.

    It is known up to a constant: the log prior and the log likelihood. The unknowns are the
    floating-point arrays of the model that are not frozen, and what prior and likelihood do not
    know themselves. The model is taken in inference mode: a density has no noise of `nn.Dropout`.

    >>> import jax, jax.numpy as jnp, numpyro.distributions as dist
    >>> from eqxlike import bayes, nn
    >>> model = nn.MLP(1, "scalar", width_size=8, depth=1, key=jax.random.key(0))
    >>> x = jnp.linspace(-1.0, 1.0, 20)[:, None]
    >>> likelihood = bayes.Gaussian(scale=dist.Gamma(2.0, 1.0))
    >>> target = bayes.Posterior(model, bayes.normal(0.0, 1.0), likelihood, (x, x[:, 0] ** 2))
    >>> vector, log_density, unflatten = target.flat(linked=True, key=jax.random.key(1))
    >>> vector.shape, jax.jit(log_density)(vector).shape
    ((26,), ())
    >>> unflatten(vector).likelihood["scale"].shape
    ()
    """

    network: Any
    prior: Prior
    likelihood: Likelihood
    data: Data
    initial_scales: PyTree | None

    def __init__(self, model: Any, prior: Any, likelihood: Likelihood, data: Data):
        """**Arguments:**

        - `model`: any Module that is called with one example. Of layers whose weights are random,
          `nn.BayesianLinear` and its kin, it has the posterior means, as plain layers; their
          posterior standard deviations are where `bayes.MeanField` begins.
        - `prior`: a prior of `bayes`, or a distribution of NumPyro for each number; `None` for that
          of layers whose weights are random.
        - `likelihood`: how the targets are distributed around what the model returns.
        - `data`: `(x, y)`, arrays or pytrees of arrays with one leading length, `N` examples.

        **Raises:** `TypeError` or `ValueError` that says what does not fit: data of different
        lengths or with NaN, a network that returns another shape than the likelihood expects, a
        prior that does not fit a parameter, has no integral, or is for none.
        """
        if not isinstance(likelihood, Likelihood):
            raise TypeError(
                "Posterior: likelihood must be one of eqxlike.bayes, such as `bayes.Gaussian()`; "
                f"got {likelihood!r}."
            )
        is_random = any(isinstance(each, BayesianLayer) for each in _layers(model))
        if prior is None and not is_random:
            raise TypeError(
                "Posterior: the model has no layer with a prior of its own, such as "
                "`nn.BayesianLinear`: give a prior, such as `bayes.normal(0.0, 1.0)`."
            )
        self.network = inference_mode(posterior_mean(model))
        self.initial_scales = posterior_scales(model) if is_random else None
        self.prior = prior_of_layers(prior_scales(model)) if prior is None else as_prior(prior)
        self.likelihood = likelihood
        self.data = check_data(data)
        if not self._arrays()[0]:
            raise ValueError("Posterior: the model has no floating-point array that is trained.")
        check_real(self._structs())
        x, y = (struct_of_example(each) for each in self.data)
        output = output_of(self.network, x)
        likelihood.check(output, y)
        likelihood.check_values(output, self.data[1])
        self._check_priors()
        own = jtu.tree_map(_median, dict(likelihood.unknowns()), is_leaf=is_distribution)
        check_target_shape(likelihood, output, own, y)

    def _check_priors(self) -> None:
        for path, distribution in jtu.tree_leaves_with_path(
            self._hyperpriors(), is_leaf=is_distribution
        ):
            name = f"The prior of {jtu.keystr(path)}"
            check_distribution(distribution, name)
            check_proper(distribution, name)
            check_continuous(distribution, name)
        # Shapes alone decide, so the values do not matter.
        hyperpriors = self.prior.hyperpriors(self._structs())
        hyper = jtu.tree_map(_median, hyperpriors, is_leaf=is_distribution)
        for path, distribution in zip(self._structs(), self._priors_of_leaves(hyper), strict=True):
            check_proper(distribution, f"The prior of {path}")
            check_continuous(distribution, f"The prior of {path}")

    # --- the parts ---

    @property
    def num_data(self) -> int:
        """`N`, the number of examples."""
        return num_examples(self.data, "Posterior")

    def _arrays(self) -> tuple[list[Array], Rest]:
        return split(self.network, is_inexact_array)

    def _structs(self) -> dict[str, jax.ShapeDtypeStruct]:
        arrays, rest = self._arrays()
        marked = rest.merge_into(None, arrays)
        return {
            jtu.keystr(path).removeprefix("."): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for path, leaf in jtu.tree_leaves_with_path(marked)
        }

    def _check_one(self, unknowns: Unknowns, is_linked: bool = False) -> None:
        arrays, rest = self._arrays()
        structs = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arrays]
        outer = jtu.tree_map(
            lambda distribution: jax.ShapeDtypeStruct(distribution.shape(), float),
            self._hyperpriors(),
            is_leaf=is_distribution,
        )
        wanted = Unknowns(rest.merge_into(None, structs), outer["likelihood"], outer["prior"])
        check_one_draw(unknowns, wanted, is_linked)

    def _hyperpriors(self) -> dict[str, Any]:
        """The distributions of all that is not a parameter of the model."""
        return {
            "prior": dict(self.prior.hyperpriors(self._structs())),
            "likelihood": dict(self.likelihood.unknowns()),
        }

    def hyperprior_names(self) -> list[str]:
        """What the prior does not know itself, such as `scale`."""
        found = jtu.tree_leaves_with_path(self._hyperpriors()["prior"], is_leaf=is_distribution)
        return [jtu.keystr(path, simple=True, separator=".") for path, _ in found]

    def parameter_priors(self, unknowns: Unknowns) -> dict[str, Any]:
        """The prior of each parameter by its path, in tree order, given the unknowns of priors."""
        return dict(zip(self._structs(), self._priors_of_leaves(unknowns.prior), strict=True))

    def _priors_of_leaves(self, hyper: Any) -> list[Any]:
        return [
            fitted(self.prior.of_leaf(path, struct, hyper), path, struct)
            for path, struct in self._structs().items()
        ]

    def _by_parts(
        self, of_one: Callable[[Any, Any], tuple[Any, Array]], unknowns: Unknowns
    ) -> tuple[Unknowns, list[Array]]:
        """Does something with each unknown and its prior, those of the prior itself first.

        **Arguments:**

        - `of_one`: from a distribution and what stands beside it in `unknowns`, to a value and a
          term of a sum. The value is what the priors of the others see.
        """
        terms: list[Array] = []

        def of_each(distributions: Any, values: Any) -> Any:
            def run(distribution: Any, value: Any) -> Any:
                found, term = of_one(distribution, value)
                terms.append(term)
                return found

            return jtu.tree_map(run, distributions, values, is_leaf=is_distribution)

        outer = self._hyperpriors()
        hyper = of_each(outer["prior"], unknowns.prior)
        own = of_each(outer["likelihood"], unknowns.likelihood)
        rest = self._arrays()[1]
        leaves = of_each(self._priors_of_leaves(hyper), jtu.tree_leaves(unknowns.model))
        return Unknowns(rest.merge_into(None, leaves), own, hyper), terms

    # --- densities ---

    def log_prior(self, unknowns: Unknowns) -> Float[Array, ""]:
        """The log density of the prior, in nats, at unknowns in standard space."""
        self._check_one(unknowns)
        _, terms = self._by_parts(
            lambda distribution, value: (value, summed_log_prob(distribution, value)), unknowns
        )
        return _sum(terms)

    def log_likelihood(self, unknowns: Unknowns, data: Data | None = None) -> Float[Array, " N"]:
        """The log density of each example, in nats, at unknowns in standard space.

        **Arguments:**

        - `data`: other examples than the posterior's.
        """
        x, y = self.data if data is None else data
        model, likelihood, own = self.model(unknowns), self.likelihood, unknowns.likelihood
        return jax.vmap(lambda x, y: likelihood.log_prob(model(x), own, y))(x, y)

    def log_density(self, unknowns: Unknowns, linked: bool = False) -> Float[Array, ""]:
        """The log density of the posterior, in nats, up to a constant.

        **Arguments:**

        - `unknowns`: a tree of the form of `initial`.
        - `linked`: whether they are in linked space, where they have no constraints: the density is
          then one of that space, with the log determinant of the link's Jacobian.
        """
        return self._log_density(unknowns, linked, self.data, 1.0)

    def minibatch_log_density(
        self, unknowns: Unknowns, batch: Data, linked: bool = False
    ) -> Float[Array, ""]:
        """An unbiased estimate of `log_density` from `B` examples: their part counts `N / B` times.

        **Arguments:** as those of `log_density`, and

        - `batch`: `(x, y)`, drawn from the data.
        """
        weight = self.num_data / num_examples(batch, "minibatch_log_density")
        return self._log_density(unknowns, linked, batch, weight)

    def _log_density(
        self, unknowns: Unknowns, linked: bool, data: Data, weight: float
    ) -> Float[Array, ""]:
        log_det = jnp.zeros(())
        if linked:
            unknowns, log_det = self.constrain(unknowns)
        terms = [self.log_prior(unknowns), jnp.sum(self.log_likelihood(unknowns, data)) * weight]
        return _sum([*terms, log_det])

    # --- spaces ---

    def constrain(self, linked: Unknowns) -> tuple[Unknowns, Float[Array, ""]]:
        """From linked to standard space, and the log determinant of the Jacobian."""
        self._check_one(linked, is_linked=True)
        unknowns, terms = self._by_parts(
            lambda distribution, value: (
                constrained(distribution, value),
                log_det_jacobian(distribution, value),
            ),
            linked,
        )
        return unknowns, _sum(terms)

    def unconstrain(self, unknowns: Unknowns) -> Unknowns:
        """From standard to linked space: the inverse of `constrain`."""
        pairs: list[Array] = []

        def of_one(distribution: Any, value: Array) -> tuple[Array, Array]:
            pairs.append(unconstrained(distribution, value))
            return value, jnp.zeros(())

        own, _ = self._by_parts(of_one, unknowns)
        # In the order of `_by_parts`.
        values = iter(pairs)
        prior, likelihood = (
            jtu.tree_map(lambda _: next(values), each) for each in (own.prior, own.likelihood)
        )
        return Unknowns(jtu.tree_map(lambda _: next(values), own.model), likelihood, prior)

    def initial(self, *, key: PRNGKeyArray) -> Unknowns:
        """Unknowns to begin with: the arrays of the model, and draws from the priors of the rest.

        They are in standard space. An array of the model that lies outside of the support of its
        prior, or at an end of it, is drawn too.
        """
        return self._drawn(key, keeps_model=True)

    def sample_prior(self, *, key: PRNGKeyArray) -> Unknowns:
        """A draw of all unknowns from the prior, in standard space."""
        return self._drawn(key, keeps_model=False)

    def simulate(self, unknowns: Unknowns, *, key: PRNGKeyArray) -> PyTree[Array]:
        """Targets for the inputs of the data, as these unknowns, in standard space, give them.

        With unknowns from `sample_prior` they are a draw from the prior predictive distribution.

        **Returns:** targets of the form of those of the data.
        """
        x, y = self.data
        model, likelihood, own = self.model(unknowns), self.likelihood, unknowns.likelihood

        def of_one(x: Any, key: PRNGKeyArray) -> Array:
            with as_libraries_compute():
                return likelihood.distribution(model(x), own).sample(key)

        drawn = jax.vmap(of_one)(x, jr.split(key, self.num_data))
        return jtu.tree_map(lambda drawn, like: drawn.astype(like.dtype), drawn, y)

    def _drawn(self, key: PRNGKeyArray, *, keeps_model: bool) -> Unknowns:
        arrays, rest = self._arrays()
        outer = self._hyperpriors()
        size = len(arrays) + len(jtu.tree_leaves(outer, is_leaf=is_distribution))
        keys = iter(jr.split(key, size))

        def draw(distribution: Any) -> Array:
            with as_libraries_compute():
                return distribution.sample(next(keys))

        hyper, own = (
            jtu.tree_map(draw, outer[name], is_leaf=is_distribution)
            for name in ("prior", "likelihood")
        )
        leaves = []
        for array, distribution in zip(arrays, self._priors_of_leaves(hyper), strict=True):
            drawn = draw(distribution).astype(array.dtype)
            if keeps_model:
                is_inside = jnp.all(distribution.support(array))
                # At an end of the support, which may be part of it, the link has no number.
                is_linked = jnp.all(jnp.isfinite(unconstrained(distribution, array)))
                drawn = jnp.where(is_inside & is_linked, array, drawn)
            leaves.append(drawn)
        return Unknowns(rest.merge_into(None, leaves), own, hyper)

    def model(self, unknowns: Unknowns) -> Any:
        """The network with the unknowns of one draw, which are in standard space.

        **Raises:** `ValueError` for arrays of other shapes.
        """
        self._check_one(unknowns)
        return self._arrays()[1].merge(jtu.tree_leaves(unknowns.model))

    def flat(
        self, *, linked: bool = True, key: PRNGKeyArray
    ) -> tuple[
        Float[Array, " d"],
        Callable[[Float[Array, " d"]], Float[Array, ""]],
        Callable[[Float[Array, " d"]], Unknowns],
    ]:
        """The unknowns as one vector, as samplers and optimisers want them.

        **Arguments:**

        - `linked`: whether the vector is in linked space.
        - `key`: for `initial`.

        **Returns:** `(vector, log_density, unflatten)`: where to begin, a function from such a
        vector to the log density, and one to the unknowns, in standard space.
        """
        vector, unravel = _raveled(self, linked, key)

        def log_density(vector: Float[Array, " d"]) -> Float[Array, ""]:
            return self.log_density(unravel(vector), linked)

        def unflatten(vector: Float[Array, " d"]) -> Unknowns:
            unknowns = unravel(vector)
            return self.constrain(unknowns)[0] if linked else unknowns

        return vector, log_density, unflatten


@as_libraries_compute()
@filter_jit
def _raveled(target: Posterior, linked: bool, key: PRNGKeyArray) -> tuple[Any, Any]:
    unknowns = target.initial(key=key)
    return ravel_pytree(target.unconstrain(unknowns) if linked else unknowns)


def _layers(model: Any) -> list[Any]:
    return jtu.tree_leaves(model, is_leaf=lambda node: isinstance(node, BayesianLayer))


def _sum(terms: list[Array]) -> Float[Array, ""]:
    total = terms[0]
    for term in terms[1:]:
        dtype = wider(total.dtype, term.dtype)
        total = total.astype(dtype) + term.astype(dtype)
    return total


def _median(distribution: Any) -> Array:
    """A value in the middle of the support."""
    shape = distribution.batch_shape + distribution.event_shape
    return constrained(distribution, jnp.zeros(shape))


# --- Checks of whether a model, a likelihood and targets fit each other, by shapes alone ---


def output_of(network: Any, x: PyTree[jax.ShapeDtypeStruct]) -> Any:
    """The shapes and dtypes of what a network returns for one example.

    **Raises:** `TypeError` for one that keeps a state.
    """
    try:
        return filter_eval_shape(lambda model, x: model(x), network, x)
    except TypeError as error:
        nodes = jtu.tree_leaves(network, is_leaf=_is_state_index)
        if not any(map(_is_state_index, nodes)):
            raise
        raise TypeError(
            "Posterior calls the model by `model(x)`, and this one has layers that keep a state, "
            "such as `nn.BatchNorm`, which has no likelihood of single examples. Take "
            "`nn.LayerNorm` or `nn.GroupNorm` in their place; or, where the state stays as it is, "
            "a Module of your own that has `nn.freeze(state)`, and whose `__call__(self, x)` "
            "returns `self.model(x, self.state)[0]`."
        ) from error


def _is_state_index(node: Any) -> bool:
    return isinstance(node, StateIndex)


def check_real(parameters: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Raises `TypeError` if one of the parameters, by their paths, is complex."""
    for path, struct in parameters.items():
        if jnp.issubdtype(struct.dtype, jnp.complexfloating):
            raise TypeError(
                f"Posterior: {path} is complex, dtype {struct.dtype}, and priors are over real "
                "numbers. Freeze it by `nn.freeze`, or keep its two parts as arrays."
            )


def check_one_draw(unknowns: Unknowns, wanted: Unknowns, is_linked: bool) -> None:
    """Raises `ValueError` if unknowns have other shapes than one draw has, such as a leading axis.

    **Arguments:**

    - `wanted`: shapes and dtypes in standard space, in place of arrays.
    - `is_linked`: whether the unknowns are in linked space, where arrays may be smaller.
    """
    structs = dict(jtu.tree_leaves_with_path(wanted))
    for path, leaf in jtu.tree_leaves_with_path(unknowns):
        ours, theirs = jnp.shape(leaf), structs[path].shape if path in structs else jnp.shape(leaf)
        if len(ours) > len(theirs) if is_linked else ours != theirs:
            raise ValueError(
                f"Posterior: the unknowns have shape {ours} at "
                f"{jtu.keystr(path).removeprefix('.')}, where one draw has {theirs}. Of draws with "
                "a leading axis take one, `jax.tree.map(lambda each: each[0], samples)`, or all "
                "with `jax.vmap`."
            )


def check_target_shape(
    likelihood: Likelihood, output: Any, own: Any, y: PyTree[jax.ShapeDtypeStruct]
) -> None:
    """Raises `ValueError` if a likelihood is one of another shape than the targets.

    **Arguments:**

    - `output`: the shapes and dtypes of what the network returns for one example.
    - `own`: values for the unknowns of the likelihood.
    - `y`: the shape and dtype of the target of one example.
    """
    if not isinstance(y, jax.ShapeDtypeStruct):
        return

    def draw(output: Any, own: Any) -> Array:
        with as_libraries_compute():
            return likelihood.distribution(output, own).sample(jr.key(0))

    shape = filter_eval_shape(draw, output, own).shape
    if shape != y.shape:
        raise ValueError(
            f"Posterior: a target has shape {y.shape}, and the distribution of "
            f"{type(likelihood).__name__} for it has shape {shape}."
        )
