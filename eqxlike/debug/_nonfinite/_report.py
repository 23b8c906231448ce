"""What was found: an operation, its place, and the ranges of what it took and gave."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Values:
    """The values of an array.

    - `shape`, `dtype`: of the array.
    - `lowest`, `highest`: of its finite numbers, the parts of complex ones among them; `None` if it
      has none.
    - `num_nan`, `num_infinite`: how many of its elements are NaN, and how many infinite.
    - `first`: the index of the first element that is either; `None` if none is.
    """

    shape: tuple[int, ...]
    dtype: str
    lowest: float | None
    highest: float | None
    num_nan: int
    num_infinite: int
    first: tuple[int, ...] | None

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.shape))
        parts = []
        if self.lowest is not None:
            is_one = self.lowest == self.highest
            parts.append(
                f"{self.lowest:.4g}" if is_one else f"{self.lowest:.4g} to {self.highest:.4g}"
            )
        found = [(self.num_nan, "NaN"), (self.num_infinite, "infinite")]
        parts += [f"{number} {what}" for number, what in found if number]
        if self.first:
            parts.append(f"the first at {list(self.first)}")
        return f"{self.dtype}[{sizes}]: {', '.join(parts) or 'empty'}"


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """The operation that made the first NaN or infinity; `str` shows all of it.

    - `kind`: `"NaN"` or `"infinity"`.
    - `during`: `"forward pass"` or `"gradient"`.
    - `layer`: the path of the layer that was being called, such as `"model.layers[1]"`; `""` if
      the operation stands in none.
    - `layer_type`: the name of its class; `""` if there is none.
    - `operation`: the name of the primitive; that of an argument, if it came with that one.
    - `source`: the line of source, `"file:line in function"`; `""` if JAX does not know.
    - `turns`: the turns of the loops around it, from 0, outer ones first.
    - `inputs`, `outputs`: the values that the operation took and gave.
    - `came_with`: the path of the argument that brought the infinity which the operation made a NaN
      of; `""` if none did.
    - `reaches`: the path of the first part of the result that it spoils.
    - `then`: the operation that made a NaN of the infinity, if that is another.
    """

    kind: str
    during: str
    layer: str
    layer_type: str
    operation: str
    source: str
    turns: tuple[int, ...]
    inputs: tuple[Values, ...]
    outputs: tuple[Values, ...]
    reaches: str
    then: "NonFinite | None" = None
    came_with: str = ""

    def __str__(self) -> str:
        lines = [f"The first {self.kind} of the {self.during} {self._made()}", *self._place()]
        lines += [f"  took {each}" for each in self.inputs]
        lines += [f"  gave {each}" for each in self.outputs]
        lines += [f"  The infinity that it took came with {self.came_with}."] * bool(self.came_with)
        if self.then is not None:
            lines += [f"  and {self.then._made('became NaN')}"]
            lines += [f"  {line}" for line in self.then._place()]
        return "\n".join([*lines, f"  It reaches {self.reaches}."])

    def _made(self, made: str = "was made") -> str:
        if not self.inputs and not self.source:
            return f"came with {self.operation}."
        layer = f" in {self.layer} ({self.layer_type})" if self.layer else ""
        turns = f", turn {', '.join(map(str, self.turns))} of the loop" if self.turns else ""
        return f"{made} by `{self.operation}`{layer}{turns}:"

    def _place(self) -> list[str]:
        return [f"  at {self.source}"] if self.source else []


def has_numbers(value: Any) -> bool:
    """Whether `value` is an array that may hold a NaN or an infinity."""
    dtype = getattr(value, "dtype", None)
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    return is_array and dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def what_is_wrong(value: Any) -> str | None:
    """`"NaN"` if there is one in `value`, `"infinity"` if there is one alone, or `None`."""
    if isinstance(value, float | complex):
        value = np.asarray(value)
    if not has_numbers(value):
        return None
    numbers = jax.device_get(value)
    if is_finite(numbers).all():
        return None
    return "NaN" if np.isnan(numbers).any() else "infinity"


def is_finite(value: Any) -> np.ndarray:
    """Where `value`, an array or a number of Python, is neither NaN nor infinite."""
    return np.isfinite(jax.device_get(value))


def values_of(value: Any, dtype: Any = None) -> Values:
    """The `Values` of an array, or of a number of Python, which has the `dtype` of a program."""
    numbers = np.asarray(jax.device_get(value), dtype)
    parts = np.ravel(numbers)
    if np.iscomplexobj(parts):
        parts = np.concatenate([np.real(parts), np.imag(parts)])
    # `float64` holds all that the small floats do, which NumPy does not take the minimum of.
    finite = parts[np.isfinite(parts)].astype(np.float64)
    is_bad = ~np.isfinite(numbers)
    is_nan = np.isnan(numbers)
    return Values(
        shape=numbers.shape,
        dtype=str(numbers.dtype),
        lowest=float(finite.min()) if finite.size else None,
        highest=float(finite.max()) if finite.size else None,
        num_nan=int(is_nan.sum()),
        num_infinite=int((is_bad & ~is_nan).sum()),
        first=tuple(map(int, np.argwhere(is_bad)[0])) if is_bad.any() else None,
    )
