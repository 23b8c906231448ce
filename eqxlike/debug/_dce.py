"""Arrays that the compiler removed from a program because nothing depends on them."""

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
    """The identity, inside a jit; records which arrays of `x` the compiled program makes use of.

    The others are removed by dead code elimination (DCE), of JAX or of the compiler.
    `inspect_dce` prints the output.

    **Arguments:**

    - `x`: any pytree. Leaves that are not arrays are passed through.
    - `name`: to tell this call from others.

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
            "compiled and nothing removed."
        )
    entry = _Entry(x)
    with _lock:
        _entries.setdefault(name, []).append(entry)
    # It is never removed itself, so that `jax.effects_barrier` waits for the program to end.
    jax.debug.callback(entry.note_run)
    leaves, treedef = jtu.tree_flatten(x)
    return treedef.unflatten(
        _watch_p.bind(jnp.asarray(leaf), leaf=entry_leaf) if is_array(leaf) else leaf
        for leaf, entry_leaf in zip(leaves, jtu.tree_leaves(entry.tree), strict=True)
    )


def inspect_dce(name: Hashable = None) -> None:
    """Prints what `store_dce` recorded under `name`, one entry for each time that it was traced.

    An array that was used is shown by its shape, one that was removed as `<DCE'd>`. Waits for what
    is still running. `<not run>` represents a call that was compiled and not reached, such as one
    in a branch not taken.

    **Arguments:**

    - `name`: that of the calls of `store_dce` to print.

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
    # Whatever is calculated from constants alone is a tracer only where a jit records it all.
    return isinstance(jnp.zeros(()), Tracer)


# --- What is recorded, and the primitive that records it ---


class _Leaf:
    """Represents a leaf, array or not, in the printed tree, as the text it holds."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


class _Entry:
    """One call of `store_dce`. Holds no leaf of its argument, so that it may be kept for good."""

    def __init__(self, x: PyTree):
        self.tree = jtu.tree_map(
            lambda leaf: _Leaf("<DCE'd>" if is_array(leaf) else tree_pformat(leaf)), x
        )
        self.has_run = False

    def note_run(self) -> None:
        self.has_run = True


_entries: dict[Hashable, list[_Entry]] = {}
_lock = threading.Lock()

# The identity of one array. When its output is used, `leaf` takes the text of its shape.
_watch_p = Primitive("store_dce")
_watch_p.def_impl(lambda array, *, leaf: array)
_watch_p.def_abstract_eval(lambda shape, *, leaf: shape)


def _run_watched(array: jax.Array, *, leaf: _Leaf) -> jax.Array:
    text = tree_pformat(jax.ShapeDtypeStruct(array.shape, array.dtype), struct_as_array=True)

    def note() -> np.ndarray:
        leaf.text = text
        return np.ones((), bool)

    # A choice that the compiler cannot foresee. So it calls back if and only if it needs the
    # output, and the array itself stays on its device.
    is_used = jax.pure_callback(note, jax.ShapeDtypeStruct((), bool))
    if not is_key(array):
        return _choose(is_used, array)
    data = _choose(is_used, jax.random.key_data(array))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))


def _choose(is_used: jax.Array, array: jax.Array) -> jax.Array:
    # Not between `array` and a constant: an array of that constant would leave no choice.
    return jnp.where(is_used, array, jnp.broadcast_to(is_used.astype(array.dtype), array.shape))


def _apply_to_both(arrays: Any, others: Any, *, leaf: _Leaf) -> tuple[Any, Any]:
    """The rule of forward mode and of `vmap`: tangents, or axes, stay as they are."""
    return _watch_p.bind(*arrays, leaf=leaf), *others


ad.primitive_jvps[_watch_p] = _apply_to_both
batching.primitive_batchers[_watch_p] = _apply_to_both
mlir.register_lowering(_watch_p, mlir.lower_fun(_run_watched, multiple_results=False))
