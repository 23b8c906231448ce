"""The zoo of models that differentiation modes are compared on.

To add one, write a function that returns a `Problem` and name it in `PROBLEMS`; if its unknowns
have constraints, say which, and it is there in both spaces.
"""

from collections.abc import Iterator

from benchmarks import ad_bayesian, ad_bayesian_network, ad_networks, ad_series
from benchmarks.ad_links import linked
from benchmarks.ad_problem import Problem

PROBLEMS: tuple[Problem, ...] = (
    *(ad_bayesian_network.bayesian_network(width) for width in ad_bayesian_network.WIDTHS),
    ad_bayesian_network.parallel_network(*ad_bayesian_network.BRANCHED),
    ad_bayesian.logistic_regression(),
    ad_bayesian.eight_schools(),
    ad_bayesian.hierarchical_poisson(),
    ad_bayesian.gaussian_mixture(),
    ad_bayesian.lkj_normal(),
    ad_bayesian.dirichlet_categorical(),
    ad_series.garch(),
    ad_series.hidden_markov(),
    ad_networks.neural_ode(),
    ad_networks.convolutional_network(),
    ad_networks.transformer_block(),
    ad_networks.lstm(),
)


def in_all_spaces(problem: Problem) -> Iterator[Problem]:
    """A problem as it is, and linked where its unknowns have constraints."""
    yield problem
    if problem.constraints:
        yield linked(problem)
