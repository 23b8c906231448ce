"""Bayesian networks trained on real data, compared with a plain network and a linear model.

Read the files in this order: `training`, `evaluate`, `compare`, `report`, `pictures`, and
`command`, which runs all of them.
"""
