"""Finds numerically unstable formulas in a traced program, and rewrites them."""

from ._stabilise import Unstable as Unstable
from ._stabilise import stabilise as stabilise
from ._stabilise import unstable as unstable
from ._stabilise import unstable_in as unstable_in
