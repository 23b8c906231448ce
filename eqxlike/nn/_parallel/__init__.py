"""Layers beside one another."""

from ._groups import FusedBranches as FusedBranches
from ._parallel import Parallel as Parallel
