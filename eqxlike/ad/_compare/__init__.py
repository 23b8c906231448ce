"""Modes of differentiation side by side on one function."""
