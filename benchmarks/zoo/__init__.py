"""The zoo of models on which differentiation modes are compared: in JAX, in NumPyro and in PyTorch.

To add a model, write a function that returns a `Problem` and add it to `PROBLEMS`. A problem with
constrained unknowns is measured in both spaces.
"""

from benchmarks.zoo import bayesian, bayesian_network, networks
from benchmarks.zoo.problem import Problem

PROBLEMS: tuple[Problem, ...] = (
    *(bayesian_network.bayesian_network(width) for width in bayesian_network.WIDTHS),
    bayesian_network.parallel_network(*bayesian_network.BRANCHED),
    bayesian.logistic_regression(),
    bayesian.eight_schools(),
    bayesian.hierarchical_poisson(),
    bayesian.gaussian_mixture(),
    bayesian.lkj_normal(),
    bayesian.dirichlet_categorical(),
    bayesian.garch(),
    bayesian.hidden_markov(),
    networks.neural_ode(),
    networks.convolutional_network(),
    networks.transformer_block(),
    networks.lstm(),
)
