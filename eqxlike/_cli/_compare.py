"""The models of a data set side by side: trained, and evaluated on the test part."""

import dataclasses
import importlib.util
import sys
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from .._timing import Measurement
from ._data import Data, Part
from ._evaluate import LEVEL, Evaluation, evaluate, evaluate_classification, evaluate_regression
from ._methods import METHODS, evaluate_method
from ._models import Settings
from ._train import Training, train_bayesian, train_plain

BAYESIAN = "bayesian"
PLAIN = "plain"


@dataclasses.dataclass
class Output:
    """The output for one data set, as far as it was reached.

    - `data`: the data set that was trained on.
    - `settings`: the settings of the trainings.
    - `bayesian`: the training of the Bayesian network.
    - `plain`: the training of the plain network; None if it was not reached.
    - `evaluations`: the evaluations that were reached, by name of the model.
    - `dispatch`: the dispatch table, by row; empty if it was not reached.
    - `seconds`: the seconds that all of it took.
    """

    data: Data
    settings: Settings
    bayesian: Training
    plain: Training | None = None
    evaluations: dict[str, Evaluation] = dataclasses.field(default_factory=dict)
    dispatch: dict[str, Measurement] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    @property
    def trainings(self) -> dict[str, Training]:
        """The trainings that were reached, by name of the model."""
        pairs = ((BAYESIAN, self.bayesian), (PLAIN, self.plain))
        return {name: training for name, training in pairs if training is not None}


def compare(
    data: Data,
    settings: Settings,
    *,
    seed: int,
    outputs: dict[str, Output],
    methods: Sequence[str] = (),
) -> Output:
    """Trains a Bayesian and a plain network and the baseline, and evaluates them.

    A training that did not finish is reported on standard error, and what it reached is evaluated.

    **Arguments:**

    - `data`: the data set to train on and to evaluate with.
    - `settings`: the settings of the trainings.
    - `seed`: the seed of weights and noise.
    - `outputs`: gets the output under the name of the data set as soon as there is something in
      it, so that it is there when Ctrl-C ends the rest.
    - `methods`: names of further methods, see `_methods`.

    **Returns:** the output.

    **Raises:** `KeyboardInterrupt` if Ctrl-C came, in a training or elsewhere.
    """
    bayesian = train_bayesian(data, settings, seed=seed)
    output = outputs[data.name] = Output(data, settings, bayesian)
    _evaluate(output, BAYESIAN, bayesian, seed, num_samples=settings.num_samples)
    output.plain = train_plain(data, settings, seed=seed)
    _evaluate(output, PLAIN, output.plain, seed, num_samples=1)
    output.evaluations[baseline_name(data)] = evaluate_baseline(data)
    for name in methods:
        output.evaluations[name] = evaluate_method(data, settings, name, seed=seed)
    return output


def _evaluate(
    output: Output, name: str, training: Training, seed: int, *, num_samples: int
) -> None:
    data, result = output.data, training.result
    if result.stopped != "finished":
        print(f"{data.name}, {name}: {result.message}", file=sys.stderr, flush=True)
    output.evaluations[name] = evaluate(data, training.model, seed=seed, num_samples=num_samples)
    if result.stopped == "interrupted":
        raise KeyboardInterrupt


# The demo's results as tables: by rich on a terminal that has it, as aligned text elsewhere.


TITLES = {
    BAYESIAN: "Bayesian MLP",
    PLAIN: "plain MLP",
    "ridge": "ridge regression",
    "logistic": "logistic regression",
} | {name: choice.title for name, choice in METHODS.items()}
"""The titles of models in tables and pictures, by name."""

METRICS = {
    "rmse": ("RMSE", ".1f"),
    "accuracy": ("accuracy", ".1%"),
    "nll": ("NLL (nats)", ".4f"),
    "coverage": (f"in {LEVEL:.0%} interval", ".1%"),
    "width": ("interval width", ".0f"),
    "ece": ("ECE", ".4f"),
    "seconds": ("seconds", ".0f"),
}
"""The heading and the format of each metric, by name."""


def print_metrics(output: Output) -> None:
    """Prints the models side by side, on the test part."""
    found = {name: each.metrics for name, each in output.evaluations.items()}
    if not found:
        return
    order = (BAYESIAN, PLAIN, baseline_name(output.data), *METHODS)
    names = [name for name in order if name in found]
    shown = [metric for metric in METRICS if any(metric in each for each in found.values())]
    rows = [[TITLES[name], *(_cell(found[name], metric) for metric in shown)] for name in names]
    title = f"{output.data.name}: {len(output.data.test)} held-out examples"
    print_table(title, ["", *(METRICS[metric][0] for metric in shown)], rows)
    if (weight := output.settings.kl_weight) != 1:
        print(f"  ({TITLES[BAYESIAN]}: KL weight {weight:g}, a tempered posterior)")


def _cell(metrics: Mapping[str, float], metric: str) -> str:
    return format(metrics[metric], METRICS[metric][1]) if metric in metrics else ""


def print_dispatch(outputs: Mapping[str, Output]) -> None:
    """Prints what calls cost, in microseconds and as ratios to the baseline."""
    rows = [
        [
            f"{name}, {row}",
            column.name,
            f"{column.dispatch_us:.1f}",
            f"{column.dispatch_ratio.median:.2f}",
            f"{column.completion_us:.1f}",
            f"{column.completion_ratio.median:.2f}",
        ]
        for name, output in outputs.items()
        for row, measured in output.dispatch.items()
        for column in measured.columns.values()
    ]
    if rows:
        title = "what a call costs: until it returns (dispatch), until its result is ready"
        headings = ["", "called by", "dispatch (us)", "ratio", "completion (us)", "ratio"]
        print_table(title, headings, rows)


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table, its numbers flush right."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        _print_rich(title, headings, rows)
    else:
        print("\n" + plain_table(title, headings, rows))


def plain_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as aligned text.

    >>> print(plain_table("two", ["", "RMSE"], [["a", "1.5"], ["long", "12.5"]]))
    two
            RMSE
      a      1.5
      long  12.5
    """
    is_number = _number_columns(rows)
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        ).rstrip()
        for row in (headings, *rows)
    ]
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _number_columns(rows: Sequence[Sequence[str]]) -> list[bool]:
    columns = zip(*rows, strict=True)
    return [all(cell[:1] in "-0123456789" for cell in column) for column in columns]


def _print_rich(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for heading, is_number in zip(headings, _number_columns(rows), strict=True):
        table.add_column(heading, justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print()
    console.print(table)


# Baselines that nobody here wrote: scikit-learn's linear models.
#
# How much to regularise is chosen by the validation part; the model is then fitted to the whole
# training part, as the plain network is.


ALPHAS = tuple(10.0**power for power in range(-2, 5))
"""The penalties on ridge regression's weights to choose from."""

INVERSE_PENALTIES = tuple(10.0**power for power in range(-2, 2))
"""The inverse penalties on logistic regression's weights to choose from."""


def baseline_name(data: Data) -> str:
    """The name of the baseline of a data set."""
    return "ridge" if data.is_regression else "logistic"


def evaluate_baseline(data: Data) -> Evaluation:
    """Fits the baseline of a data set and evaluates it on the test part."""
    return _ridge(data) if data.is_regression else _logistic(data)


def _ridge(data: Data) -> Evaluation:
    """Ridge regression, as a Gaussian with the variance of its residuals in training."""
    from sklearn.linear_model import Ridge

    def fitted(part: Part, alpha: float) -> Ridge:
        return Ridge(alpha=alpha).fit(part.x, part.y)

    fit_part, validation = data.validation_split()

    def squared_error(alpha: float) -> float:
        residuals = validation.y - fitted(fit_part, alpha).predict(validation.x)
        return float(np.mean(residuals**2))

    model = fitted(data.train, min(ALPHAS, key=squared_error))
    residuals = data.train.y - model.predict(data.train.x)
    degrees_of_freedom = len(residuals) - data.train.x.shape[1] - 1
    noise = np.sqrt(np.sum(residuals**2) / degrees_of_freedom, dtype=np.float32)
    means = model.predict(data.test.x).astype(np.float32)
    return evaluate_regression(data, jnp.asarray(means)[None], jnp.asarray(noise))


def _logistic(data: Data) -> Evaluation:
    """Multinomial logistic regression with an L2 penalty."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss

    def fitted(part: Part, inverse_penalty: float) -> LogisticRegression:
        # lbfgs, the default, makes many small calls of a threaded BLAS: ten times faster on idle
        # cores, ten times slower on busy ones.
        model = LogisticRegression(
            C=inverse_penalty, solver="saga", max_iter=10_000, random_state=0
        )
        return model.fit(part.x, part.y)

    fit_part, validation = data.validation_split()

    def nll(inverse_penalty: float) -> float:
        model = fitted(fit_part, inverse_penalty)
        return log_loss(validation.y, model.predict_proba(validation.x), labels=model.classes_)

    model = fitted(data.train, min(INVERSE_PENALTIES, key=nll))
    log_probabilities = model.predict_log_proba(data.test.x).astype(np.float32)
    return evaluate_classification(data, jnp.asarray(log_probabilities))
