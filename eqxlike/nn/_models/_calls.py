"""The calls of the Modules in a model as they are traced, and what each costs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu
from jaxtyping import PyTree

from ..._module import Module
from ..._partition import split
from ..._pytree import is_array


class Recorder:
    """The records of all Modules of a model; what is called outside its `with` is not recorded."""

    def __init__(self):
        self._records: list[Record] = []
        self._is_on = False

    def __enter__(self) -> None:
        self._is_on = True

    def __exit__(self, *exception: Any) -> None:
        self._is_on = False

    def add(self, path: tuple[Any, ...], module: Module) -> Any:
        index = len(self._records)
        self._records.append(Record(path, module))

        def report(*call: Any) -> Callable[[Any], None]:
            return self._records[index].report(*call) if self._is_on else lambda outcome: None

        return report

    def take(self) -> list["Record"]:
        """All records, once. JAX may keep the Modules that report here in a cache: they are not to
        keep the arrays of the model alive.
        """
        records, self._records = self._records, []
        return records


class Record:
    """The calls of one Module, with shapes in the place of arrays."""

    def __init__(self, path: tuple[Any, ...], module: PyTree):
        self.path = path
        self.module = module
        self.calls: list[tuple[list[Any], Any]] = []
        self.outputs: list[PyTree] = []

    def report(self, module: PyTree, args: tuple, kwargs: dict[str, Any]) -> Callable[[Any], None]:
        # Of the Module that was called, not of that in the tree: a loop calls slices of it.
        arrays, rest = split((module, args, kwargs), _has_shape)
        call = [_struct(array) for array in arrays], rest

        def done(outcome: Any) -> None:
            self.calls.append(call)
            self.outputs.append(
                jtu.tree_map(lambda leaf: _struct(leaf) if _has_shape(leaf) else leaf, outcome)
            )

        return done

    def flops(self) -> float | None:
        """Of all calls; `None` if there was none, or XLA does not say of one."""
        counts: dict[str, float | None] = {}
        total = 0.0
        for structs, rest in self.calls:
            form = f"{rest.treedef}{rest.leaves(structs)}"
            if form not in counts:
                counts[form] = _flops(structs, rest)
            count = counts[form]
            if count is None:
                return None
            total += count
        return total if self.calls else None


def _flops(structs: list[Any], rest: Any) -> float | None:
    def call(arrays: list[Any]) -> list[Any]:
        layer, args, kwargs = rest.merge(arrays)
        return split(layer(*args, **kwargs))[0]

    try:
        analysis = jax.jit(call).lower(structs).cost_analysis()
    # The call was sound where it was made. By itself it need not be: it may use an axis of a `vmap`
    # around it, or a value of the trace that it was part of; nor has every platform an analysis.
    except Exception:
        return None
    flops = analysis.get("flops") if isinstance(analysis, dict) else None
    return None if flops is None or flops < 0 else float(flops)


def _has_shape(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def _struct(array: Any) -> jax.ShapeDtypeStruct:
    is_weak = getattr(array, "weak_type", False)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=is_weak)
