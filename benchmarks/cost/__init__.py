"""The parts of `python -m benchmarks.bayes_cost`: densities, steps, chains, ensembles."""
