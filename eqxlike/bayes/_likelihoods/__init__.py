"""How data are distributed, given what a network returns: one likelihood a file."""

from ._bernoulli import Bernoulli as Bernoulli
from ._categorical import Categorical as Categorical
from ._gaussian import Gaussian as Gaussian
from ._likelihood import Likelihood as Likelihood
from ._poisson import Poisson as Poisson
from ._student_t import StudentT as StudentT
