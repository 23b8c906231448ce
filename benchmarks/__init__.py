"""Interleaved measurements of eqxlike, plain JAX and other libraries."""
