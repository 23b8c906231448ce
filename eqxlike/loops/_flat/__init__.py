"""Loops of lists of arrays, and their derivatives."""
