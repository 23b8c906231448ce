"""Values watched in compiled programs: breakpoints, transformations, dead code, NaN."""

import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Bool, PyTree

from .. import branched_error_if, is_array, tree_pformat
from .._compat import Tracer, register_exclusion
from .._dtypes import is_key, without_key_dtype
from ..extend import Rest, has_tangent, split
from ..loops import unvmap_any

# The debugger skips the frames of this file, and opens in the caller of `breakpoint_if`.
register_exclusion(__file__)


def breakpoint_if(pred: Bool[Array, "..."], **kwargs: Any) -> None:
    r"""Enters `jax.debug.breakpoint` if any element of `pred` is true.

    **Arguments:**

    - `pred`: a boolean, a number, or an array of booleans or numbers. Under `jax.vmap`, all members
      of the batch enter the breakpoint if `pred` is true for one of them.
    - `**kwargs`: passed to `jax.debug.breakpoint`.

    **Raises:** `TypeError` if `pred` is of another type, or if `token` is passed. `breakpoint_if`
    returns no value, so no value could depend on the token.

    !!! example

        >>> import eqxlike as eqx, io, jax.numpy as jnp
        >>> @eqx.filter_jit
        ... def reciprocal(x):
        ...     eqx.debug.breakpoint_if(x == 0, stdin=io.StringIO("p x\nc\n"), backend="cli")
        ...     return 1 / x
        >>> print(reciprocal(jnp.array(2.0)))
        0.5
        >>> print(reciprocal(jnp.array(0.0)))
        Entering jdb:
        (jdb) Array(0., dtype=float32)
        (jdb) inf
    """
    if "token" in kwargs:
        raise TypeError(
            "`breakpoint_if` takes no `token`: it returns no value that later operations could "
            "depend on. Pass `ordered=True` to keep breakpoints in order."
        )
    enter = functools.partial(jax.debug.breakpoint, **kwargs)
    # JAX would turn a `cond` with a batched predicate into a `select`, which runs both branches. So
    # make the predicate the same for the whole batch.
    jax.lax.cond(unvmap_any(pred), enter, lambda: None)


# --- Reports of the transformations of a value ---


def announce_transform(
    x: PyTree, name: Any = None, intermediates: bool = False, announce: Callable[[str], Any] = print
) -> PyTree:
    """Returns `x`, and prints the JAX transformations that are applied to it.

    Each line is a chain of transformations, in the order in which they are applied. For example,
    `jvp_t:transpose:vmap:mlir` means that the tangents were transposed, vectorised and lowered.
    (`jvp_t` stands for the tangents of `jax.jvp`, and `jvp_p` for its primals.) The last item says
    how JAX uses the output: `impl` evaluates it, `abstract` infers its shape during tracing, and
    `mlir` lowers it for the compiler. Calls of a compiled program print nothing.

    **Arguments:**

    - `x`: any pytree. Leaves that are not arrays are passed through.
    - `name`: if not `None`, it is printed in brackets before each chain.
    - `intermediates`: whether to also print a line when a transformation is applied. The line has
      the chain up to this transformation.
    - `announce`: function that is called with each line. By default, `print`.

    **Returns:** `x`.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp
        >>> def double(x):
        ...     return 2 * eqx.debug.announce_transform(x, name="x")
        >>> print(jax.jit(jax.vmap(double))(jnp.arange(3)))
        (x) vmap:abstract
        (x) vmap:mlir
        [0 2 4]
    """
    arrays, rest = split(x)
    announcer = _Announcer(name, intermediates, announce)
    return rest.merge(_bind(arrays, announcer))


@dataclasses.dataclass(frozen=True)
class _Announcer:
    """The options of one call of `announce_transform`, and the transforms that have been applied.

    Objects of two calls with the same options are not equal. If they were equal, JAX would reuse
    the result of the first call for the second call, and the second call would print nothing.

    - `call`: an object that identifies the call.
    """

    name: Any = dataclasses.field(compare=False)
    intermediates: bool = dataclasses.field(compare=False)
    announce: Callable[[str], Any] = dataclasses.field(compare=False)
    call: object = dataclasses.field(default_factory=object, repr=False)
    transforms: tuple[str, ...] = ()

    def reached(self, end: str) -> None:
        """Calls `announce` with the chain of transforms up to `end`."""
        prefix = "" if self.name is None else f"({self.name}) "
        self.announce(prefix + ":".join((*self.transforms, end)))

    def after(self, transform: str) -> "_Announcer":
        return dataclasses.replace(self, transforms=(*self.transforms, transform))

    def applied(self, transform: str) -> "_Announcer":
        """Returns the announcer after a transform. Announces it if `intermediates` is true."""
        if self.intermediates:
            self.reached(transform)
        return self.after(transform)


# A primitive that returns any number of arrays unchanged.
announce_jaxpr_p = Primitive("announce_transform")
announce_jaxpr_p.multiple_results = True


def _announcing(end: str) -> Callable[..., list[Any]]:
    def evaluate(*arrays: Any, announcer: _Announcer) -> list[Any]:
        announcer.reached(end)
        return list(arrays)

    return evaluate


def _bind(arrays: Any, announcer: _Announcer) -> list[Any]:
    """Applies the primitive to all arrays except symbolic zeros."""
    nonzero, rest = split(list(arrays), lambda array: type(array) is not ad.Zero)
    return rest.merge(announce_jaxpr_p.bind(*nonzero, announcer=announcer))


def _announce_jvp(primals: Any, tangents: Any, *, announcer: _Announcer) -> tuple[Any, Any]:
    announcer.applied("jvp")
    return _bind(primals, announcer.after("jvp_p")), _bind(tangents, announcer.after("jvp_t"))


def _announce_transpose(cotangents: Any, *_: Any, announcer: _Announcer) -> list[Any]:
    return _bind(cotangents, announcer.applied("transpose"))


def _announce_batch(arrays: Any, axes: Any, *, announcer: _Announcer) -> tuple[list[Any], Any]:
    return _bind(arrays, announcer.applied("vmap")), axes


announce_jaxpr_p.def_impl(_announcing("impl"))
announce_jaxpr_p.def_abstract_eval(_announcing("abstract"))
ad.primitive_jvps[announce_jaxpr_p] = _announce_jvp
ad.primitive_transposes[announce_jaxpr_p] = _announce_transpose
batching.primitive_batchers[announce_jaxpr_p] = _announce_batch
_announced = _announcing("mlir")
mlir.register_lowering(announce_jaxpr_p, lambda _, *values, **params: _announced(*values, **params))


# --- Arrays that dead code elimination removes ---


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
    # A `tree_map` over both trees would fail if the metadata of a node is never equal to itself.
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


# --- NaN in the backward pass ---


def backward_nan(x: PyTree, name: Any = None, terminate: bool = True) -> PyTree:
    """Returns `x`; in the backward pass, prints the cotangents of `x` and raises if they have NaN.

    The values of `x` (the primals) are printed too. Under `jax.vmap`, primals and cotangents are
    printed once for each member of the batch. Forward passes print nothing.

    **Arguments:**

    - `x`: any pytree. The printed cotangent of a leaf that is not differentiated is `None`.
    - `name`: if not `None`, it is printed above the values.
    - `terminate`: whether to raise an error, by `eqxlike.error_if`, if a cotangent has NaN.

    **Returns:** `x`.

    **Raises:** in the backward pass, the error of `eqxlike.error_if` if a cotangent has NaN. The
    message has the path, in `x`, of the first leaf with such a cotangent.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp
        >>> def norm(x):
        ...     square = eqx.debug.backward_nan(jnp.sum(x**2), name="square", terminate=False)
        ...     return jnp.where(square > 0, jnp.sqrt(square), 0.0)
        >>> gradient = jax.grad(norm)(jnp.zeros(2))
        square:
           primals=Array(0., dtype=float32)
        cotangents=Array(nan, dtype=float32)
               NaN in cotangents
    """
    arrays, rest = split(x)
    code, line = sys._getframe(1).f_code, sys._getframe(1).f_lineno
    called_at = f"{code.co_filename}:{line} in {code.co_qualname}"

    @jax.custom_jvp
    def identity(arrays: list[Array]) -> list[Array]:
        return arrays

    def push_forward(primals: Any, tangents: Any) -> tuple[list[Array], list[Any]]:
        ((arrays,), (tangents,)) = primals, tangents
        # Primals and tangents may be Python numbers.
        tangents = [
            each if isinstance(each, SymbolicZero) else jnp.asarray(each) for each in tangents
        ]
        moving, zeros = split(tangents, has_tangent)
        shown = [without_key_dtype(jnp.asarray(array)) for array in arrays]
        differentiated = list(map(has_tangent, tangents))
        check = _CotangentCheck(name, called_at, terminate, rest, differentiated).check
        watched = _check_p.bind(*shown, *moving, num_primals=len(shown), check=check)
        return identity(arrays), zeros.merge(watched)

    identity.defjvp(push_forward, symbolic_zeros=True)
    return rest.merge(identity(arrays))


# --- The identity whose transpose checks the cotangents ---


Cotangents = list[Array | None]
Check = Callable[[list[Array], Cotangents], Cotangents]

# The operands are primals, followed by tangents. The primitive returns the tangents unchanged. Its
# transpose returns `check(primals, cotangents)`. Unlike a function with `jax.custom_vjp`, the
# primitive also supports forward mode.
_check_p = Primitive("backward_nan")
_check_p.multiple_results = True


@_check_p.def_impl
@_check_p.def_abstract_eval
def _tangents(*operands: Any, num_primals: int, check: Check) -> list[Any]:
    return list(operands[num_primals:])


def _check_jvp(operands: Any, tangents: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    num_primals = params["num_primals"]
    second = map(ad.instantiate_zeros, tangents[num_primals:])
    again = _check_p.bind(*operands[:num_primals], *second, **params)
    return _check_p.bind(*operands, **params), again


def _check_transpose(
    cotangents: Any, *operands: Any, num_primals: int, check: Check
) -> list[Array | None]:
    # A symbolic zero need not be checked.
    nonzero = [None if type(each) is ad.Zero else each for each in cotangents]
    return [None] * num_primals + check([*operands[:num_primals]], nonzero)


def _check_batch(
    operands: Any, axes: Any, *, num_primals: int, check: Check
) -> tuple[list[Array], list[int]]:
    pairs = zip(operands, axes, strict=True)
    size = next(operand.shape[axis] for operand, axis in pairs if axis is not None)
    # Batch all operands, because it is not known yet which cotangents will be batched.
    batched = [
        jnp.broadcast_to(operand, (size, *operand.shape))
        if axis is None
        else jnp.moveaxis(operand, axis, 0)
        for operand, axis in zip(operands, axes, strict=True)
    ]
    tangents = _check_p.bind(*batched, num_primals=num_primals, check=jax.vmap(check))
    return tangents, [0] * len(tangents)


ad.primitive_jvps[_check_p] = _check_jvp
ad.primitive_transposes[_check_p] = _check_transpose
batching.primitive_batchers[_check_p] = _check_batch
mlir.register_lowering(_check_p, mlir.lower_fun(_tangents, multiple_results=True))


@dataclasses.dataclass(frozen=True, eq=False)
class _CotangentCheck:
    """The check of the cotangents of one call of `backward_nan`.

    - `called_at`: the line of the call in the user's program.
    - `rest`: the tree without its arrays.
    - `differentiated`: for each array of the tree, whether it has a cotangent.
    """

    name: Any
    called_at: str
    terminate: bool
    rest: Rest
    differentiated: list[bool]

    def check(self, primals: list[Array], cotangents: Cotangents) -> Cotangents:
        # Callbacks cannot be differentiated, so they get stopped gradients. The returned
        # `cotangents` stay differentiable.
        shown = jax.lax.stop_gradient((primals, cotangents))
        if not self.terminate:
            jax.debug.callback(self._print, *shown)
            return cotangents
        # The error depends on the output of the callback. So the callback prints before the error
        # is raised.
        place = jax.ShapeDtypeStruct((), jnp.int32)
        first = jax.pure_callback(self._print_and_find, place, *shown, vmap_method="sequential")
        return branched_error_if(cotangents, first >= 0, jnp.maximum(first, 0), self._messages())

    def _print_and_find(self, primals: list[Any], cotangents: list[Any]) -> np.ndarray:
        """Prints the values. Returns the index of the first cotangent with NaN, or -1."""
        self._print(primals, cotangents)
        has_nan = [_has_nan(cotangent) for cotangent in cotangents]
        return np.array(has_nan.index(True) if any(has_nan) else -1, np.int32)

    def _print(self, primals: list[Any], cotangents: list[Any]) -> None:
        rest_of_cotangents = iter(cotangents)
        of_all = [next(rest_of_cotangents) if each else None for each in self.differentiated]
        lines = [
            f"   primals={_show(self.rest.merge(primals))}",
            f"cotangents={_show(self.rest.merge_into(None, of_all))}",
            *(
                f"       NaN in cotangents{path}{_locate_nan(cotangent)}"
                for path, cotangent in zip(self._paths(), cotangents, strict=True)
                if _has_nan(cotangent)
            ),
        ]
        if self.name is not None:
            lines.insert(0, f"{self.name}:")
        print("\n".join(lines))

    def _messages(self) -> list[str]:
        """The error message for each cotangent."""
        name = "x" if self.name is None else self.name
        return [
            f"`backward_nan` found NaN in the cotangent of {name}{path}, which is printed above. "
            f"It was called at {self.called_at}. The NaN comes from the derivative of an operation "
            f"after this call: move `backward_nan` to values that are computed from {name} to "
            "find it."
            for path in self._paths()
        ]

    def _paths(self) -> list[str]:
        """The paths of the arrays that have a cotangent."""
        paths = jtu.tree_leaves_with_path(self.rest.merge_into(None, self.differentiated))
        return [jtu.keystr(path) for path, has_cotangent in paths if has_cotangent]


def _has_nan(array: Any) -> bool:
    return array is not None and bool(np.isnan(np.asarray(array)).any())


def _locate_nan(array: Any) -> str:
    is_nan = np.isnan(np.asarray(array))
    if is_nan.ndim == 0:
        return ""
    first = [int(index) for index in np.argwhere(is_nan)[0]]
    return f": {is_nan.sum()} of {is_nan.size} elements, the first at {first}"


def _show(tree: PyTree) -> str:
    return tree_pformat(tree, short_arrays=False)
