"""One call of a function of any arguments, as a function of arrays alone."""

from typing import Any

from ..._partition import UNTRACED, Rest, split
from .._references import refuse_references


class FlatCall:
    """A call whose arrays pass through a transformation of JAX, and all else beside it.

    - `arrays`: those of the function, if it is a pytree, and of its arguments.
    """

    def __init__(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], what: str
    ) -> None:
        """**Arguments:**

        - `what`: what the function is, in the error where it returns a reference.
        """
        self.arrays, self._call = split((function, args, kwargs))
        self._output: Rest = UNTRACED
        self._what = what

    def of_arrays(self, arrays: list[Any]) -> list[Any]:
        """The arrays of what the function returns; what is beside them is kept for `output`."""
        function, args, kwargs = self._call.merge(arrays)
        returned = refuse_references(function(*args, **kwargs), self._what)
        output_arrays, self._output = split(returned)
        return output_arrays

    def output(self, arrays: list[Any]) -> Any:
        """What the function returned, with these arrays in the places of its own."""
        return self._output.merge(arrays)
