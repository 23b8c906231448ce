"""The log density of a model with priors, a likelihood and data."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest
from jax.flatten_util import ravel_pytree
from scipy import stats
from scipy.special import expit, log_softmax

import eqxlike as eqx
from eqxlike import bayes, nn
from tests.bayes.methods.cases import X, Y

pytestmark = pytest.mark.usefixtures("double_precision")


@functools.cache
def network(out_size="scalar"):
    with jax.enable_x64(True):
        if out_size != "scalar":
            return nn.Linear(2, out_size, key=jr.key(0), dtype=jnp.float64)
        return nn.MLP(2, out_size, width_size=3, depth=1, key=jr.key(0), dtype=jnp.float64)


def posterior(prior=None, likelihood=None, y=Y, model=None):
    prior = bayes.normal(0.0, 1.0) if prior is None else prior
    likelihood = bayes.Gaussian(dist.HalfNormal(2.0)) if likelihood is None else likelihood
    return bayes.Posterior(network() if model is None else model, prior, likelihood, (X, y))


def densities_of(target):
    """Outputs, unknowns and log density at the initial parameters."""

    @jax.jit
    def found():
        unknowns = target.initial(key=jr.key(1))
        return jax.vmap(target.model(unknowns))(X), unknowns, target.log_density(unknowns)

    return jax.tree.map(np.asarray, found())


def initial_of(target):
    return jax.jit(lambda: target.initial(key=jr.key(1)))()


# --- the density --------------------------------------------------------------------------------


def test_density_with_a_hierarchical_prior_equals_scipy():
    target = posterior(bayes.normal(0.2, dist.HalfCauchy(0.5)))
    mean, unknowns, found = densities_of(target)
    of_weights, noise = unknowns.prior["scale"], unknowns.likelihood["scale"]
    expected = (
        stats.halfcauchy.logpdf(of_weights, scale=0.5)
        + stats.norm.logpdf(ravel_pytree(unknowns.model)[0], 0.2, of_weights).sum()
        + stats.halfnorm.logpdf(noise, scale=2.0)
        + stats.norm.logpdf(Y, mean, noise).sum()
    )
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_program_of_a_normal_prior_has_no_mask_of_finite_values():
    target = posterior(likelihood=bayes.Gaussian(0.5))
    assert "select" not in str(jax.make_jaxpr(target.log_prior)(initial_of(target)))


def test_normal_prior_refuses_a_negative_scale_that_is_known():
    target = posterior(bayes.normal(0.0, dist.HalfCauchy(0.5)))
    unknowns = eqx.tree_at(lambda each: each.prior["scale"], initial_of(target), jnp.array(-1.0))
    with pytest.raises(ValueError, match="invalid scale"):
        target.parameter_priors(unknowns)


PRIORS = bayes.prior_by_path(
    {
        "layers[0].weight": bayes.horseshoe(0.1),
        "layers[0].bias": dist.TransformedDistribution(
            dist.Normal().expand([3]).to_event(1), dist.transforms.OrderedTransform()
        ),
        "layers[1].weight": dist.Dirichlet(np.ones(3)),
        "**": bayes.normal(0.0, dist.HalfNormal(1.0)),
    }
)


def test_linked_density_obeys_the_change_of_variables():
    target = posterior(PRIORS)

    @jax.jit
    def both(key):
        vector, log_density, unflatten = target.flat(linked=True, key=key)

        def moving(vector):
            # The last number of a point of the simplex follows from the others.
            unknowns = unflatten(vector)
            cut = unknowns.model.layers[1].weight[..., :-1]
            unknowns = eqx.tree_at(lambda u: u.model.layers[1].weight, unknowns, cut)
            return ravel_pytree(unknowns)[0]

        unknowns = target.sample_prior(key=jr.clone(key))
        again = target.constrain(target.unconstrain(unknowns))[0]
        densities = target.log_density(unflatten(vector)), log_density(vector)
        return jax.jacobian(moving)(vector), *densities, unknowns, again

    jacobian, standard, linked, unknowns, again = both(jr.key(1))
    _, log_det = np.linalg.slogdet(jacobian)
    np.testing.assert_allclose(linked, standard + log_det, rtol=1e-8)
    # `unconstrain` is the inverse of `constrain`.
    assert jax.tree.structure(again) == jax.tree.structure(unknowns)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(unknowns), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_batches_estimate_the_density_without_bias():
    target = posterior()
    unknowns = initial_of(target)
    batches = [(X[i : i + 2], Y[i : i + 2]) for i in (0, 2, 4)]
    of_batch = eqx.filter_jit(target.minibatch_log_density)
    found = [of_batch(unknowns, batch) for batch in batches]
    expected = eqx.filter_jit(target.log_density)(unknowns)
    np.testing.assert_allclose(np.mean(found), expected, rtol=1e-10)


def test_frozen_leaves_are_no_unknowns():
    model = nn.freeze(network(), lambda model: model.layers[0])
    target = posterior(model=model)
    assert jax.eval_shape(lambda: target.flat(key=jr.key(1))[0]).shape == (5,)
    unknowns = jax.jit(lambda: target.sample_prior(key=jr.key(1)))()
    np.testing.assert_array_equal(
        nn.unfreeze(target.model(unknowns)).layers[0].weight, network().layers[0].weight
    )


def test_initial_keeps_parameters_inside_the_support_of_the_prior():
    unknowns = initial_of(posterior())
    np.testing.assert_array_equal(unknowns.model.layers[0].weight, network().layers[0].weight)
    positive = initial_of(posterior(dist.HalfNormal(1.0)))
    assert all((leaf > 0).all() for leaf in jax.tree.leaves(positive.model))


# --- likelihoods --------------------------------------------------------------------------------

COUNTS = np.array([0, 1, 1, 0, 1, 0])
SCALES = np.array([0.5, 2.0])
NORMAL, STUDENT = stats.norm.logpdf, stats.t.logpdf
EACH = jnp.asarray(SCALES)
# Maps a name to the likelihood, size of the last layer, targets, and SciPy's log density.
LIKELIHOODS = {
    "Gaussian": (bayes.Gaussian(0.5), "scalar", Y, lambda f: NORMAL(Y, f, 0.5)),
    "head": (bayes.Gaussian("head"), 2, Y, lambda f: NORMAL(Y, f[:, 0], softplus(f[:, 1]))),
    "head of vectors": (
        *(bayes.Gaussian("head"), 4, X),
        lambda f: NORMAL(X, f[:, :2], softplus(f[:, 2:])).sum(1),
    ),
    "scale each": (bayes.Gaussian(SCALES), 2, X, lambda f: NORMAL(X, f, SCALES).sum(1)),
    "StudentT each": (bayes.StudentT(EACH, 3.0), 2, X, lambda f: STUDENT(X, 3, f, SCALES).sum(1)),
    "StudentT": (bayes.StudentT(0.5, 3.0), "scalar", Y, lambda f: STUDENT(Y, 3, f, 0.5)),
    "Bernoulli": (
        *(bayes.Bernoulli(), "scalar", COUNTS),
        lambda f: stats.bernoulli.logpmf(COUNTS, expit(f)),
    ),
    "Categorical": (
        *(bayes.Categorical(), 3, COUNTS),
        lambda f: log_softmax(f, axis=1)[np.arange(6), COUNTS],
    ),
    "Poisson": (
        *(bayes.Poisson(), "scalar", COUNTS),
        lambda f: stats.poisson.logpmf(COUNTS, np.exp(f)),
    ),
}


def softplus(x):
    return np.log1p(np.exp(x))


def test_likelihoods_equal_scipy():
    targets = {
        name: posterior(likelihood=likelihood, y=y, model=network(out_size))
        for name, (likelihood, out_size, y, _) in LIKELIHOODS.items()
    }

    def both(target):
        unknowns = target.initial(key=jr.key(1))
        return jax.vmap(target.model(unknowns))(X), target.log_likelihood(unknowns)

    found = jax.jit(lambda: {each: both(target) for each, target in targets.items()})()
    for name, parts in found.items():
        output, log_likelihood = map(np.asarray, parts)
        expected = LIKELIHOODS[name][-1](output)
        np.testing.assert_allclose(log_likelihood, expected, rtol=1e-8, err_msg=name)


def test_only_nonfinite_arrays_start_from_a_draw():
    model = eqx.tree_at(lambda model: model.layers[0].bias, network(), jnp.full(3, jnp.nan))
    problem = bayes.Problem(posterior(model=model))
    begun = problem.unflatten(eqx.filter_jit(lambda problem: problem.initial(jr.key(1)))(problem))
    assert np.isfinite(begun.model.layers[0].bias).all()
    np.testing.assert_array_equal(begun.model.layers[0].weight, model.layers[0].weight)


def test_degrees_of_freedom_may_be_unknown():
    likelihood = bayes.StudentT(dist.Gamma(2.0), degrees_of_freedom=dist.Gamma(2.0, 0.1))
    target = posterior(likelihood=likelihood)
    unknowns = jax.eval_shape(lambda: target.initial(key=jr.key(1)))
    assert set(unknowns.likelihood) == {"scale", "degrees_of_freedom"}


def test_rate_that_rounds_to_zero_has_a_density_with_a_gradient():
    def log_prob(output, y):
        return bayes.Poisson().log_prob(output, {}, y)

    for y in (0, 2):
        found = jax.value_and_grad(log_prob)(jnp.float32(-200.0), y)
        np.testing.assert_allclose(found, (-200 * y - np.log(max(y, 1)), y), atol=1e-4)


def test_custom_likelihood_needs_one_method():
    class Exponential(bayes.Likelihood):
        def distribution(self, output, unknowns):
            return dist.Exponential(jnp.exp(output))

    target = posterior(likelihood=Exponential(), y=np.exp(Y))
    outputs, unknowns, found = densities_of(target)
    of_data = stats.expon.logpdf(np.exp(Y), scale=np.exp(-outputs)).sum()
    expected = stats.norm.logpdf(ravel_pytree(unknowns.model)[0]).sum() + of_data
    np.testing.assert_allclose(found, expected, rtol=1e-10)


# --- bad input ----------------------------------------------------------------------------------


def make(**changes):
    wanted = {"model": network(), "prior": dist.Normal(), "likelihood": bayes.Gaussian()}
    return lambda: bayes.Posterior(**(wanted | {"data": (X, Y)} | changes))


class WithoutDistribution(bayes.Likelihood):
    def distribution(self, output, unknowns):
        return None


class Twice(bayes.Likelihood):
    def distribution(self, output, unknowns):
        return dist.Normal(jnp.stack([output, output]), 0.3)


class WithNumber(bayes.Likelihood):
    def unknowns(self):
        return {"scale": 3.0}

    def distribution(self, output, unknowns):
        return dist.Normal(output, unknowns["scale"])


def paths(*patterns):
    return bayes.prior_by_path(dict.fromkeys(patterns, dist.Normal()))


CLASSES = {"likelihood": bayes.Categorical(), "model": network(2)}
TWO_SCALES = bayes.StudentT(dist.Gamma(2.0).expand([2]))
WRONG_VALUES = [
    (make(data=(X, Y[:3])), "must have the same length; got x 6, y 3"),
    (make(data=(X[:0], Y[:0])), "there are no examples"),
    (make(data=(X, np.where(Y > 1, np.nan, Y))), r"y\[0\] is nan; 1 of 6"),
    (make(data=(X, X)), r"array of shape \(2,\), the shape of a target; got shape \(\)\.$"),
    (make(model=network(1)), r'got shape \(1,\)\. A last layer of size "scalar" returns shape \('),
    (make(data=(X, Y[:, None])), r"got shape \(\)\. Pass `y\[:, 0\]`"),
    (make(likelihood=bayes.Gaussian("head")), r"of shape \(2,\): a centre and a scale"),
    (make(**CLASSES, data=(X, COUNTS + 1)), r"0 to 1, .* got targets from 1 to 2\. .* `y - 1`\.$"),
    (
        make(likelihood=bayes.Bernoulli(), data=(X, 2 * COUNTS - 1)),
        r"got targets from -1 to 1\. .* pass `\(y > 0\)\.astype\(int\)`\.$",
    ),
    (make(likelihood=bayes.Categorical()), "a logit for each of C classes"),
    (
        make(**CLASSES, data=(X, np.eye(2)[COUNTS])),
        r"one integer as .* got shape \(2,\) and dtype float64\. Pass `y.argmax\(axis=-1\)`",
    ),
    (
        make(likelihood=bayes.Gaussian(np.ones(3)), model=network(2), data=(X, X)),
        r"scale must have shape \(\), or the shape of the target of .*, \(2,\); got shape \(3,\)",
    ),
    (make(likelihood=TWO_SCALES), r"StudentT: scale must have .*, \(\); got shape \(2,\)"),
    (
        make(likelihood=bayes.Bernoulli()),
        r"one integer as the target of an example, 0 or 1; got .* float64\. Pass `y\.astype",
    ),
    (
        make(likelihood=bayes.Poisson(), data=(X, COUNTS - 1)),
        "0 or more, counts; got targets from -1 to 0",
    ),
    (
        make(prior=dist.Normal(jnp.zeros(7), 1.0)),
        r"The prior of layers\[0\].weight has an incompatible shape: .* shape \(3, 2\)",
    ),
    (
        make(prior=dist.ImproperUniform(dist.constraints.real, (), ())),
        r"The prior of layers\[0\].weight is improper",
    ),
    (
        make(prior=paths("layers[*].weight")),
        r"no pattern matches layers\[0\].bias; the patterns are 'layers\[\*\].weight'",
    ),
    (
        make(prior=paths("layer[*]", "**")),
        r"'layer\[\*\]' matches no parameter, .* The parameters are layers\[0\].weight",
    ),
    (make(model=jax.vmap(network())), "a function that calls a Module, .* pass the Module"),
    (
        make(model=nn.freeze(network(), lambda model: model)),
        "no floating-point array that is not frozen",
    ),
    (
        make(likelihood=Twice()),
        r"a target has shape \(\), but the distribution of Twice has shape \(2,\)",
    ),
    (lambda: bayes.Gaussian(dist.Normal()), "scale must be .* over positive numbers, .* Real"),
    (lambda: bayes.Gaussian(dist.Dirichlet(jnp.ones(2))), "scale must be .* positive .* Simplex"),
    (lambda: bayes.Gaussian(-1.0), "Gaussian: scale must be positive and finite, got -1.0"),
    (lambda: bayes.StudentT(np.array([1.0, 0.0])), "scale must be positive and finite, got"),
    (lambda: bayes.Gaussian("heads"), 'a number, an array, a distribution or "head"'),
    (lambda: bayes.StudentT(1.0, 0.0), "degrees_of_freedom must be positive"),
    (lambda: bayes.normal(0.0, -1.0), "normal: scale must be positive"),
    (lambda: bayes.normal(0.0, dist.Normal()), "over positive numbers"),
    (lambda: bayes.normal(0.0, dist.Gamma(jnp.ones(2))), r"of shape \(\), got shape \(2,\)"),
    (lambda: bayes.normal(0.0, jnp.ones(2)), r"must have shape \(\), got shape \(2,\)"),
    (lambda: bayes.horseshoe(0.0), "horseshoe: scale must be positive"),
    (lambda: bayes.prior_by_path({}), "needs at least one pattern"),
]
WRONG_TYPES = [
    (make(data=(X, np.array(["a"] * 6))), "y must be an array of numbers, got .* dtype <U1"),
    (make(data=X), r"data must be a pair \(x, y\)"),
    (make(data=(X, 1.0)), "y must be an array with an axis of examples"),
    (make(data=(X.tolist(), Y)), "Convert a list of numbers by"),
    (make(data=(X, COUNTS)), "Gaussian expects floating-point targets"),
    (make(prior=1.0), "prior must be a distribution"),
    (make(prior=None), "the model has no layer with its own prior"),
    (make(prior=bayes.normal), r"call it, `normal\(\.\.\.\)`"),
    (make(prior=dist.Normal), r"prior expected an instance, .* call it, `Normal\(\.\.\.\)`"),
    (make(likelihood=dist.Normal()), "likelihood must be a bayes.Likelihood"),
    (make(likelihood=bayes.Gaussian), r"likelihood expected .* call it, `Gaussian\(\.\.\.\)`"),
    (make(likelihood=WithoutDistribution()), "WithoutDistribution.distribution .* from .*, got No"),
    (make(likelihood=WithNumber()), r"scale.* must be a distribution from `numpyro.dist"),
    (lambda: bayes.normal("a"), "^normal: loc must be a number, got "),
    (lambda: bayes.normal(0, "x"), "^normal: scale must be a number, got "),
    (lambda: bayes.normal(dist.Normal()), "^normal: loc must be a number, got "),
    (lambda: bayes.Gaussian(dist.Gamma), r"scale must be a number, .* `Gamma\(\.\.\.\)`"),
]


@pytest.mark.parametrize(("error", "cases"), [(ValueError, WRONG_VALUES), (TypeError, WRONG_TYPES)])
def test_bad_input_is_an_error_before_anything_runs(error, cases):
    for build, text in cases:
        with pytest.raises(error, match=text):
            build()
