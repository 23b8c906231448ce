"""What a posterior is over: a tree of all that is not known."""

from typing import Any

from jaxtyping import PyTree

from .._module import Module


class Unknowns(Module):
    """What is not known, as a tree of arrays, in standard space or in linked space.

    - `model`: the structure of the model, with an array in place of each that is trained, and
      `None` in place of everything else.
    - `likelihood`: what the likelihood does not know, by name.
    - `prior`: what the prior does not know, by name.
    - `noise`: what the network of a draw draws by itself, such as the key of its masks.
    """

    model: PyTree
    likelihood: dict[str, Any]
    prior: dict[str, Any]
    noise: Any = None
