"""The models of a data set side by side: trained, and evaluated on the test part."""

import dataclasses
import sys
from collections.abc import Sequence

from .._timing import Measurement
from ._baselines import baseline_name, evaluate_baseline
from ._data import Data
from ._evaluate import Evaluation, evaluate
from ._methods import evaluate_method
from ._settings import Settings
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
