"""Methods of inference.

- `_descent`: methods that run an optimiser, such as `MAP` and `DeepEnsemble`.
- `_markov_chains`, `_nuts`: Markov chains.
- `_variational`: variational inference.
- `_laplace`: the Laplace approximation. `_laplace_choices` selects its prior scales and its width.
  `_curvature` computes its precision matrix, from the second derivatives in `_gauss_newton`.
"""
