"""Finds numerically unstable formulas in a traced program, and rewrites them.

The files, in the order in which to read them:

- `_stabilise`: the public functions, and `RULES`, the list of all rules.
- `_rewrite`: `Rule`, `Rewrite`, and `StableProgram`, which tries the rules on each step of a
  program and runs the rewritten program.
- `_expressions`: the values of a program as numbers, products and sums.
- `_patterns`: finds formulas in these expressions, in whatever way they are written.
- `_arithmetic`, `_logarithms`, `_zeros`: the rules.
- `_replacements`: the stable functions that replace formulas.
"""
