"""Words that stand in a tree of arrays."""

from typing import Any

from .._module import Module


def str2jax(msg: str) -> Any:
    """An object without leaves whose text is `msg`: a sentinel that may stand in any pytree.

    Each call makes one of a class of its own, so that no two are equal.

    !!! example

        >>> import jax
        >>> unused = str2jax("unused")
        >>> jax.jit(lambda x: (x, unused))(1.0)[1]
        unused
    """

    def show(self: Any) -> str:
        return msg

    metaclass: Any = type(Module)
    namespace = {"__repr__": show, "__str__": show, "__module__": __name__}
    return metaclass(msg, (Module,), namespace)()
