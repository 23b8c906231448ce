"""Modes of differentiation side by side on one function."""

from ._compare import compare as compare
from ._comparison import Comparison as Comparison
from ._comparison import ComparisonRow as ComparisonRow
