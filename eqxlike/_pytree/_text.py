"""Pytrees and other values as text: for readers, and to identify a value in any process."""

import dataclasses
import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import wadler_lindig as wl
from jaxtyping import PyTree

from .._dtypes import is_key
from ._predicates import is_array_like


def tree_pformat(
    pytree: PyTree,
    *,
    width: int = 80,
    indent: int = 2,
    short_arrays: bool = True,
    struct_as_array: bool = False,
    truncate_leaf: Callable[[Any], bool] = lambda node: False,
) -> str:
    """Formats a pytree as readable text.

    **Arguments:**

    - `pytree`: any object.
    - `width`: maximum number of columns. A longer line appears only if it cannot be broken.
    - `indent`: number of spaces for each level.
    - `short_arrays`: print arrays as `f32[3,4]` instead of their values.
    - `struct_as_array`: with `short_arrays`, print a `jax.ShapeDtypeStruct` like an array.
    - `truncate_leaf`: a function that takes a node. If it returns `True`, only the name of the
      node's type is printed, as in `MLP(...)`.

    >>> import jax.numpy as jnp
    >>> tree_pformat({"weight": jnp.ones((2, 3)), "size": 3})
    "{'weight': f32[2,3], 'size': 3}"
    """

    def custom(node: Any) -> wl.AbstractDoc | None:
        if truncate_leaf(node):
            return wl.TextDoc(f"{type(node).__name__}(...)")
        is_struct = isinstance(node, jax.ShapeDtypeStruct) and struct_as_array
        if short_arrays and (is_struct or isinstance(node, jax.Array)):
            weak = "weak_" if getattr(node, "weak_type", False) else ""
            return wl.array_summary(node.shape, f"{weak}{node.dtype}", kind=None)
        if isinstance(node, jax.custom_jvp | jax.custom_vjp):
            # The function's own `repr` contains a memory address.
            return wl.pdoc(node.__wrapped__, **options)
        if isinstance(node, jtu.Partial):
            parts = {"func": node.func, "args": node.args, "keywords": node.keywords}
            return wl.bracketed(
                begin=wl.TextDoc("Partial("),
                docs=wl.named_objs(parts.items(), **options),
                sep=wl.comma,
                end=wl.TextDoc(")"),
                indent=indent,
            )
        return None

    options = {"indent": indent, "short_arrays": short_arrays, "custom": custom}
    return wl.pformat(pytree, width=width, **options)


def tree_pprint(
    pytree: PyTree,
    *,
    width: int = 80,
    indent: int = 2,
    short_arrays: bool = True,
    struct_as_array: bool = False,
    truncate_leaf: Callable[[Any], bool] = lambda node: False,
) -> None:
    """Prints a pytree as readable text. The arguments are the same as for `tree_pformat`.

    >>> import jax.numpy as jnp
    >>> tree_pprint({"weight": jnp.ones((2, 3)), "size": 3}, width=20)
    {
      'weight': f32[2,3],
      'size': 3
    }
    """
    text = tree_pformat(
        pytree,
        width=width,
        indent=indent,
        short_arrays=short_arrays,
        struct_as_array=struct_as_array,
        truncate_leaf=truncate_leaf,
    )
    print(text)


# --- A hash and a text that identify a value and are the same in every process ---


_MAX_TEXT = 100
"""Longer texts are cut to this length, and a hash of the value is added."""


def fingerprint(value: Any) -> str:
    """A hash of arrays, numbers, Modules, distributions, functions and other objects.

    Functions are hashed by name and closure, not by their code. Objects are hashed by their
    attributes, or by their `repr` if their class defines one. Memory addresses are left out.
    """
    digest = hashlib.sha256()
    for each in _bytes_of(value, ()):
        digest.update(each)
        digest.update(b"\0")
    return digest.hexdigest()


def stable_text(value: Any) -> str:
    """A text that identifies the value in any process. Functions are identified by name only."""
    if inspect.ismethod(value):
        return f"<{value.__qualname__} of {stable_text(value.__self__)}>"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"<{value.__qualname__}>"
    if isinstance(value, functools.partial):
        parts = map(stable_text, (value.func, *value.args))
        named = (f"{name}={stable_text(each)}" for name, each in sorted(value.keywords.items()))
        return f"<partial of {', '.join((*parts, *named))}>"
    text = _shown(value)
    if isinstance(value, set | frozenset):
        # The order of the elements of a set differs from process to process.
        text = type(value).__name__
    elif type(value).__repr__ is object.__repr__:
        attributes = getattr(value, "__dict__", {}).items()
        shown = [f"{name}={_shown(each)}" for name, each in attributes if _has_full_repr(each)]
        text += f" with {', '.join(shown)}" if shown else ""
    if _has_full_repr(value) and len(text) <= _MAX_TEXT:
        return text
    more = "..." if len(text) > _MAX_TEXT else ""
    text = " ".join(text[:_MAX_TEXT].split())
    return f"{text}{more} (SHA-256 {fingerprint(value)[:16]})"


def _has_full_repr(value: Any) -> bool:
    """Whether the `repr` of a value is complete, and the same in every process."""
    if isinstance(value, tuple | list):
        return all(map(_has_full_repr, value))
    if type(value) is dict:
        return all(map(_has_full_repr, (*value, *value.values())))
    is_short = isinstance(value, np.ndarray | jax.Array) or dataclasses.is_dataclass(value)
    is_short |= isinstance(value, set | frozenset | functools.partial)
    return not is_short and type(value).__repr__ is not object.__repr__


def elements(value: Any) -> tuple[tuple[str, ...] | None, Sequence[Any]]:
    """Returns the path keys of the elements of a container, such as `['a']`, and the elements.

    The path keys are `None` for a list or tuple. For other values, both results are empty.
    """
    if isinstance(value, functools.partial):
        return (".func", ".args", ".keywords"), (value.func, value.args, value.keywords)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        parts = [getattr(value, name, None) for name in names]
        return tuple(map(".{}".format, names)), parts
    if isinstance(value, dict):
        return tuple(f"[{_shown(key)}]" for key in value), list(value.values())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return tuple(map(".{}".format, value._fields)), value  # pyright: ignore
    return (None, value) if isinstance(value, list | tuple) else ((), ())


def _bytes_of(value: Any, above: tuple[Any, ...]) -> Iterator[bytes]:
    """Bytes that identify a value.

    **Arguments:**

    - `above`: the objects that contain the value. These objects are needed because a closure may
      contain itself.
    """
    if value is None or isinstance(value, str | bytes | bool):
        yield repr(value).encode()
    elif isinstance(value, int | float | np.integer | np.floating):
        # A Python number and an equal NumPy number give the same bytes. Integers of 2**53 or more
        # are not converted, since a float cannot represent all of them.
        yield repr(float(value) if abs(value) < 2**53 else value).encode()
    elif isinstance(value, jax.ShapeDtypeStruct):
        yield f"{value.shape} {value.dtype}".encode()
    elif is_array_like(value):
        dtype = value.dtype if hasattr(value, "dtype") else np.result_type(value)
        array = np.asarray(jr.key_data(value) if is_key(value) else value)
        yield f"{array.shape} {dtype}".encode()
        yield array.tobytes()
    else:
        yield getattr(value, "__qualname__", type(value).__qualname__).encode()
        if not any(value is each for each in above):
            parts = list(_parts(value))
            # The number of parts distinguishes `[[1], 2]` from `[[1, 2]]`.
            yield str(len(parts)).encode()
            for part in parts:
                yield from _bytes_of(part, (*above, value))


def _parts(value: Any) -> Iterable[Any]:
    """The parts of an object. If they have names, each name comes before its part."""
    if inspect.ismethod(value):
        return value.__self__, value.__func__
    if inspect.isfunction(value):
        return *map(_content, value.__closure__ or ()), value.__defaults__, value.__kwdefaults__
    if hasattr(value, "__qualname__"):
        return ()
    names, parts = elements(value)
    if parts:
        # The parts are sorted by name, since equal dictionaries may have different orders of keys.
        return parts if names is None else _in_order(dict(zip(names, parts, strict=True)))
    if isinstance(value, set | frozenset):
        return sorted(map(fingerprint, value))
    names = getattr(value, "__dict__", {})
    if hasattr(value, "gather_pytree_data_fields"):
        # This is a NumPyro distribution. Its `tree_flatten` uses the order of a set, which differs
        # from process to process.
        names = {*value.gather_pytree_data_fields(), *value.gather_pytree_aux_fields()}
    elif hasattr(value, "tree_flatten"):
        return value.tree_flatten()
    elif not jtu.all_leaves([value]):
        return jtu.tree_leaves(value, is_leaf=lambda node: node is not value)
    elif type(value).__repr__ is not object.__repr__:
        return (_shown(value),)
    return _in_order({name: vars(value).get(name) for name in names})


def _in_order(named: dict[str, Any]) -> Iterator[Any]:
    for name in sorted(named):
        yield from (name, named[name])


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # The cell is still empty.
        return None


def _shown(value: Any) -> str:
    """The `repr` of a value, without memory addresses."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))
