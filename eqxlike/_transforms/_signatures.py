"""Types in the signatures of transformations, for type checkers and readers.

A transformation returns an object of a class of its own. A type checker is told that it returns a
function, with the parameters of the one that it was given: to a type checker, functions become
methods in the body of a class and may override methods, and objects do neither.
"""

from collections.abc import Hashable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar

from jax.typing import ArrayLike
from jaxtyping import PyTree

Params = ParamSpec("Params")
Output = TypeVar("Output")
Value = TypeVar("Value", bound=ArrayLike)
Aux = TypeVar("Aux")


DonateWord = Literal["all", "all-except-first", "warn", "warn-except-first", "none"]
DonateNames = tuple[str, ...] | list[str] | AbstractSet[str]
"""`Iterable[str]` would accept any word, a misspelled one too."""


class JitOptions(TypedDict, total=False):
    """The options that `filter_jit` passes on to `jax.jit`."""

    in_shardings: Any
    out_shardings: Any
    keep_unused: bool
    device: Any
    backend: str | None
    inline: Any
    compiler_options: dict[str, Any] | None


class VmapOptions(TypedDict, total=False):
    """The options that `filter_vmap` passes on to `jax.vmap`."""

    spmd_axis_name: Hashable
    sum_match: bool


class PmapOptions(TypedDict, total=False):
    """The options of `filter_pmap`, including those that it passes on to `jax.pmap`."""

    in_axes: PyTree[Any]
    out_axes: PyTree[Any]
    axis_name: Hashable
    axis_size: int | None
    donate: Literal["all", "warn", "none"]
    devices: Sequence[Any] | None
    backend: str | None


class GradOptions(TypedDict, total=False):
    """The options of `filter_grad`, including those that it passes on to `jax.value_and_grad`."""

    mode: Any
    holomorphic: bool
    allow_int: bool
    reduce_axes: Sequence[Hashable]
