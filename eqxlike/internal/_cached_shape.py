"""Shapes of what a function returns, kept from one call to the next."""

import collections
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PyTree

from .._module import Module, field
from .._partition import Rest, Structure, flatten, split
from .._transforms import filter_eval_shape
from .._transforms._jit._attached import attached

_MAX_CACHED = 256
"""At most this many functions and their static arguments are kept; the oldest go first."""


class _Output(Module):
    """What a function returns: JAX keeps the rest beside the shapes."""

    arrays: list[Any]
    rest: Rest = field(static=True)


class _Traced:
    """A function of the arrays of a call, of which JAX keeps what it has traced.

    - `structure`: all else in the call.
    """

    def __init__(self, structure: Structure):
        self.structure = structure
        rebuild = structure.rebuilder(cache=False)

        def of_arrays(arrays: list[Any]) -> _Output:
            fn, args, kwargs = rebuild(tuple(arrays))
            return _Output(*split(fn(*args, **kwargs)))

        self.of_arrays: Any = jax.jit(of_arrays)


_Table = collections.OrderedDict[Structure, _Traced]
_lasting: _Table = collections.OrderedDict()


def cached_filter_eval_shape(fn: Callable[..., Any], *args: PyTree, **kwargs: PyTree) -> PyTree:
    """`filter_eval_shape`, which traces `fn` once for arguments of the same shapes.

    As under `filter_jit`, what is no array is part of the key. Where that is not hashable, `fn` is
    traced each time.

    >>> import jax.numpy as jnp
    >>> cached_filter_eval_shape(jnp.sum, jnp.ones(2))
    ShapeDtypeStruct(shape=(), dtype=float32)
    """
    call = fn, args, kwargs
    try:
        arrays, structure = flatten(call, with_abstract=True)
    except TypeError:
        return filter_eval_shape(fn, *args, **kwargs)
    table = _table_for(structure)
    traced = table.get(structure)
    if traced is None or not traced.structure.is_current():
        # Of these very objects: a part of one may be compared with a part of another by identity.
        traced = _Traced(flatten(call, with_abstract=True, is_private=True)[1])
        table[structure] = traced
        if len(table) > _MAX_CACHED:
            table.popitem(last=False)
    output = traced.of_arrays.eval_shape(arrays)
    return output.rest.merge(output.arrays)


def _table_for(structure: Structure) -> _Table:
    # What is kept of a function that was defined in another must not keep it.
    if structure.anchor is None:
        return _lasting
    return attached(structure.anchor, "__eqxlike_shapes__", collections.OrderedDict)
