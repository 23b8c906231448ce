"""The parts of `benchmarks.bayes_quality`."""
