"""Functions with a derivative of their own, in one call."""

import eqxlike


def custom_jvp(function, rule):
    custom = eqxlike.filter_custom_jvp(function)
    custom.def_jvp(rule)
    return custom


def custom_vjp(function, forward=None, backward=None, eqx=eqxlike):
    """By default the residuals are `None`, and the gradient is the cotangent."""
    custom = eqx.filter_custom_vjp(function)
    custom.def_fwd(
        forward or (lambda perturbed, *args, **kwargs: (function(*args, **kwargs), None))
    )
    custom.def_bwd(backward or (lambda residuals, cotangent, *args, **kwargs: cotangent))
    return custom
