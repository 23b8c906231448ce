"""Equal mixtures: what the networks of a posterior predict together."""

from ._categorical import CategoricalMixture as CategoricalMixture
from ._checks import check_mixture as check_mixture
from ._mixture import Mixture as Mixture
