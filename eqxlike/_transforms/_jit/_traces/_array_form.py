"""What JAX knows of an array when it traces: the array itself is not kept."""

import functools
from typing import Any, NamedTuple

import jax

_MAX_FORMS = 4096
_NO_MESH = "no mesh"


class ArrayForm(NamedTuple):
    """The form of an array: arrays of one form share a trace.

    - `shape`: its shape; a size that is a symbol, in an export, is a text.
    - `dtype`: the name of its dtype, as in `"float32"`.
    - `weak_type`: whether it gives way to the dtype of others, as a Python number does.
    - `sharding`: how it lies over the axes of a mesh, as far as the trace depends on that;
      `"no mesh"` if it does not.
    - `text`: JAX's own text for the type. It has what else there may be, such as a memory space.
    """

    shape: tuple[int | str, ...]
    dtype: str
    weak_type: bool
    sharding: str
    text: str

    def __str__(self) -> str:
        text = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        on = "" if self.sharding == _NO_MESH else f" on {self.sharding}"
        weak = " (weak type)" if self.weak_type else ""
        return f"{text}{weak}{on}"


def form_of(array: Any) -> ArrayForm:
    """The form of an array, a tracer or a reference to an array."""
    return _form_of_type(jax.typeof(array))


@functools.lru_cache(_MAX_FORMS)
def _form_of_type(aval: Any) -> ArrayForm:
    return ArrayForm(
        tuple(size if type(size) is int else str(size) for size in getattr(aval, "shape", ())),
        str(getattr(aval, "dtype", aval)),
        bool(getattr(aval, "weak_type", False)),
        _describe_sharding(getattr(aval, "sharding", None)),
        str(aval),
    )


def _describe_sharding(sharding: Any) -> str:
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or mesh.empty:
        return _NO_MESH
    sizes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    axes = [axis for axis in sharding.spec if axis is not None]
    return f"mesh({sizes}){f', {sharding.spec}' if axes else ''}"
