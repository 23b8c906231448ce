"""The placement of the arguments of a call by `filter_jit(in_shardings=...)`."""

import inspect
from collections.abc import Mapping
from typing import Any

from jaxtyping import PyTree

from ..._partition import flatten
from .._sharding import shardings_of_arrays
from ._arguments import ArgumentOrder


def check_in_shardings(in_shardings: PyTree, order: ArgumentOrder) -> None:
    """Raises `ValueError` if `in_shardings` names what is no parameter of the function."""
    parameters = order.parameter_names()
    for name in in_shardings if isinstance(in_shardings, Mapping) else ():
        if name not in parameters:
            raise ValueError(
                "`filter_jit(..., in_shardings=...)` by names takes those of parameters of the "
                f"function. {order.function_name} has no parameter named {name!r}; it has "
                f"{', '.join(map(repr, parameters)) or 'none'}."
            )


def shardings_of_arguments(
    in_shardings: PyTree,
    order: ArgumentOrder,
    num_bound: int,
    bound_names: tuple[str, ...],
    ordered: tuple[Any, ...],
    names: tuple[str, ...],
) -> list[Any]:
    """The sharding, or `None`, for each array of an ordered call.

    **Arguments:**

    - `in_shardings`: a prefix of the tuple of arguments; or a dictionary from names of parameters
      to prefixes of their arguments. All other arguments stay where they are.
    - `num_bound`, `bound_names`: the number of arguments at the front, and the names of others,
      that are bound to what was wrapped.
    - `ordered`, `names`: the call.

    **Raises:** `ValueError` if `in_shardings` is no such prefix, or has too few or too many parts.
    """
    num_by_place = len(ordered) - len(names)
    by_place, by_name = (
        ordered[:num_by_place],
        dict(zip(names, ordered[num_by_place:], strict=True)),
    )
    if isinstance(in_shardings, Mapping):
        shardings = []
        for name, argument in order.named(by_place, by_name):
            label = f"in_shardings[{name!r}]"
            shardings += shardings_of_arrays(label, in_shardings.get(name), argument)
        return shardings
    # The bound arguments, as the instance of a method, may lie anywhere.
    unplaced = shardings_of_arrays("in_shardings", None, ordered[:num_bound])
    args = ordered[num_bound:]
    if isinstance(in_shardings, tuple | list):
        labels = order.labels(len(ordered), names)[num_bound:]
        parameters = {parameter.name: parameter for parameter in order.parameters}
        needed = [
            label
            for label, argument in zip(labels, args, strict=True)
            if label not in bound_names and not _is_default(argument, parameters.get(label))
        ]
        rest = labels[len(in_shardings) :]
        if len(in_shardings) > len(args) or not set(needed).isdisjoint(rest):
            raise ValueError(
                f"`in_shardings` has {len(in_shardings)} entries, and this call of "
                f"{order.function_name} has {len(needed)} arguments to place: "
                f"{', '.join(needed) or 'none'}. Expected is one for each in their order, `None` "
                "for what may lie anywhere; or a dictionary by name, as in "
                "`in_shardings={'x': sharding}`."
            )
        in_shardings = (*in_shardings, *[None] * len(rest))
    return unplaced + shardings_of_arrays("in_shardings", in_shardings, args)


def _is_default(argument: Any, parameter: inspect.Parameter | None) -> bool:
    """Whether `argument` has the Structure of the default: the call may have left it out."""
    if parameter is None or parameter.default is inspect.Parameter.empty:
        return False
    _, default = flatten(parameter.default, is_output=True)
    return flatten(argument, is_output=True, with_abstract=True)[1] is default
