"""Bayesian networks trained on real data, compared with a plain network and a linear model.

In the order of reading: `data`, `training`, `evaluate`, `calls`, then `report` and `pictures`, and
`command`, which runs them.
"""
