"""The parts of `python -m benchmarks.ad_modes`: peers, tables and targets."""
