"""A function that is differentiated, and where."""

import dataclasses
import functools
import importlib.util
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, PyTree

from ..._compat import Tracer
from ..._partition import Rest, split
from ..._pytree import is_inexact_array
from ..._transforms import filter_eval_shape, filter_value_and_grad
from ..._transforms._derivatives._by_mode import check_mode, path_of_taken
from ..._transforms._jit._callables import unbind
from ..._transforms._signatures import check_callable
from .._modes import Auto, Checkpointed, Enzyme, FiniteDifference, Forward, Mode, Reverse
from .._modes._mode import Arrays, OfArrays


@dataclasses.dataclass(frozen=True)
class Subject:
    """A function and its arguments, the first of which it is differentiated by.

    - `has_aux`: whether it returns `(value, aux)`.
    - `arrays`: those of the first argument that it is differentiated by, as JAX takes them.
    - `rest`: what they were taken out of.
    - `value_dtype`: the dtype of the value.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    has_aux: bool
    arrays: Arrays
    rest: Rest
    value_dtype: Any

    def value_and_grad(self, mode: Mode) -> Callable[..., tuple[Any, PyTree]]:
        """The function from the arguments to `(value or (value, aux), gradient)`."""
        return filter_value_and_grad(self.function, has_aux=self.has_aux, mode=mode)

    def value_of(self, output: Any) -> Array:
        """The value, out of what the function returned."""
        return output[0] if self.has_aux else output

    def gradients_in(self, gradient: PyTree) -> list[Any]:
        """What `gradient` has in the place of each of the arrays.

        **Raises:** `ValueError` or `TypeError` if it has another structure.
        """
        return self.rest.take(self.rest.treedef.flatten_up_to(gradient))

    def path_of(self, place: int) -> str:
        """The path of the array at `place`."""
        return path_of_taken(self.rest, place)


def checked_subject(
    function: Callable[..., Any], args: tuple[Any, ...], has_aux: bool, caller: str
) -> Subject:
    """The Subject, checked.

    **Raises:** `TypeError` or `ValueError`, in the name of `caller`, if it has no gradient in any
    mode; and what the function itself raises when it is traced.
    """
    check_callable(function, caller)
    if not args:
        raise TypeError(
            f"`{caller}` expects the function and its arguments, of which the first is the one "
            "that is differentiated by; there are none."
        )
    function = with_arrays_as_leaves(function)
    refuse_tracers(function, args, caller)
    arrays, rest = split(args[0], is_inexact_array)
    if not arrays:
        raise ValueError(
            f"`{caller}` has nothing to differentiate by: args[0] holds no floating-point or "
            "complex array that is not frozen. (A Python number is static; `jnp.asarray` makes an "
            "array of it.)"
        )
    evaluate = filter_value_and_grad(function, has_aux=has_aux, mode=_OnlyValue())
    output, _ = filter_eval_shape(evaluate, *args)
    value = output[0] if has_aux else output
    return Subject(function, args, has_aux, list(map(jnp.asarray, arrays)), rest, value.dtype)


def with_arrays_as_leaves(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`; if it is a partial function or a method, as a pytree of what is bound to it.

    So its arrays are arguments of a program, as in `filter_jit`, and no constants.
    """
    if not isinstance(function, functools.partial | types.MethodType):
        return function
    unbound = unbind(function)
    return jtu.Partial(unbound.function, *unbound.args, **unbound.kwargs)


def refuse_tracers(function: Any, args: tuple[Any, ...], caller: str) -> None:
    """Raises `TypeError`, naming the path, if there is a traced array."""
    for path, leaf in jtu.tree_leaves_with_path((function, *args)):
        if isinstance(leaf, Tracer):
            name = "the function" if path[0].idx == 0 else f"args[{path[0].idx - 1}]"
            raise TypeError(
                f"`{caller}` measures, so it cannot be called inside of a transformation such as "
                f"`filter_jit`, where arrays have no values: {name}{jtu.keystr(path[1:])} is "
                "traced. Call it outside."
            )


class _OnlyValue(Mode):
    """No mode: the function is called, and so found fit to be differentiated or not."""

    def value_and_grad(
        self, function: OfArrays, arrays: Arrays
    ) -> tuple[tuple[Float[Array, ""], Arrays], Arrays]:
        return function(arrays), arrays


# --- Modes by the names that tables call them ---


CHUNK = 64
"""So many directions at once keep a CPU busy, and memory within bounds."""

Modes = Iterable[Mode] | Mapping[str, Mode] | None


def named_modes(modes: Modes, caller: str) -> dict[str, Mode]:
    """The modes that `caller` was given, by name; those that there are, for `None`.

    **Raises:** `TypeError` for what is not a mode, or a name that is not a string; `ValueError` if
    there are none.
    """
    if modes is None:
        modes = [Reverse(), Checkpointed(), Forward(CHUNK), FiniteDifference()]
        modes += [Enzyme()] if importlib.util.find_spec("enzyme_ad") else []
        modes += [Auto()]
    if isinstance(modes, Mapping):
        for name in modes:
            if not isinstance(name, str) or not name:
                raise TypeError(
                    f"`{caller}` expects the names of modes to be strings, and not empty; got "
                    f"{name!r}."
                )
        named: list[tuple[Any, Any]] = list(modes.items())
    elif isinstance(modes, Iterable) and not isinstance(modes, str):
        named = [(as_written(each), each) for each in modes]
    else:
        raise TypeError(
            f"`{caller}` expects as `modes` a sequence of modes, or a mapping from names to modes; "
            f"got {modes!r}."
        )
    if not named:
        raise ValueError(f"`{caller}` expects at least one mode; `modes` is empty.")
    found: dict[str, Mode] = {}
    for name, mode in named:
        check_mode(mode, caller)
        found[_unused(name, found)] = mode
    return found


def as_written(mode: Any) -> str:
    """A mode as one writes it, without the arguments that it has by default.

    >>> as_written(Forward(chunk=8)), as_written(FiniteDifference(order=2))
    ('Forward(chunk=8)', 'FiniteDifference()')
    """
    if not isinstance(mode, Mode):
        return type(mode).__name__
    given = {
        each.name: getattr(mode, each.name)
        for each in dataclasses.fields(mode)
        if each.repr and getattr(mode, each.name, None) is not each.default
    }
    shown = (f"{name}={getattr(value, '__name__', repr(value))}" for name, value in given.items())
    return f"{type(mode).__name__}({', '.join(shown)})"


def _unused(name: str, names: Iterable[str]) -> str:
    """`name`, with a number behind it if it is among `names`."""
    number, candidate = 1, name
    while candidate in names:
        number += 1
        candidate = f"{name} #{number}"
    return candidate


# --- Exceptions as the text in a row ---


def described(error: Exception) -> str:
    """The type, the message and the notes of an exception."""
    name = type(error).__name__
    # JAX puts a line of dashes before a note on its traceback, which is not shown.
    notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith("---")]
    return "\n".join([f"{name}: {error}" if str(error) else name, *notes])
