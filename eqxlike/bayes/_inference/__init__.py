"""Finding a posterior, whatever the method: what a method is, its run, and what is found."""

from ._diagnostics import Convergence as Convergence
from ._diagnostics import Diagnostics as Diagnostics
from ._diagnostics import convergence as convergence
from ._fitted import FittedPosterior as FittedPosterior
from ._infer import InferenceWarning as InferenceWarning
from ._infer import infer as infer
from ._infer import inferred as inferred
from ._infer import load as load
from ._method import Method as Method
from ._method import Problem as Problem
from ._method import Record as Record
from ._method import State as State
from ._method import chosen as chosen
