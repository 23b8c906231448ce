"""Layers beside one another."""

from ._parallel import Parallel as Parallel
