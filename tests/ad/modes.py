"""Every mode of differentiation, with the settings that the laws test."""

import importlib.util

import jax

from eqxlike import ad

MODES = {
    "Reverse": ad.Reverse(),
    "Checkpointed": ad.Checkpointed(),
    "Checkpointed, policy": ad.Checkpointed(jax.checkpoint_policies.dots_saveable),
    "Forward": ad.Forward(),
    "Forward, chunks that do not fit": ad.Forward(chunk=4),
    "FiniteDifference, order 2": ad.FiniteDifference(order=2),
    "FiniteDifference, step": ad.FiniteDifference(order=4, step=1e-3),
    "Auto": ad.Auto(),
}
if importlib.util.find_spec("enzyme_ad"):
    MODES["Enzyme"] = ad.Enzyme()


def tolerance(mode: ad.Mode, order: int = 1) -> float:
    """The largest relative error in float64 of a derivative of this order."""
    if not isinstance(mode, ad.FiniteDifference):
        return 1e-10
    return 1e-6 if order == 1 else 1e-3
