"""Functions that define a custom derivative in one call, and functions that match tangents."""

import jax.tree_util as jtu

import eqxlike
from eqxlike._transforms._derivatives._products import match_leaves, tangents_of


def custom_jvp(function, rule):
    custom = eqxlike.filter_custom_jvp(function)
    custom.def_jvp(rule)
    return custom


def custom_vjp(function, forward=None, backward=None, eqx=eqxlike):
    """Defines a custom VJP. By default residuals are `None` and the gradient is the cotangent."""
    custom = eqx.filter_custom_vjp(function)
    custom.def_fwd(
        forward or (lambda perturbed, *args, **kwargs: (function(*args, **kwargs), None))
    )
    custom.def_bwd(backward or (lambda residuals, cotangent, *args, **kwargs: cotangent))
    return custom


def beside(tree, tangents):
    return match_leaves(jtu.tree_structure(tree), tangents, "tangents", "primals")


def checked(leaf, tangent):
    treedef = jtu.tree_structure({"a": 0})
    return tangents_of([leaf], treedef, {"a": tangent}, "tangents", "primals")[0]
