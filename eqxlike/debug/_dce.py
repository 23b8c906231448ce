"""Detection of arrays that dead code elimination removes from a compiled program."""

import threading
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import PyTree

from .. import is_array, tree_pformat
from .._compat import Tracer
from .._dtypes import is_key


def store_dce(x: PyTree, name: Hashable = None) -> PyTree:
    """Returns `x`, and records which of its arrays a compiled program uses.

    Dead code elimination (DCE) of JAX or of the compiler removes the arrays that are not used.
    `inspect_dce` prints which arrays were used and which were removed.

    **Arguments:**

    - `x`: any pytree. Leaves that are not arrays are passed through.
    - `name`: a name for this call. Pass the same name to `inspect_dce`.

    **Returns:** `x`.

    **Raises:** `RuntimeError` outside of a jit; `TypeError` if `name` is not hashable.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> @eqx.filter_jit
        ... def square(x):
        ...     squared, _ = eqx.debug.store_dce((x**2, x + 1), name="square")
        ...     return squared
        >>> _ = square(jnp.arange(3))
        >>> eqx.debug.inspect_dce("square")
        Found 1 call to `eqxlike.debug.store_dce`.
        Entry 0:
        (i32[3], <DCE'd>)
    """
    if not _is_in_jit():
        raise RuntimeError(
            "`eqxlike.debug.store_dce` should be used inside of a jit: outside, nothing is "
            "compiled and nothing is removed."
        )
    entry = _Entry(x)
    with _lock:
        _entries.setdefault(name, []).append(entry)
    # This callback has an effect, so the compiler never removes it, and `jax.effects_barrier` waits
    # for the program to end.
    jax.debug.callback(entry.note_run)
    leaves, treedef = jtu.tree_flatten(x)
    return treedef.unflatten(
        _watch_p.bind(jnp.asarray(leaf), leaf=entry_leaf) if is_array(leaf) else leaf
        for leaf, entry_leaf in zip(leaves, jtu.tree_leaves(entry.tree), strict=True)
    )


def inspect_dce(name: Hashable = None) -> None:
    """Prints the records of `store_dce(x, name)`, one entry for each trace.

    An array that was used is printed with its shape. An array that was removed is printed as
    `<DCE'd>`. A call that was compiled but has not run is printed as `<not run>`. An example is a
    call in a branch that was not taken. `inspect_dce` waits for running programs.

    **Arguments:**

    - `name`: the name that was passed to `store_dce`.

    **Raises:** `RuntimeError` inside of a jit; `TypeError` if `name` is not hashable.
    """
    if _is_in_jit():
        raise RuntimeError(
            "`eqxlike.debug.inspect_dce` should be used outside of a jit: a program that is being "
            "traced has not been compiled yet."
        )
    jax.effects_barrier()
    with _lock:
        entries = list(_entries.get(name, ()))
    calls = "1 call" if len(entries) == 1 else f"{len(entries)} calls"
    print(f"Found {calls} to `eqxlike.debug.store_dce`.")
    for number, entry in enumerate(entries):
        print(f"Entry {number}:\n{tree_pformat(entry.tree) if entry.has_run else '<not run>'}")


def _is_in_jit() -> bool:
    # A constant is a tracer inside a jit, but not outside.
    return isinstance(jnp.zeros(()), Tracer)


# --- The records, and the primitive that writes them ---


class _Leaf:
    """A leaf of the printed tree, shown as `text`."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


class _Entry:
    """The record of one call of `store_dce`. It keeps no array alive."""

    def __init__(self, x: PyTree):
        self.tree = jtu.tree_map(
            lambda leaf: _Leaf("<DCE'd>" if is_array(leaf) else tree_pformat(leaf)), x
        )
        self.has_run = False

    def note_run(self) -> None:
        self.has_run = True


_entries: dict[Hashable, list[_Entry]] = {}
_lock = threading.Lock()

# A primitive that returns an array unchanged. If the output is used, the primitive sets the text of
# `leaf` to the shape of the array.
_watch_p = Primitive("store_dce")
_watch_p.def_impl(lambda array, *, leaf: array)
_watch_p.def_abstract_eval(lambda shape, *, leaf: shape)


def _run_watched(array: jax.Array, *, leaf: _Leaf) -> jax.Array:
    text = tree_pformat(jax.ShapeDtypeStruct(array.shape, array.dtype), struct_as_array=True)

    def note() -> np.ndarray:
        leaf.text = text
        return np.ones((), bool)

    # The compiler cannot predict the callback's value. So the program runs the callback if and only
    # if the output is needed. The array stays on its device.
    is_used = jax.pure_callback(note, jax.ShapeDtypeStruct((), bool))
    if not is_key(array):
        return _choose(is_used, array)
    data = _choose(is_used, jax.random.key_data(array))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))


def _choose(is_used: jax.Array, array: jax.Array) -> jax.Array:
    # `jnp.where(is_used, array, constant)` would not work: if `array` equals the constant, the
    # compiler would remove the choice.
    return jnp.where(is_used, array, jnp.broadcast_to(is_used.astype(array.dtype), array.shape))


def _apply_to_both(arrays: Any, others: Any, *, leaf: _Leaf) -> tuple[Any, Any]:
    """The rule for forward mode and for `jax.vmap`. Returns tangents or batch axes unchanged."""
    return _watch_p.bind(*arrays, leaf=leaf), *others


ad.primitive_jvps[_watch_p] = _apply_to_both
batching.primitive_batchers[_watch_p] = _apply_to_both
mlir.register_lowering(_watch_p, mlir.lower_fun(_run_watched, multiple_results=False))
