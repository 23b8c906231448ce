"""Layers that take and return the state of the model."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..._module import Module

if TYPE_CHECKING:
    from typing import ClassVar as AbstractClassVar
else:
    from ..._module import AbstractClassVar

NO_STATE: Any = object()
"""The default of a parameter `state` that may be left out."""


class StatefulLayer(Module):
    """Base of layers that `Sequential` calls as `x, state = layer(x, state=state, key=key)`."""

    __call__: AbstractClassVar[Callable[..., Any]]

    def is_stateful(self) -> bool:
        """Whether the layer takes and returns the state. `True`, unless a subclass knows better.

        **Returns:** `False` says that `Sequential` is to call it as `x = layer(x, key=)`.
        """
        return True


def is_stateful(layer: Any) -> bool:
    """Whether a layer takes and returns the state."""
    return isinstance(layer, StatefulLayer) and layer.is_stateful()
