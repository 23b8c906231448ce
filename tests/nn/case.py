"""What the laws in `test_laws.py` need to know of a layer."""

import dataclasses
from collections.abc import Callable
from typing import Any


def call_plainly(layer: Any, *inputs: Any, key: Any) -> Any:
    return layer(*inputs, key=key)


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration of a layer.

    - `make`: called as `make(key=, dtype=)`. May return any pytree, as a pair of layer and state.
    - `in_shapes`: of each array that it is called with.
    - `out_shape`: of the array that `call` returns.
    - `call`: `call(layer, *inputs, key=)`, for what is not called as `layer(*inputs, key=key)`.
    - `batch_axis`: a name that `call` needs an axis of a batch to have.
    """

    make: Callable[..., Any]
    in_shapes: tuple[tuple[int, ...], ...]
    out_shape: tuple[int, ...]
    call: Callable[..., Any] = call_plainly
    batch_axis: str | None = None


def without_options(make: Callable[[], Any]) -> Callable[..., Any]:
    """`make` for a layer that takes neither key nor dtype."""
    return lambda key, dtype: make()
