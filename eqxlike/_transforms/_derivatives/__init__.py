"""Derivatives: gradients, products, Jacobians, and custom rules.

- `_grad`: `filter_grad`, `filter_jacfwd` and similar functions; gradients by a mode of
  `eqxlike.ad`.
- `_products`: `filter_jvp` and `filter_vjp`.
- `_custom`: `filter_custom_jvp`, `filter_custom_vjp` and `filter_closure_convert`.
- `_linear_call`: a linear function with a custom transpose, for rules that work in all modes.
"""
