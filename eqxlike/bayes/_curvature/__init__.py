"""The curvature of a log density at its mode, exact or of a cheaper structure."""

from ._gauss_newton import AroundMode as AroundMode
from ._gauss_newton import Part as Part
from ._gauss_newton import block_size as block_size
from ._gauss_newton import parts_of as parts_of
from ._prior_scale import best_prior_scale as best_prior_scale
from ._structure import Curvature as Curvature
from ._structure import Normal as Normal
from ._structure import dense_curvature as dense_curvature
from ._structure import dense_size as dense_size
from ._structure import diagonal_curvature as diagonal_curvature
from ._structure import diagonal_size as diagonal_size
from ._structure import kronecker_curvature as kronecker_curvature
from ._structure import kronecker_size as kronecker_size
