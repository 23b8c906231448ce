"""Measurements of eqxlike side by side with raw JAX and with its peers."""
