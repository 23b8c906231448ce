"""Finds numerically unstable formulas in a traced program, and rewrites them."""
