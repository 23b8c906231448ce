"""Whether what a run was begun with is what it goes on with: a hash that other programs get too."""

import dataclasses
import functools
import hashlib
import inspect
import numbers
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.random as jr
import jax.tree_util as jtu
import numpy as np

from ..._dtypes import is_key
from ..._module import Module
from ..._pytree import is_array_like


def fingerprint(value: Any) -> str:
    """A hash of arrays, numbers, Modules, distributions, and functions by name and closure.

    It does not depend on where in memory something is. Of a function the code is not looked at, and
    of an object of an unknown kind only its class.
    """
    digest = hashlib.sha256()
    for each in _described(value, ()):
        digest.update(each)
        digest.update(b"\0")
    return digest.hexdigest()


def _described(value: Any, above: tuple[Any, ...]) -> Iterator[bytes]:
    """Bytes that tell a value from others.

    **Arguments:**

    - `above`: the functions that hold it: a closure may hold itself.
    """
    if value is None or isinstance(value, str | bytes | bool):
        yield repr(value).encode()
    elif isinstance(value, numbers.Real):
        yield repr(float(value)).encode()
    elif is_array_like(value):
        yield from _of_array(value)
    elif isinstance(value, jax.ShapeDtypeStruct):
        yield f"{value.shape} {value.dtype}".encode()
    elif callable(value) and not _has_parts(value):
        yield from _of_function(value, above)
    else:
        yield type(value).__qualname__.encode()
        yield from _of_several(_parts(value), above)


def _of_several(values: Iterable[Any], above: tuple[Any, ...]) -> Iterator[bytes]:
    # Their number says where they end: `[[1], 2]` is not `[[1, 2]]`.
    each_of = list(values)
    yield str(len(each_of)).encode()
    for each in each_of:
        yield from _described(each, above)


def _of_array(value: Any) -> Iterator[bytes]:
    dtype = value.dtype if hasattr(value, "dtype") else np.result_type(value)
    array = np.asarray(jr.key_data(value) if is_key(value) else value)
    yield f"{array.shape} {dtype}".encode()
    yield array.tobytes()


def _of_function(value: Any, above: tuple[Any, ...]) -> Iterator[bytes]:
    yield getattr(value, "__qualname__", type(value).__qualname__).encode()
    if any(value is each for each in above):
        return
    held: Any = ()
    if isinstance(value, functools.partial):
        held = (value.func, value.args, value.keywords)
    elif inspect.ismethod(value):
        held = (value.__self__, value.__func__)
    elif inspect.isfunction(value):
        held = (*_closure(value), value.__defaults__, value.__kwdefaults__)
    yield from _of_several(held, (*above, value))


def _closure(function: Any) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # Nothing is in it yet.
            yield None


def _has_parts(value: Any) -> bool:
    # Distributions, constraints and transforms of NumPyro have `tree_flatten`, and can be called.
    is_numpyro = hasattr(value, "tree_flatten") and not isinstance(value, type)
    return is_numpyro or isinstance(value, Module)


def _parts(value: Any) -> Iterator[Any]:
    """What an object holds, with names where it has them."""
    if isinstance(value, Module):
        for each in dataclasses.fields(value):
            yield each.name
            yield getattr(value, each.name, None)
    elif isinstance(value, dict):
        for name in sorted(value, key=repr):
            yield name
            yield value[name]
    elif isinstance(value, list | tuple):
        yield from value
    elif hasattr(value, "tree_flatten"):
        yield from value.tree_flatten()
    else:
        leaves = jtu.tree_leaves(value, is_leaf=lambda node: node is not value)
        yield from (each for each in leaves if each is not value)
