"""Optimistix: roots, least squares, minima and fixed points by each solver, with derivatives."""

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optax
import optimistix as optx

from tests.downstream.registry import Programs

programs = Programs()

TOLERANCES = {"rtol": 1e-10, "atol": 1e-10}
# Programs with different rounding may differ by one step. At this tolerance such a step does not
# change the tenth digit.
LOOSE = {"rtol": 1e-9, "atol": 1e-9}
GENERATOR = np.random.default_rng(1)
MATRIX = GENERATOR.normal(size=(3, 3)) / 2
START = np.array([0.1, -0.2, 0.3])


@eqx.filter_jit
def solved(solve, function, solver, start, args, **options):
    """The solution, its forward and reverse derivatives, and solutions for a batch.

    **Arguments:**

    - `solve`: a function of Optimistix, such as `root_find`.
    - `function`: the function of the problem, called as `function(unknown, args)`.
    """

    def solution(start, args):
        return solve(function, solver, start, args, **options)

    def loss(args):
        leaves = jax.tree_util.tree_leaves(solution(start, args).value)
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in leaves)

    def parts(start, args):
        found = solution(start, args)
        return {
            "value": found.value,
            "steps": found.stats["num_steps"],
            "is successful": found.result == optx.RESULTS.successful,
        }

    tangent = jax.tree_util.tree_map(jnp.cos, args)
    many = lambda tree: jax.tree_util.tree_map(lambda x: jnp.stack([x, 1.05 * x, 0.9 * x]), tree)
    results = {
        "one": parts(start, args),
        "batch": jax.vmap(parts)(many(start), many(args)),
        "gradient": jax.grad(loss)(args),
        "gradients of a batch": jax.vmap(jax.grad(loss))(many(args)),
    }
    if not isinstance(options.get("adjoint"), optx.RecursiveCheckpointAdjoint):
        results["jvp"] = jax.jvp(lambda args: solution(start, args).value, (args,), (tangent,))[1]
    return results


def add(name, solve, function, solver, start, args, sampled=False, **options):
    def run():
        arrays = jax.tree_util.tree_map(jnp.asarray, (start, args))
        return solved(solve, function, solver, *arrays, **options)

    programs.add(run, name, sampled)


def system(y, args):
    return jnp.tanh(args @ y) + 2 * y - 1


def scalar(y, args):
    return y**3 + args * y - 2


def tree_system(y, args):
    return {"p": y["a"] ** 2 - args["c"] + y["b"][0], "q": 3 * y["b"] + jnp.sin(y["a"]) - args["d"]}


TREE = {"a": 1.5, "b": np.array([0.1, 0.2])}
TREE_ARGS = {"c": 2.0, "d": np.array([0.5, -0.5])}

ROOT_FINDERS = {
    "Newton": optx.Newton(**TOLERANCES),
    "Newton by GMRES": optx.Newton(**TOLERANCES, linear_solver=lx.GMRES(1e-12, 1e-12)),
    "Chord": optx.Chord(**TOLERANCES),
    "best Newton": optx.BestSoFarRootFinder(optx.Newton(**TOLERANCES)),
    "LevenbergMarquardt": optx.LevenbergMarquardt(**TOLERANCES),
    "Dogleg": optx.Dogleg(**TOLERANCES),
}
for name, solver in ROOT_FINDERS.items():
    is_sampled = name in ("Newton", "Chord", "LevenbergMarquardt")
    add(f"root by {name}", optx.root_find, system, solver, START, MATRIX, is_sampled)
add("root of trees", optx.root_find, tree_system, optx.Newton(**TOLERANCES), TREE, TREE_ARGS, True)
for name, adjoint in {
    "through the steps": optx.RecursiveCheckpointAdjoint(),
    "by GMRES": optx.ImplicitAdjoint(linear_solver=lx.GMRES(1e-12, 1e-12)),
}.items():
    newton = optx.Newton(**TOLERANCES)
    add(f"root, {name}", optx.root_find, system, newton, START, MATRIX, True, adjoint=adjoint)


@programs.sample
def root_by_bisection():
    solver = optx.Bisection(**TOLERANCES)
    options = {"lower": 0.0, "upper": 2.0}
    return solved(optx.root_find, scalar, solver, jnp.array(1.0), jnp.array(1.5), options=options)


@programs.add
def root_by_bisection_that_expands():
    solver = optx.Bisection(**TOLERANCES, expand_if_necessary=True)
    options = {"lower": 0.0, "upper": 0.1}
    return solved(optx.root_find, scalar, solver, jnp.array(0.05), jnp.array(1.5), options=options)


def residuals(y, args):
    decay, times = jnp.exp(-(y[0] ** 2) * args["t"]), args["t"]
    return y[1] * decay + y[2] * times - args["data"]


TIMES = np.linspace(0, 2, 12)
DATA = {"t": TIMES, "data": 2 * np.exp(-1.3 * TIMES) + 0.4 * TIMES + 0.01 * np.sin(9 * TIMES)}


class LinearTrust(optx.AbstractGaussNewton):
    """Damped Newton steps with `LinearTrustRegion`."""

    rtol: float
    atol: float
    norm: object = optx.max_norm
    descent: optx.AbstractDescent = optx.DampedNewtonDescent()
    search: optx.AbstractSearch = optx.LinearTrustRegion()
    verbose: object = lambda *args, **kwargs: None


LEAST_SQUARES = {
    "GaussNewton": optx.GaussNewton(**LOOSE),
    "LevenbergMarquardt": optx.LevenbergMarquardt(**LOOSE),
    "LevenbergMarquardt by QR": optx.LevenbergMarquardt(**LOOSE, linear_solver=lx.QR()),
    "IndirectLevenbergMarquardt": optx.IndirectLevenbergMarquardt(**LOOSE),
    "Dogleg": optx.Dogleg(**LOOSE),
    "best LevenbergMarquardt": optx.BestSoFarLeastSquares(optx.LevenbergMarquardt(**LOOSE)),
    "one of ours": LinearTrust(**LOOSE),
    "BFGS": optx.BFGS(**LOOSE),
}
for name, solver in LEAST_SQUARES.items():
    is_sampled = name in ("GaussNewton", "LevenbergMarquardt", "Dogleg", "one of ours")
    guess = np.array([1.0, 1.0, 0.5])
    add(f"fit by {name}", optx.least_squares, residuals, solver, guess, DATA, is_sampled)
add(
    "fit, through the steps",
    optx.least_squares,
    residuals,
    optx.LevenbergMarquardt(**LOOSE),
    np.array([1.0, 1.0, 0.5]),
    DATA,
    adjoint=optx.RecursiveCheckpointAdjoint(),
)


def valley(y, args):
    return jnp.sum((1 - y[:-1]) ** 2) + args * jnp.sum((y[1:] - y[:-1] ** 2) ** 2)


def bowl(y, args):
    return jnp.sum(jnp.cosh(y - 0.3) * args) + 0.1 * jnp.sum(y) ** 2


class TrustedBFGS(optx.AbstractBFGS):
    """BFGS with a dogleg step in a trust region instead of a line search."""

    rtol: float
    atol: float
    norm: object = optx.max_norm
    use_inverse: bool = False
    descent: optx.AbstractDescent = optx.DoglegDescent()
    search: optx.AbstractSearch = optx.ClassicalTrustRegion()
    verbose: object = lambda *args, **kwargs: None


MINIMISERS = {
    "BFGS": optx.BFGS(**LOOSE),
    "BFGS, direct": optx.BFGS(**LOOSE, use_inverse=False),
    "DFP": optx.DFP(**LOOSE),
    "LBFGS": optx.LBFGS(**LOOSE, history_length=3),
    "LBFGS, direct": optx.LBFGS(**LOOSE, history_length=3, use_inverse=False),
    "NelderMead": optx.NelderMead(**LOOSE),
    "GradientDescent": optx.GradientDescent(learning_rate=0.1, **LOOSE),
    "NonlinearCG": optx.NonlinearCG(**LOOSE),
    "NonlinearCG, Fletcher-Reeves": optx.NonlinearCG(**LOOSE, method=optx.fletcher_reeves),
    "NonlinearCG, Hestenes-Stiefel": optx.NonlinearCG(**LOOSE, method=optx.hestenes_stiefel),
    "NonlinearCG, Dai-Yuan": optx.NonlinearCG(**LOOSE, method=optx.dai_yuan),
    "Adam": optx.OptaxMinimiser(optax.adam(0.05), **LOOSE),
    "best Adam": optx.BestSoFarMinimiser(optx.OptaxMinimiser(optax.adam(0.05), **LOOSE)),
    "one of ours": TrustedBFGS(**LOOSE),
}
for name, solver in MINIMISERS.items():
    is_sampled = name in ("BFGS", "LBFGS", "NelderMead", "NonlinearCG", "Adam", "one of ours")
    weights = np.array([1.0, 2.0, 0.5])
    add(
        f"minimum by {name}", optx.minimise, bowl, solver, START, weights, is_sampled, max_steps=999
    )
for name in ("BFGS", "DFP", "LBFGS", "NonlinearCG"):
    solver, start = MINIMISERS[name], np.array([-0.5, 0.6])
    add(f"valley by {name}", optx.minimise, valley, solver, start, 5.0, max_steps=2000)
add(
    "minimum, through the steps",
    optx.minimise,
    bowl,
    MINIMISERS["BFGS"],
    START,
    np.array([1.0, 2.0, 0.5]),
    adjoint=optx.RecursiveCheckpointAdjoint(),
)


@programs.sample
def minimum_by_golden_search():
    return {"all": golden(jnp.array(0.5), jnp.array(0.7))}


@eqx.filter_jit
def golden(start, args):
    solver = optx.GoldenSearch(**LOOSE)
    function = lambda y, args: jnp.cosh(y - args)
    options = {"lower": -1.0, "upper": 2.0}
    found = optx.minimise(function, solver, start, args, options, throw=False)
    return found.value, found.stats["num_steps"]


def contraction(y, args):
    return jnp.cos(args @ y) / 2


FIXED_POINTS = {
    "iteration": optx.FixedPointIteration(**TOLERANCES),
    "damped iteration": optx.FixedPointIteration(**TOLERANCES, damp=0.2),
    "best iteration": optx.BestSoFarFixedPoint(optx.FixedPointIteration(**TOLERANCES)),
    "Newton": optx.Newton(**TOLERANCES),
    "Dogleg": optx.Dogleg(**TOLERANCES),
}
for name, solver in FIXED_POINTS.items():
    is_sampled = name in ("iteration", "Newton")
    add(f"fixed point by {name}", optx.fixed_point, contraction, solver, START, MATRIX, is_sampled)
add(
    "fixed point, through the steps",
    optx.fixed_point,
    contraction,
    optx.FixedPointIteration(**TOLERANCES),
    START,
    MATRIX,
    adjoint=optx.RecursiveCheckpointAdjoint(),
)


@eqx.filter_jit
def minimised(start, args):
    solver = optx.BFGS(rtol=1e-8, atol=1e-8)
    root = optx.root_find(system, solver, start, args)
    fixed_point = optx.fixed_point(contraction, solver, start, args)
    return root.value, root.stats["num_steps"], fixed_point.value, fixed_point.stats["num_steps"]


@programs.add
def root_and_fixed_point_by_a_minimiser():
    """Values only: the norm of the residual has no second derivative at zero."""
    return {"all": minimised(jnp.asarray(START), jnp.asarray(MATRIX))}


@eqx.filter_jit
def with_auxiliary(start, args):
    function = lambda y, args: (system(y, args), {"square": y**2})
    found = optx.root_find(function, optx.Newton(**TOLERANCES), start, args, has_aux=True)
    return found.value, found.aux["square"]


@programs.add
def auxiliary_output():
    return {"all": with_auxiliary(jnp.asarray(START), jnp.asarray(MATRIX))}


@eqx.filter_jit
def hessian_of(start, args):
    def loss(args):
        return jnp.sum(optx.root_find(system, optx.Newton(**TOLERANCES), start, args).value ** 2)

    return eqx.filter_hessian(loss)(args), jax.jacrev(jax.grad(loss))(args)


@programs.add
def second_derivatives():
    return {"all": hessian_of(jnp.asarray(START), jnp.asarray(MATRIX))}


@eqx.filter_jit
def model_root(model, start):
    def loss(model):
        return jnp.sum(optx.root_find(model_system, optx.Newton(**TOLERANCES), start, model).value)

    return eqx.filter_value_and_grad(loss)(model)


def model_system(y, model):
    return y - 0.3 * model(y) - 0.1


@programs.sample
def root_of_a_network():
    """The gradient with respect to the parameters of a network in `args`."""
    model = eqx.nn.MLP(3, 3, 8, 1, activation=jnp.tanh, key=jax.random.key(0))
    value, gradient = model_root(model, jnp.asarray(START))
    return {"value": value, "gradient": eqx.filter(gradient, eqx.is_array)}


@eqx.filter_jit
def result_of(start, args, max_steps):
    solver = optx.Newton(**TOLERANCES)
    found = optx.root_find(system, solver, start, args, max_steps=max_steps, throw=False)
    return found.value, found.result == optx.RESULTS.nonlinear_max_steps_reached


@programs.sample
def failures():
    """Error messages for too few steps."""
    args = jnp.asarray(START), jnp.asarray(MATRIX)
    found = {"returned": result_of(*args, 1)}
    try:
        newton = optx.Newton(**TOLERANCES)
        jax.block_until_ready(optx.root_find(system, newton, *args, max_steps=1).value)
    except Exception as error:
        found["message"] = "maximum number of steps" in str(error)
    return found
