"""Automatic differentiation: modes, Jacobians, Hessians, products, and a comparison of modes."""

import typing as _typing

from .._names import former_names as _former_names
from ._compare import Comparison as Comparison
from ._compare import ComparisonRow as ComparisonRow
from ._compare import compare as compare
from ._custom import Checkpointed as Checkpointed
from ._custom import Differentiated as Differentiated
from ._custom import differentiate_with as differentiate_with
from ._modes import Auto as Auto
from ._modes import Enzyme as Enzyme
from ._modes import FiniteDifference as FiniteDifference
from ._modes import Forward as Forward
from ._modes import Mode as Mode
from ._modes import Reverse as Reverse
from ._products import Pushforward as Pushforward
from ._products import gradient_buffers as gradient_buffers
from ._products import hessian as hessian
from ._products import hvp as hvp
from ._products import jacobian as jacobian
from ._products import jvp_and_vjp as jvp_and_vjp
from ._products import taylor as taylor
from ._products import value_and_grad_into as value_and_grad_into

if not _typing.TYPE_CHECKING:
    __getattr__ = _former_names(__name__)
