"""Derivatives: gradients, products, Jacobians, and custom rules."""
