"""Calls that `transfers("exclusive")` looks at: what would leave the device is not run."""

import weakref
from typing import Any

import jax
import jax.tree_util as jtu

from ..._compat import Tracer
from ..._departures import Departure, departures
from ..._pytree import listed
from ..._transfers import TransferError, exclusive_device
from ._arguments import ArgumentOrder
from ._compiled import CompiledFunction

# A loop calls the same program again and again.
_found: weakref.WeakKeyDictionary[Any, dict[Any, tuple[Departure, ...]]] = (
    weakref.WeakKeyDictionary()
)


def refuse_leaving(
    order: ArgumentOrder,
    ordered: tuple[Any, ...],
    names: tuple[str, ...],
    arrays: list[Any],
    compiled: CompiledFunction,
) -> None:
    """Raises `TransferError` if this call would leave the device of an exclusive context."""
    device = exclusive_device()
    if device is None:
        return
    within = f"inside transfers('exclusive'), which is for {device}"
    elsewhere = [
        f"{label}{jtu.keystr(path)} on {', '.join(map(str, leaf.devices()))}"
        for label, arg in zip(order.labels(len(ordered), names), ordered, strict=True)
        for path, leaf in jtu.tree_leaves_with_path(arg)
        if _is_concrete(leaf) and leaf.devices() != {device}
    ]
    if elsewhere:
        raise TransferError(
            f"{order.function_name} got {listed(elsewhere)} {within}: move it there with "
            "`jax.device_put` first."
        )
    try:
        jaxpr = compiled.jitted(arrays).trace(*arrays).jaxpr
    finally:
        compiled.donation_warnings.restore()
    known = _found.setdefault(jaxpr, {})
    if device not in known:
        known[device] = tuple(departures(jaxpr, device))
    if known[device]:
        raise TransferError(
            f"{order.function_name} would leave the device {within}: it calls "
            f"{listed(list(map(str, known[device])))}. Take that out of the program, or call "
            f"{order.function_name} outside of the context."
        )


def _is_concrete(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
