"""Calling a program with pytrees: what was compared for one call is not compared for the next."""

import collections
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .._partition import ARRAY, Structure, flatten
from ._file import Header
from ._form import Form, NodeForm, arrays_in, build, describe, places_in
from ._given import as_given

_MOST_PLANS = 64
"""At most this many Structures of arguments are known; the oldest go first."""


class Runner:
    """Runs a program on pytrees.

    The form of the arguments is compared with that of the program once for each Structure, shapes
    and dtypes while JAX traces: a warm call does neither.

    **Arguments:**

    - `header`: what the program takes and returns.
    - `call`: the program, from flat arrays to flat arrays.
    """

    def __init__(self, header: Header, call: Callable[..., Sequence[Any]]):
        self._header = header
        self._places = list(_places(header))
        self._jitted = jax.jit(self._checking(call))
        self._plans: collections.OrderedDict[Structure, _Plan] = collections.OrderedDict()
        self._rebuild = _rebuilder(header.outputs)

    def run(self, args: tuple[Any, ...]) -> Any:
        """The output; raises as `Exported.call` says."""
        try:
            arrays, structure = flatten(args)
        except TypeError:
            # What cannot be hashed is compared at each call.
            inputs = self._inputs(args)
        else:
            plan = self._plans.get(structure)
            inputs = (self._plan(args, structure) if plan is None else plan).inputs(arrays)
        return self._rebuild(self._jitted(*inputs))

    def _plan(self, args: tuple[Any, ...], structure: Structure) -> "_Plan":
        # Errors tell of the arguments as they are.
        self._inputs(args)
        held = [_Held(index) for index in range(structure.num_arrays)]
        plan = _Plan(self._inputs(structure.rebuilder(cache=False)(tuple(held))))
        if structure.is_exact and structure.anchor is None:
            self._plans[structure] = plan
            while len(self._plans) > _MOST_PLANS:
                self._plans.popitem(last=False)
        return plan

    def _inputs(self, args: tuple[Any, ...]) -> list[Any]:
        """The flat arrays to call the program with, as it takes them."""
        header = self._header
        inputs: Any = header.inputs
        if len(args) != len(header.parameters):
            raise TypeError(
                f"{header.name} takes ({describe_arguments(header)}), which is "
                f"{len(header.parameters)} in all; it got {len(args)}."
            )
        sizes: dict[str, Any] = {}
        return [
            leaf if type(leaf) is _Held else as_given(form, leaf, path, sizes)
            for child, arg, name in zip(inputs.children, args, header.parameters, strict=True)
            for form, leaf, path in arrays_in(child, arg, name)
        ]

    def _checking(self, call: Callable[..., Sequence[Any]]) -> Callable[..., tuple[Any, ...]]:
        """`call`, which says by path what is of another shape or dtype."""

        def checking(*arrays: Any) -> tuple[Any, ...]:
            sizes: dict[str, Any] = {}
            for (form, path), array in zip(self._places, arrays, strict=True):
                as_given(form, array, path, sizes)
            return tuple(call(*arrays))

        checking.__name__ = checking.__qualname__ = self._header.name
        return checking


class _Held:
    """Stands in the arguments for the array that is at `index` in tree order."""

    __slots__ = ("index",)

    def __init__(self, index: int):
        self.index = index


class _Plan:
    """Which arrays of a call the program takes, and in which order.

    **Arguments:**

    - `inputs`: for each that it takes a `_Held`, or the array itself where a number stands for it.
    """

    def __init__(self, inputs: list[Any]):
        self._given = inputs
        self._is_in_order = [getattr(each, "index", None) for each in inputs] == [
            *range(len(inputs))
        ]

    def inputs(self, arrays: list[Any]) -> list[Any]:
        if self._is_in_order and len(arrays) == len(self._given):
            return arrays
        return [arrays[each.index] if type(each) is _Held else each for each in self._given]


def arranged(header: Header, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a call, some of which are passed by name, in order.

    **Raises:** `TypeError` for a name that is not known, missing, or given twice.
    """
    by_place = header.parameters[: len(args)]
    by_name = header.parameters[len(args) :]
    if len(args) + len(kwargs) != len(header.parameters) or set(kwargs) != set(by_name):
        came = ", ".join([*by_place, *kwargs])
        raise TypeError(f"{header.name} takes ({describe_arguments(header)}); it got ({came}).")
    return args + tuple(kwargs[name] for name in by_name)


def describe_arguments(header: Header) -> str:
    """The arguments of a program, as in `x: float32[batch, 64], scale: float32[]`."""
    inputs = header.inputs
    forms = inputs.children if isinstance(inputs, NodeForm) else ()
    return ", ".join(
        f"{name}: {describe(form)}" for name, form in zip(header.parameters, forms, strict=True)
    )


def _places(header: Header) -> Any:
    inputs: Any = header.inputs
    return itertools.chain.from_iterable(
        places_in(form, name) for name, form in zip(header.parameters, inputs.children, strict=True)
    )


def _rebuilder(form: Form) -> Callable[[Any], Any]:
    """The function from the flat arrays of an output to the output."""
    # Trees have the children of a dictionary in the order of its keys, forms as they were given.
    numbered, structure = flatten(build(form, map(np.asarray, itertools.count())), is_output=True)
    if structure is ARRAY:
        return lambda arrays: arrays[0]
    order = list(map(int, numbered))
    rebuild = structure.rebuilder(cache=False)
    if order == sorted(order):
        return rebuild
    return lambda arrays: rebuild(tuple([arrays[index] for index in order]))
