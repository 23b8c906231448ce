"""Equal mixtures: what the networks of a posterior predict together."""

from ._categorical import CategoricalMixture as CategoricalMixture
from ._mixture import Mixture as Mixture
