"""Inference: the interface of a method, the loop that runs it, and the fitted posterior."""
