"""Derivatives: gradients, products, Jacobians, and custom rules."""

from ._custom import filter_closure_convert as filter_closure_convert
from ._custom import filter_custom_jvp as filter_custom_jvp
from ._custom import filter_custom_vjp as filter_custom_vjp
from ._grad import filter_grad as filter_grad
from ._grad import filter_hessian as filter_hessian
from ._grad import filter_jacfwd as filter_jacfwd
from ._grad import filter_jacrev as filter_jacrev
from ._grad import filter_value_and_grad as filter_value_and_grad
from ._products import filter_jvp as filter_jvp
from ._products import filter_vjp as filter_vjp
