"""Interleaved measurements of eqxlike, raw JAX and peers."""
