"""The uncertainty of each Bayesian method, compared with exact standard deviations.

Two problems have a closed form: linear regression, and regression on a hundred random features of a
Gaussian process. For logistic regression and a network of 21 unknowns, four long chains of NUTS are
the reference. Methods have their default settings, unless their name states others. The targets and
their results are printed last. Ctrl-C prints the finished rows.
"""

import contextlib
import functools
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import eqxlike
from benchmarks import command, report, table
from benchmarks.cases import find
from eqxlike import bayes, nn

NAME = "benchmarks.exactness"
PACKAGES = ("eqxlike", "jax", "numpyro", "blackjax", "numpy", "python")

EXPLANATION = """\
Each number is the standard deviation of the output over the networks of a method, divided by the
exact standard deviation. It is the geometric mean over 20 inputs near the data, or 20 inputs far
from the data, and over the seeds. The output is the function value, or the logit for logistic
regression. 1 is exact. Below 1 the method is overconfident. For MAP each number is 0."""


# --- problems with a known exact posterior, near the data and far ---

NUM_INPUTS = 20
"""The number of inputs near the data, and the number of inputs far away."""


class Reference(NamedTuple):
    """Exact standard deviations of the output, at inputs near the data and far away.

    - `r_hat`: the largest R-hat of the chains, or `None` for a closed form.
    """

    near: np.ndarray
    far: np.ndarray
    r_hat: float | None = None


class Problem(NamedTuple):
    """A posterior with exact standard deviations.

    - `target`: makes the posterior from the key of the initial parameters.
    - `near`, `far`: inputs, shape `(NUM_INPUTS, features)`.
    - `closed_form`: the exact standard deviations, or `None` if chains must estimate them.
    """

    name: str
    target: Callable[[jax.Array], bayes.Posterior]
    near: np.ndarray
    far: np.ndarray
    closed_form: Reference | None = None


def standard_deviations(posterior: bayes.FittedPosterior, x: np.ndarray, num: int | None) -> Any:
    """The standard deviations of the output over networks, for each input.

    The output is the function value if the noise is known, and otherwise the logit.

    **Arguments:**

    - `num`: the number of networks, by default all networks of the method.
    """
    prediction = bayes.predict(posterior, x, key=jr.key(0), num_samples=num)
    if isinstance(prediction, bayes.Mixture):
        return np.sqrt(np.asarray(prediction.epistemic, np.float64))
    return np.std(np.asarray(prediction.logits[..., 1], np.float64), axis=0)


# --- references ---

# With four such chains, the error of a standard deviation is about one percent.
LONG = bayes.NUTS(num_samples=5000, num_warmup=1000)
SHORT = bayes.NUTS(num_samples=200, num_warmup=200)


def reference(problem: Problem, method: bayes.NUTS = LONG) -> Reference:
    """The exact standard deviations, or the estimate of long chains."""
    if problem.closed_form is not None:
        return problem.closed_form
    posterior = bayes.infer(problem.target(jr.key(7)), method, key=jr.key(8), progress=False)
    near, far = (standard_deviations(posterior, x, None) for x in (problem.near, problem.far))
    outputs = posterior.diagnostics.outputs
    assert outputs is not None
    return Reference(near, far, float(np.max(outputs.r_hat)))


def _by_algebra(rows: np.ndarray, near: np.ndarray, far: np.ndarray, noise: float) -> Reference:
    """With precision `P = D^T D / noise^2 + I`, the variance of the output is `d^T P^-1 d`.

    **Arguments:**

    - `rows`: the design matrix `D`.
    - `near`, `far`: its rows `d` for other inputs.
    """
    covariance = np.linalg.inv(rows.T @ rows / noise**2 + np.eye(rows.shape[1]))
    scales = (np.sqrt(np.einsum("ij,jk,ik->i", each, covariance, each)) for each in (near, far))
    return Reference(*scales)


# --- problems ---

FAR = 5.0
"""The distance of far inputs from the centre, relative to the data."""


def _inputs(random: np.random.Generator, num: int, features: int) -> tuple[np.ndarray, ...]:
    """Standard normal training inputs, inputs near them, and far inputs in random directions."""
    x, near, far = (random.normal(size=(each, features)) for each in (num, NUM_INPUTS, NUM_INPUTS))
    far *= FAR * np.sqrt(features) / np.linalg.norm(far, axis=1, keepdims=True)
    return tuple(each.astype(np.float32) for each in (x, near, far))


def _with_ones(x: np.ndarray) -> np.ndarray:
    return np.concatenate([x, np.ones((len(x), 1))], axis=1).astype(np.float64)


def linear_regression() -> Problem:
    """A linear regression with four unknowns and known noise."""
    random, noise = np.random.default_rng(0), 0.5
    x, near, far = _inputs(random, 40, 3)
    y = x @ np.array([1.0, -2.0, 0.5]) + 0.5 + noise * random.normal(size=len(x))

    def target(key: jax.Array) -> bayes.Posterior:
        model = nn.Linear(3, "scalar", key=key)
        data = x, y.astype(np.float32)
        return bayes.Posterior(model, bayes.normal(), bayes.Gaussian(noise), data)

    known = _by_algebra(_with_ones(x), _with_ones(near), _with_ones(far), noise)
    return Problem("linear regression", target, near, far, known)


class Features(eqxlike.Module):
    """`sqrt(2 / D) cos(w x + b)`. Linear regression on these approximates a Gaussian process.

    Rahimi and Recht (2007), "Random Features for Large-Scale Kernel Machines".
    """

    weight: np.ndarray
    bias: np.ndarray

    def __call__(self, x: Any, *, key: Any = None) -> Any:
        waves = jnp.cos(jnp.asarray(self.weight) @ x + jnp.asarray(self.bias))
        return np.sqrt(2 / len(self.bias)).astype(np.float32) * waves


def gaussian_process() -> Problem:
    """Regression on a hundred random features of a squared exponential kernel, with known noise."""
    random, noise, length, num = np.random.default_rng(1), 0.2, 0.5, 100
    weight = (random.normal(size=(num, 1)) / length).astype(np.float32)
    bias = random.uniform(0, 2 * np.pi, num).astype(np.float32)
    x, near = (random.uniform(-1, 1, (each, 1)).astype(np.float32) for each in (50, NUM_INPUTS))
    far = np.linspace(2.0, 4.0, NUM_INPUTS, dtype=np.float32)[:, None]
    y = np.sin(4 * x[:, 0]) + noise * random.normal(size=len(x))

    def design(x: np.ndarray) -> np.ndarray:
        return np.sqrt(2 / num) * np.cos(x.astype(np.float64) @ weight.T + bias)

    def target(key: jax.Array) -> bayes.Posterior:
        layer = nn.Linear(num, "scalar", use_bias=False, key=key)
        model = nn.Sequential([nn.freeze(Features(weight, bias)), layer])
        data = x, y.astype(np.float32)
        return bayes.Posterior(model, bayes.normal(), bayes.Gaussian(noise), data)

    known = _by_algebra(design(x), design(near), design(far), noise)
    return Problem("Gaussian process", target, near, far, known)


def logistic_regression() -> Problem:
    """A logistic regression with three unknowns and two overlapping classes."""
    random = np.random.default_rng(2)
    x, near, far = _inputs(random, 60, 2)
    logits = x @ np.array([1.0, -1.0]) + 0.5
    y = (random.uniform(size=len(x)) < 1 / (1 + np.exp(-logits))).astype(np.int32)

    def target(key: jax.Array) -> bayes.Posterior:
        model = nn.Linear(2, "scalar", key=key)
        return bayes.Posterior(model, bayes.normal(), bayes.Bernoulli(), (x, y))

    return Problem("logistic regression", target, near, far)


def network() -> Problem:
    """A network with five tanh units, 21 unknowns and known noise."""
    random, noise = np.random.default_rng(3), 0.3
    x, near, far = _inputs(random, 60, 2)
    y = np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] + noise * random.normal(size=len(x))

    def target(key: jax.Array) -> bayes.Posterior:
        model = nn.MLP(2, "scalar", width_size=5, depth=1, activation=jnp.tanh, key=key)
        data = x, y.astype(np.float32)
        return bayes.Posterior(model, bayes.normal(), bayes.Gaussian(noise), data)

    return Problem("network", target, near, far)


PROBLEMS: Mapping[str, Callable[[], Problem]] = {
    "linear regression": linear_regression,
    "Gaussian process": gaussian_process,
    "logistic regression": logistic_regression,
    "network": network,
}


# --- methods ---

METHODS: Mapping[str, bayes.Method] = {
    "NUTS": bayes.NUTS(),
    "HMC": bayes.HMC(),
    "MCLMC": bayes.MCLMC(),
    "SGHMC": bayes.SGHMC(),
    "SGLD": bayes.SGLD(),
    "Laplace, default": bayes.Laplace(),
    "Laplace, full, width 1": bayes.Laplace(structure="full", width=1.0),
    "Laplace, Kronecker, width 1": bayes.Laplace(structure="kronecker", width=1.0),
    "Laplace, diagonal, width 1": bayes.Laplace(structure="diagonal", width=1.0),
    "Laplace, last layer, width 1": bayes.Laplace(structure="last_layer", width=1.0),
    "Pathfinder": bayes.Pathfinder(),
    "mean field": bayes.MeanField(),
    "SWAG": bayes.SWAG(),
    "early-stopped ensemble": bayes.EarlyStoppedEnsemble(members=5),
    "deep ensemble": bayes.DeepEnsemble(),
}
"""The methods in the order of the table."""

QUICK = ("NUTS", "Laplace, full, width 1", "deep ensemble")
CHAINS = bayes.NUTS | bayes.HMC | bayes.MCLMC | bayes.SGHMC | bayes.SGLD
SEEDS = 3
"""The number of seeds of each method. Chains have one seed."""

NUM_DRAWS = 1000
"""The number of networks, for methods that can draw any number."""

CLOSED, CHAINS_AGREE = 0.03, 1.01


class Row(NamedTuple):
    """The names of a method and a problem."""

    problem: str
    method: str
    is_quick: bool

    @property
    def name(self) -> str:
        """The names of the problem and the method."""
        return f"{self.problem}, {self.method}"


@contextlib.contextmanager
def noted(name: str, notes: list[str]) -> Iterator[None]:
    """Adds the first warning of `bayes.infer` to the notes, if they are empty."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    doubts = [each for each in caught if issubclass(each.category, bayes.InferenceWarning)]
    if doubts and not notes:
        notes.append(f"{name}: {doubts[0].message}")


@functools.cache
def known(name: str, is_quick: bool) -> tuple[Problem, Reference, list[str]]:
    """A problem, its reference, and a note if the chains of the reference did not converge."""
    # The programs of all problems together need more memory maps than Linux allows for a process.
    eqxlike.clear_caches()
    jax.clear_caches()
    problem, notes = PROBLEMS[name](), []
    with noted(f"{name}, reference", notes):
        exact = reference(problem, SHORT if is_quick else LONG)
    return problem, exact, notes


def measured(row: Row) -> dict[str, Any]:
    """A row of the report: the ratios of a method for each seed, near and far from the data."""
    problem, exact, of_reference = known(row.problem, row.is_quick)
    method = METHODS[row.method]
    is_kept = isinstance(method, CHAINS | bayes.DeepEnsemble | bayes.Pathfinder)
    ratios: dict[str, list[float]] = {"near": [], "far": []}
    notes: list[str] = []
    start_s = time.perf_counter()
    for seed in range(1 if row.is_quick or isinstance(method, CHAINS) else SEEDS):
        network_key, key = jr.split(jr.key(seed))
        with noted(row.name, notes):
            posterior = bayes.infer(problem.target(network_key), method, key=key, progress=False)
        for place, found in ratios.items():
            x = getattr(problem, place)
            scales = standard_deviations(posterior, x, None if is_kept else NUM_DRAWS)
            found.append(geometric_mean(scales / getattr(exact, place)))
    return {
        "problem": problem.name,
        "method": row.method,
        "is_closed_form": problem.closed_form is not None,
        "reference_r_hat": exact.r_hat,
        **ratios,
        "seconds": time.perf_counter() - start_s,
        "notes": [*of_reference, *notes],
    }


def geometric_mean(ratios: Any) -> float:
    """The geometric mean of numbers of 0 or more."""
    with np.errstate(divide="ignore"):
        return float(np.exp(np.mean(np.log(ratios))))


# --- the table ---


def render(result: Mapping[str, Any], *, markdown: bool) -> str:
    """The table of a report, the targets, the machine it was measured on, and the notes."""
    rows = result["rows"]
    if not rows:
        return "no methods were run"
    draw = table.markdown_table if markdown else table.text_table
    parts = [draw(cells(rows)), EXPLANATION]
    if found := list(targets_of(rows)):
        parts.append(report.render_targets(found))
    method = f"{result['method']['seeds']} seeds, one of chains"
    parts.append(table.describe(result, PACKAGES, method))
    if notes := dict.fromkeys(note for row in rows for note in row["notes"]):
        parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts)


def cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The cells of the table, starting with the headings."""
    problems = list(dict.fromkeys(row["problem"] for row in rows))
    found = {(row["method"], row["problem"]): row for row in rows}
    places = [(problem, place) for problem in problems for place in ("near", "far")]
    lines = [["", *(f"{problem}, {place}" for problem, place in places)]]
    for method in dict.fromkeys(row["method"] for row in rows):
        line = [method]
        for problem, place in places:
            row = found.get((method, problem))
            line.append("" if row is None else f"{geometric_mean(row[place]):.2f}")
        lines.append(line)
    return lines


def targets_of(rows: Sequence[Mapping[str, Any]]) -> Iterator[report.Target]:
    """NUTS reproduces the closed forms, and the chains of each reference agree."""
    errors = {
        f"{row['problem']}, {place}": abs(geometric_mean(row[place]) - 1)
        for row in rows
        if row["method"] == "NUTS" and row["is_closed_form"]
        for place in ("near", "far")
    }
    yield from report.at_most("NUTS: difference from closed forms", CLOSED, errors)
    r_hats = {row["problem"]: row["reference_r_hat"] for row in rows if not row["is_closed_form"]}
    yield from report.at_most("R-hat of the references", CHAINS_AGREE, r_hats)


# --- the command ---


class Named(NamedTuple):
    """An object with a name, for `find`."""

    name: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the methods and prints.

    **Returns:** the exit status: 2 for a wrong argument, 130 after Ctrl-C.
    """
    quick = f"one seed, short references, {', '.join(QUICK)}"
    parser = command.new_parser(NAME, __doc__, ("methods", "problems"), quick)
    options = parser.parse_args(arguments)

    def select() -> list[Row]:
        among = QUICK if options.quick else METHODS
        methods = [each.name for each in find(options.methods, list(map(Named, among)))]
        problems = [each.name for each in find(options.problems, list(map(Named, PROBLEMS)))]
        return [Row(problem, method, options.quick) for problem in problems for method in methods]

    return command.execute(
        NAME,
        options,
        select,
        measured,
        method={"seeds": 1 if options.quick else SEEDS, "is_quick": options.quick},
        packages=PACKAGES[2:4],
        folders=["eqxlike/bayes"],
        render=render,
    )


if __name__ == "__main__":
    sys.exit(main())
