"""A model with priors, likelihood and data: the log density of the unknowns."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PRNGKeyArray, PyTree, Shaped

from .. import Module, filter_eval_shape, filter_jit, is_array_like, is_inexact_array
from .._compat import Tracer
from ..extend import Rest, describe_node, paths_without_numbers, split
from ..nn import BayesianLayer, StateIndex, inference_mode, posterior_mean
from ..nn._bayesian import posterior_scales, prior_scales, sum_in_widest
from ..nn._inputs import check_instance
from ._distributions import Likelihood, Prior, PriorOfLayers, as_prior, by_path, fitted
from ._libraries import (
    as_libraries_compute,
    check_distribution,
    check_kind,
    check_prior,
    constrained,
    is_distribution,
    is_free,
    log_det_jacobian,
    summed_log_prob,
    unconstrained,
)

Data = tuple[PyTree[Array], PyTree[Array]]
Vector = Float[Array, " d"]


class Unknowns(Module):
    """The unknowns of a posterior, in standard space or in linked space.

    - `model`: a tree with the structure of the model. It holds the trained arrays, and `None` in
      place of everything else.
    - `likelihood`: unknowns of the likelihood, by name.
    - `prior`: unknowns of the prior, by name.
    - `noise`: other random values of a draw, such as the key for its dropout masks.
    """

    model: PyTree
    likelihood: dict[str, Any]
    prior: dict[str, Any]
    noise: Any = None


class Posterior(Module):
    """The posterior of a model's unknowns, given data, as an unnormalised log density.

    The log density is the sum of log prior and log likelihood, up to a constant. The unknowns are
    the floating-point arrays of the model that are not frozen, and the unknowns of prior and
    likelihood. The model is evaluated in inference mode, so `nn.Dropout` is off.

    >>> import jax, jax.numpy as jnp, numpyro.distributions as dist
    >>> from eqxlike import bayes, nn
    >>> model = nn.MLP(1, "scalar", width_size=8, depth=1, key=jax.random.key(0))
    >>> x = jnp.linspace(-1.0, 1.0, 20)[:, None]
    >>> likelihood = bayes.Gaussian(scale=dist.Gamma(2.0, 1.0))
    >>> target = bayes.Posterior(model, bayes.normal(0.0, 1.0), likelihood, (x, x[:, 0] ** 2))
    >>> vector, log_density, unflatten = target.flat(linked=True, key=jax.random.key(1))
    >>> vector.shape, jax.jit(log_density)(vector).shape
    ((26,), ())
    >>> jax.jit(unflatten)(vector).likelihood["scale"].shape
    ()
    """

    network: Any
    prior: Prior
    likelihood: Likelihood
    data: Data
    initial_scales: PyTree | None

    def __init__(self, model: Any, prior: Any, likelihood: Likelihood, data: Data):
        """**Arguments:**

        - `model`: a Module that is called with one example. Bayesian layers, such as
          `nn.BayesianLinear`, become plain layers with the posterior means. The posterior standard
          deviations of Bayesian layers are the initial standard deviations in `bayes.MeanField`.
        - `prior`: a prior of `bayes`, or a NumPyro distribution for all entries; `None` for the
          priors of the model's Bayesian layers.
        - `likelihood`: the distribution of the targets, given the model's outputs.
        - `data`: `(x, y)`, arrays or pytrees of arrays with the same leading length `N`, the number
          of examples. `y` may also be a list of numbers.

        **Raises:** `TypeError` or `ValueError` if arrays of the data have different lengths or
        contain NaN, if the shape of the outputs does not suit the likelihood, or if a prior does
        not suit its parameter, is improper, or matches no parameter.
        """
        check_instance(model, "Posterior")
        check_instance(likelihood, "Posterior: likelihood")
        wanted = "a bayes.Likelihood, such as `bayes.Gaussian()`"
        check_kind(likelihood, Likelihood, "Posterior: likelihood", wanted)
        is_random = bool(nodes_of(BayesianLayer, model))
        if prior is None and not is_random:
            raise TypeError(
                "Posterior: prior is None, but the model has no layer with its own prior, such as "
                "`nn.BayesianLinear`. Pass a prior, such as `bayes.normal(0.0, 1.0)`."
            )
        self.network = inference_mode(posterior_mean(model))
        self.initial_scales = posterior_scales(model) if is_random else None
        if prior is None:
            prior = PriorOfLayers(by_path(prior_scales(model)))
        check_instance(prior, "Posterior: prior")
        self.prior = as_prior(prior)
        self.likelihood = likelihood
        self.data = check_data(data)
        if not self._arrays()[0]:
            raise ValueError(
                "Posterior: the model has no floating-point array that is not frozen. If the model "
                "is a function that calls a Module, such as `jax.vmap(module)`, pass the Module."
            )
        for path, struct in self._structs().items():
            if jnp.issubdtype(struct.dtype, jnp.complexfloating):
                raise TypeError(
                    f"Posterior: {path} is complex, dtype {struct.dtype}, but priors are over real "
                    "numbers. Freeze it by `nn.freeze`, or store its real and imaginary parts."
                )
        x, y = map(struct_of_example, self.data)
        output = output_of(self.network, x)
        likelihood.check(output, y)
        likelihood.check_values(output, self.data[1])
        outer = self._hyperpriors()
        for path, distribution in jtu.tree_leaves_with_path(outer, is_leaf=is_distribution):
            check_prior(distribution, f"The prior of {jtu.keystr(path)}")
        # The checks depend only on shapes, so any hyperparameters will do.
        for path, distribution in self._parameter_priors(_linked_zeros(outer["prior"])).items():
            check_prior(distribution, f"The prior of {path}")
        _check_target_shape(likelihood, output, y)

    # --- parts ---

    @property
    def num_data(self) -> int:
        """`N`, the number of examples."""
        return num_examples(self.data, "Posterior")

    def _arrays(self) -> tuple[list[Array], Rest]:
        return split(self.network, is_inexact_array)

    def _structs(self) -> dict[str, jax.ShapeDtypeStruct]:
        arrays, rest = self._arrays()
        leaves = by_path(rest.merge_into(None, arrays))
        return {path: jax.ShapeDtypeStruct(each.shape, each.dtype) for path, each in leaves.items()}

    def _check_one(self, unknowns: Unknowns, is_linked: bool = False) -> None:
        """Raises `ValueError` unless unknowns have the shapes of one draw, without a leading axis.

        In linked space, arrays may have fewer entries.
        """
        arrays, rest = self._arrays()
        outer = self._hyperpriors()
        one = Unknowns(rest.merge_into(None, arrays), outer["likelihood"], outer["prior"])
        shapes = {
            path: leaf.shape() if is_distribution(leaf) else leaf.shape
            for path, leaf in jtu.tree_leaves_with_path(one, is_leaf=is_distribution)
        }
        for path, leaf in jtu.tree_leaves_with_path(unknowns):
            ours = jnp.shape(leaf)
            theirs = shapes.get(path, ours)
            if len(ours) > len(theirs) if is_linked else ours != theirs:
                raise ValueError(
                    f"Posterior: expected the unknowns of one draw, with shape {theirs} at "
                    f"{jtu.keystr(path).removeprefix('.')}; got shape {ours}. Select one of "
                    "several draws by `jax.tree.map(lambda each: each[0], samples)`, or use "
                    "`jax.vmap` for all."
                )

    def _hyperpriors(self) -> dict[str, Any]:
        """The priors of the unknowns of prior and likelihood."""
        return {
            "prior": dict(self.prior.hyperpriors(self._structs())),
            "likelihood": dict(self.likelihood.unknowns()),
        }

    def hyperprior_names(self) -> list[str]:
        """The names of the prior's own unknowns, such as `scale`."""
        found = jtu.tree_leaves_with_path(self._hyperpriors()["prior"], is_leaf=is_distribution)
        return [jtu.keystr(path, simple=True, separator=".") for path, _ in found]

    def parameter_priors(self, unknowns: Unknowns) -> dict[str, Any]:
        """The prior of each parameter by path, in tree order, given the prior's own unknowns."""
        return self._parameter_priors(unknowns.prior)

    def _parameter_priors(self, hyper: Any) -> dict[str, Any]:
        return {
            path: fitted(self.prior.of_leaf(path, struct, hyper), path, struct)
            for path, struct in self._structs().items()
        }

    def _map(self, function: Callable, hyper: Any, unknowns: Unknowns) -> Unknowns:
        """Applies `function` to the prior and the value of each unknown.

        **Arguments:**

        - `hyper`: the prior's own unknowns, in standard space.
        """
        outer, rest = self._hyperpriors(), self._arrays()[1]
        prior, likelihood = (
            jtu.tree_map(function, outer[name], getattr(unknowns, name), is_leaf=is_distribution)
            for name in ("prior", "likelihood")
        )
        priors, leaves = self._parameter_priors(hyper).values(), jtu.tree_leaves(unknowns.model)
        found = [function(*pair) for pair in zip(priors, leaves, strict=True)]
        return Unknowns(rest.merge_into(None, found), likelihood, prior)

    # --- densities ---

    def log_prior(self, unknowns: Unknowns) -> Float[Array, ""]:
        """The log density of the prior, in nats, at unknowns in standard space."""
        self._check_one(unknowns)
        return _total(self._map(summed_log_prob, unknowns.prior, unknowns))

    def log_likelihood(self, unknowns: Unknowns, data: Data | None = None) -> Float[Array, " N"]:
        """The log density of each example, in nats, at unknowns in standard space.

        **Arguments:**

        - `data`: examples `(x, y)`; by default the posterior's data.
        """
        x, y = self.data if data is None else data
        model, likelihood, own = self.model(unknowns), self.likelihood, unknowns.likelihood
        return jax.vmap(lambda x, y: likelihood.log_prob(model(x), own, y))(x, y)

    def log_density(self, unknowns: Unknowns, linked: bool = False) -> Float[Array, ""]:
        """The log density of the posterior, in nats, up to a constant.

        **Arguments:**

        - `unknowns`: unknowns with the structure of `initial`.
        - `linked`: whether `unknowns` are in linked space, which is unconstrained. If so, the
          result is the density in linked space, which includes the log determinant of the link's
          Jacobian.
        """
        return self.minibatch_log_density(unknowns, self.data, linked)

    def minibatch_log_density(
        self, unknowns: Unknowns, batch: Data, linked: bool = False
    ) -> Float[Array, ""]:
        """An unbiased estimate of `log_density` from `B` of the `N` examples.

        The log likelihood of each of the `B` examples is multiplied by `N / B`.

        **Arguments:** as for `log_density`, and also

        - `batch`: examples `(x, y)`, drawn from the data.
        """
        weight = self.num_data / num_examples(batch, "minibatch_log_density")
        log_det = jnp.zeros(())
        if linked:
            unknowns, log_det = self.constrain(unknowns)
        # Keep this order. Gradients are added in the same order, and another order would change the
        # last digits of a resumed run.
        log_prior = self.log_prior(unknowns)
        log_likelihood = jnp.sum(self.log_likelihood(unknowns, batch)) * weight
        return sum_in_widest([log_prior, log_likelihood, log_det])

    # --- spaces ---

    def constrain(self, linked: Unknowns) -> tuple[Unknowns, Float[Array, ""]]:
        """Transforms unknowns from linked to standard space.

        Also returns the log determinant of the Jacobian.
        """
        self._check_one(linked, is_linked=True)
        outer = self._hyperpriors()["prior"]
        hyper = jtu.tree_map(constrained, outer, linked.prior, is_leaf=is_distribution)
        unknowns = self._map(constrained, hyper, linked)
        return unknowns, _total(self._map(log_det_jacobian, hyper, linked))

    def unconstrain(self, unknowns: Unknowns) -> Unknowns:
        """Transforms from standard to linked space: the inverse of `constrain`."""
        return self._map(unconstrained, unknowns.prior, unknowns)

    def initial(self, *, key: PRNGKeyArray) -> Unknowns:
        """Initial unknowns in standard space: the model's arrays, and prior draws of other
        unknowns.

        An array of the model is also drawn from its prior if it lies outside the support of the
        prior, or on the boundary of the support.
        """
        return self.initial_keeping(self.kept_arrays(), key)

    def kept_arrays(self) -> tuple[bool, ...]:
        """For each array of the model, True if `initial` is sure to return the array unchanged.

        For such an array, no draw from the prior is compiled. Compiling draws takes longer than
        compiling the rest of the first program.
        """
        priors = self._parameter_priors(_linked_zeros(self._hyperpriors()["prior"])).values()
        return tuple(
            not isinstance(array, Tracer)
            and array.is_fully_addressable
            and is_free(prior)
            and bool(np.isfinite(jax.device_get(array)).all())
            for array, prior in zip(self._arrays()[0], priors, strict=True)
        )

    def sample_prior(self, *, key: PRNGKeyArray) -> Unknowns:
        """A draw of all unknowns from the prior, in standard space."""
        return self.initial_keeping(None, key)

    def simulate(self, unknowns: Unknowns, *, key: PRNGKeyArray) -> PyTree[Array]:
        """Simulates targets for the inputs of the data, given unknowns in standard space.

        With unknowns from `sample_prior`, the targets are a draw from the prior predictive
        distribution.

        **Returns:** targets with the structure, shapes and dtypes of the data's targets.
        """
        x, y = self.data
        model, likelihood, own = self.model(unknowns), self.likelihood, unknowns.likelihood

        def of_one(x: Any, key: PRNGKeyArray) -> Array:
            with as_libraries_compute():
                return likelihood.distribution(model(x), own).sample(key)

        drawn = jax.vmap(of_one)(x, jr.split(key, self.num_data))
        return jtu.tree_map(lambda drawn, like: drawn.astype(like.dtype), drawn, y)

    def initial_keeping(self, kept: tuple[bool, ...] | None, key: PRNGKeyArray | None) -> Unknowns:
        """Like `initial`, for arrays that may be traced. `kept` is the result of `kept_arrays`.

        If `kept` is `None`, all unknowns are drawn. Without a key, unknowns start at 0 in linked
        space instead of at a draw from the prior, because draws take much longer to compile.
        """
        arrays, rest = self._arrays()
        outer = self._hyperpriors()
        size = len(arrays) + len(jtu.tree_leaves(outer, is_leaf=is_distribution))
        keys = iter([None] * size if key is None else jr.split(key, size))

        def draw(distribution: Any) -> Array:
            if (key := next(keys)) is None:
                return _linked_zeros(distribution)
            with as_libraries_compute():
                return distribution.sample(key)

        hyper, own = (
            jtu.tree_map(draw, outer[name], is_leaf=is_distribution)
            for name in ("prior", "likelihood")
        )
        leaves = []
        priors = self._parameter_priors(hyper).values()
        for index, (array, distribution) in enumerate(zip(arrays, priors, strict=True)):
            if kept is not None and kept[index]:
                next(keys)
                leaves.append(array)
                continue
            drawn = draw(distribution).astype(array.dtype)
            if kept is not None:
                is_inside = jnp.all(distribution.support(array))
                # On the boundary of a closed support, the link is not finite.
                is_linked = jnp.all(jnp.isfinite(unconstrained(distribution, array)))
                drawn = jnp.where(is_inside & is_linked, array, drawn)
            leaves.append(drawn)
        return Unknowns(rest.merge_into(None, leaves), own, hyper)

    def model(self, unknowns: Unknowns) -> Any:
        """The network with the unknowns of one draw, in standard space.

        **Raises:** `ValueError` if an array of `unknowns` has another shape than the array that it
        replaces.
        """
        self._check_one(unknowns)
        return self._arrays()[1].merge(jtu.tree_leaves(unknowns.model))

    def flat(
        self, *, linked: bool = True, key: PRNGKeyArray
    ) -> tuple[Vector, Callable[[Vector], Float[Array, ""]], Callable[[Vector], Unknowns]]:
        """The unknowns as one vector, for samplers and optimisers of other libraries.

        **Arguments:**

        - `linked`: whether the vector is in linked space.
        - `key`: random key for `initial`, which makes the initial vector.

        **Returns:** `(vector, log_density, unflatten)`: an initial vector, a function from a vector
        to the log density, and a function from a vector to `Unknowns` in standard space.
        """
        vector, unravel = _raveled(self, linked, self.kept_arrays(), key)

        def log_density(vector: Vector) -> Float[Array, ""]:
            return self.log_density(unravel(vector), linked)

        def unflatten(vector: Vector) -> Unknowns:
            unknowns = unravel(vector)
            return self.constrain(unknowns)[0] if linked else unknowns

        return vector, log_density, unflatten


@as_libraries_compute()
@filter_jit
def _raveled(
    target: Posterior, linked: bool, kept: tuple[bool, ...], key: PRNGKeyArray
) -> tuple[Any, Any]:
    unknowns = target.initial_keeping(kept, key)
    return ravel_pytree(target.unconstrain(unknowns) if linked else unknowns)


def _total(terms: Unknowns) -> Float[Array, ""]:
    return sum_in_widest(jtu.tree_leaves((terms.prior, terms.likelihood, terms.model)))


# --- Checks of the shapes of model, likelihood and targets ---


def output_of(network: Any, x: PyTree[jax.ShapeDtypeStruct]) -> Any:
    """The shapes and dtypes of a network's output for one example.

    **Raises:** `TypeError` for a network with stateful layers.
    """
    try:
        return filter_eval_shape(lambda model, x: model(x), network, x)
    except TypeError as error:
        if not nodes_of(StateIndex, network):
            raise
        raise TypeError(
            "Posterior calls the model as `model(x)`, but this model has stateful layers, such as "
            "`nn.BatchNorm`, for which single examples have no likelihood. Use `nn.LayerNorm` or "
            "`nn.GroupNorm` instead. If the state does not change, wrap the model in a Module with "
            "a field `nn.freeze(state)`, whose `__call__(self, x)` returns "
            "`self.model(x, self.state)[0]`."
        ) from error


def nodes_of(kind: type, tree: PyTree) -> list[Any]:
    """All nodes of type `kind` in a tree."""
    nodes = jtu.tree_leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]


def _check_target_shape(
    likelihood: Likelihood, output: Any, y: PyTree[jax.ShapeDtypeStruct]
) -> None:
    """Raises `ValueError` unless the likelihood's distribution has the shape of one target."""
    if not isinstance(y, jax.ShapeDtypeStruct):
        return

    def draw(output: Any, own: Any) -> Array:
        with as_libraries_compute():
            found = likelihood.distribution(output, own)
            check_distribution(found, f"The result of {type(likelihood).__name__}.distribution")
            return found.sample(jr.key(0))

    shape = filter_eval_shape(draw, output, _linked_zeros(dict(likelihood.unknowns()))).shape
    if shape != y.shape:
        raise ValueError(
            f"Posterior: a target has shape {y.shape}, but the distribution of "
            f"{type(likelihood).__name__} has shape {shape}."
        )


def _linked_zeros(distributions: Any) -> Any:
    """The value of each distribution at 0 in linked space, such as 1 for positive numbers."""
    return jtu.tree_map(
        lambda each: constrained(each, jnp.zeros(each.batch_shape + each.event_shape)),
        distributions,
        is_leaf=is_distribution,
    )


# --- Data ---


def check_data(data: Any) -> tuple[PyTree[Array], PyTree[Array]]:
    """Checks data and converts them to JAX arrays. The values of traced arrays are not checked.

    **Raises:** `TypeError` or `ValueError` with the path of the array that is wrong.
    """
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise TypeError(f"data must be a pair (x, y), got {describe_node(data)}.")
    x, y = data
    scalars = bool | int | float | str | np.generic
    leaves = jtu.tree_leaves(y)
    if isinstance(y, list | tuple) and all(isinstance(leaf, scalars) for leaf in leaves):
        y = np.asarray(y)
    lengths: dict[str, int] = {}
    for name, tree in zip(("x", "y"), (x, y), strict=True):
        leaves = jtu.tree_leaves_with_path(tree)
        if not leaves:
            raise ValueError(f"data: {name} has no arrays.")
        for path, leaf in leaves:
            where = f"{name}{jtu.keystr(path)}"
            if not is_array_like(leaf) or jnp.ndim(leaf) == 0:
                raise TypeError(
                    f"data: {where} must be an array with an axis of examples, got "
                    f"{describe_node(leaf)}. Convert a list of numbers by `np.asarray`."
                )
            if paths_without_numbers(leaf):
                raise TypeError(
                    f"data: {where} must be an array of numbers, got an array of dtype "
                    f"{leaf.dtype}. Convert class names to integers by "
                    "`np.unique(labels, return_inverse=True)[1]`."
                )
            lengths[where] = jnp.shape(leaf)[0]
            _check_finite(leaf, where)
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{where} {length}" for where, length in lengths.items())
        raise ValueError(f"data: all arrays must have the same length; got {listed}.")
    if 0 in lengths.values():
        raise ValueError("data: there are no examples.")
    return jtu.tree_map(jnp.asarray, (x, y))


def _check_finite(array: Any, where: str) -> None:
    if isinstance(array, Tracer) or not jnp.issubdtype(jnp.result_type(array), jnp.inexact):
        return
    with np.errstate(over="ignore"):  # JAX's dtype may be narrower and overflow to infinity
        array = np.asarray(array).astype(jnp.result_type(array))
    is_finite = np.isfinite(array)
    if not is_finite.all():
        place = tuple(int(each[0]) for each in np.where(~is_finite))
        index = ", ".join(map(str, place))
        raise ValueError(
            f"data: {where}[{index}] is {array[place]}; "
            f"{np.sum(~is_finite)} of {is_finite.size} values are not finite. Remove such "
            "examples, or impute the values."
        )


def num_examples(batch: PyTree[Shaped[Array, "B ..."]], caller: str) -> int:
    """The number of examples in a batch.

    **Raises:** `ValueError` unless all arrays have the same leading length. The message names
    `caller`.
    """
    shapes = [jnp.shape(leaf) for leaf in jtu.tree_leaves(batch)]
    lengths = {shape[:1] for shape in shapes}
    if len(lengths) != 1 or lengths == {()}:
        raise ValueError(
            f"{caller} expects a batch of arrays with the same leading length, got shapes "
            f"{sorted(shapes)}."
        )
    ((length,),) = lengths
    return length


def struct_of_example(tree: PyTree[Array]) -> PyTree[jax.ShapeDtypeStruct]:
    """The shapes and dtypes of one example."""
    return jtu.tree_map(lambda each: jax.ShapeDtypeStruct(each.shape[1:], each.dtype), tree)
