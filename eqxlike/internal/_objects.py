"""Small objects, and functions of arrays, that libraries built on Equinox share."""

import collections
import dataclasses
import os
import random
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import wadler_lindig as wl
from jax.core import ShapedArray
from jax.interpreters import ad
from jaxtyping import Array, ArrayLike, Inexact, PyTree

from .._module import Module, field
from .._partition import Rest, Structure, flatten, split
from .._pytree import flag_leaves, is_array_like, tree_pformat
from .._transforms import filter_eval_shape
from .._transforms._jit._callables import attached
from ..loops import Buffer

# --- A value that transformations take as it is ---


Value = TypeVar("Value")


class Static(Module, Generic[Value]):
    """A Module with nothing but a static field, to hand a value through a filtered transformation.

    **Arguments:**

    - `value`: as for any static field: no array, and compared by value.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> squared, name = eqx.filter_jit(lambda x: (x**2, Static("square")))(jnp.ones(()))
        >>> name.value
        'square'
    """

    value: Value = field(static=True)


# --- Classes that number the values of their attributes ---


class ContainerMeta(type):
    """A metaclass of classes whose attributes are numbers, for values that are looked up by them.

    !!! example

        >>> class Words(metaclass=ContainerMeta):
        ...     first = "one"
        ...     second = "two"
        >>> Words.second, Words[Words.second], len(Words)
        (1, 'two', 2)
    """

    reverse_lookup: list[Any]

    def __new__(cls, name: str, bases: tuple[type, ...], dict: dict[str, Any]) -> "ContainerMeta":
        numbered, lookup = {}, []
        for key, value in dict.items():
            if not (key.startswith("__") and key.endswith("__")):
                lookup.append(value)
                value = len(lookup) - 1
            numbered[key] = value
        assert "reverse_lookup" not in numbered
        return super().__new__(cls, name, bases, numbered | {"reverse_lookup": lookup})

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, int) or super().__instancecheck__(instance)

    def __getitem__(cls, item: int) -> Any:
        return cls.reverse_lookup[item]

    def __len__(cls) -> int:
        return len(cls.reverse_lookup)


# --- A tree in two parts, of which one can be a key ---


def hashable_partition(
    pytree: PyTree, filter_fn: Callable[[Any], bool]
) -> tuple[tuple[Any, ...], Hashable]:
    """The leaves of a tree for which `filter_fn` holds, and the rest.

    **Returns:** `(dynamic_leaves, static)`: the leaves, with `None` in the places of the others;
    and a hashable object with the others and the structure of the tree.

    >>> dynamic_leaves, static = hashable_partition({"a": 1, "b": "x"}, lambda leaf: leaf == 1)
    >>> dynamic_leaves, hashable_combine(dynamic_leaves, static)
    ((1, None), {'a': 1, 'b': 'x'})
    """
    leaves, treedef = jtu.tree_flatten(pytree)
    flags = flag_leaves(pytree, leaves, filter_fn)
    dynamic = tuple(leaf if taken else None for leaf, taken in zip(leaves, flags, strict=True))
    static = tuple(None if taken else leaf for leaf, taken in zip(leaves, flags, strict=True))
    return dynamic, (static, treedef)


def hashable_combine(dynamic_leaves: Sequence[Any], static: Any) -> PyTree:
    """The tree that `hashable_partition` took apart."""
    leaves, treedef = static
    return treedef.unflatten(
        other if leaf is None else leaf for leaf, other in zip(dynamic_leaves, leaves, strict=True)
    )


# --- Random keys for tests ---


# Without `eq`, which would take its hash away: libraries make one a parameter of a cached function.
@dataclasses.dataclass(init=False, eq=False)
class GetKey:
    """A new random key at each call, for tests. The seed is random too.

    The environment variable `EQX_GETKEY_SEED` sets where it starts. A failing test shows the seed
    in the text of this object.

    **Arguments:**

    - `seed`: an integer to start from in place of a random one.

    >>> GetKey(3).seed
    3
    """

    seed: int
    call: int
    key: Array

    def __init__(self, seed: int | None = None):
        if seed is None:
            # Not the state of `random`, which a test may have set.
            drawn = random.SystemRandom().randrange(2**31)
            seed = int(os.environ.get("EQX_GETKEY_SEED", drawn))
        self.seed = seed
        self.call = 0
        self.key = jax.random.PRNGKey(seed)

    def __call__(self) -> Array:
        self.call += 1
        return jax.random.fold_in(self.key, self.call)


# --- Words that stand in a tree of arrays ---


def str2jax(msg: str) -> Any:
    """An object without leaves whose text is `msg`: a sentinel that may stand in any pytree.

    Each call makes a new class, so no two sentinels are equal.

    !!! example

        >>> import jax
        >>> unused = str2jax("unused")
        >>> jax.jit(lambda x: (x, unused))(1.0)[1]
        unused
    """

    def show(self: Any) -> str:
        return msg

    metaclass: Any = type(Module)
    namespace = {"__repr__": show, "__str__": show, "__module__": __name__}
    return metaclass(msg, (Module,), namespace)()


# Hints for generators of documentation. Nothing here generates any, so nothing is done.


def doc_repr(obj: Value, string: str) -> Value:
    """`obj` as it is. In documentation `string` would stand for it."""
    return obj


def doc_remove_args(*args: str) -> Callable[[Value], Value]:
    """A decorator that changes nothing. Documentation would leave out the parameters `args`."""
    return lambda fn: fn


# --- Broadcasting that begins with the leading axis ---


def left_broadcast_to(arr: ArrayLike, shape: tuple[int, ...]) -> Array:
    """`arr` with axes of length one behind its own, broadcast to `shape`.

    **Raises:** `ValueError` if `shape` has fewer axes, or its leading ones are others.

    >>> print(left_broadcast_to(jnp.arange(2), (2, 3)))
    [[0 0 0]
     [1 1 1]]
    """
    arr = jnp.asarray(arr)
    if arr.ndim > len(shape):
        raise ValueError(
            f"left_broadcast_to expected at least the {arr.ndim} axes of an array of shape "
            f"{arr.shape}; got shape {shape}."
        )
    return jnp.broadcast_to(arr.reshape(arr.shape + (1,) * (len(shape) - arr.ndim)), shape)


# --- Arrays of the shapes that a function would return ---


def eval_zero(fn: Callable[..., Any], *inputs: PyTree) -> PyTree:
    """Zeros of the shapes and dtypes of what `fn(*inputs)` returns. Nothing is computed.

    Leaves that are not arrays are as `fn` returned them.

    >>> eval_zero(lambda x: (x > 0, 2 * x), jnp.ones(2))
    (Array([False, False], dtype=bool), Array([0., 0.], dtype=float32))
    """
    return _filled(jnp.zeros, fn, inputs)


def eval_empty(fn: Callable[..., Any], *inputs: PyTree) -> PyTree:
    """As `eval_zero`, with arrays whose values do not matter."""
    return _filled(jnp.empty, fn, inputs)


def _filled(make: Callable[..., Any], fn: Callable[..., Any], inputs: tuple[PyTree, ...]) -> PyTree:
    def fill(leaf: Any) -> Any:
        return make(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

    return jtu.tree_map(fill, filter_eval_shape(fn, *inputs))


# --- Tangents that are zero, as arrays ---


def materialise_zeros(primal: Any, tangent: Any, allow_struct: bool = False) -> Any:
    """The tangent, or if it is `None` one of zeros beside `primal`.

    **Arguments:**

    - `primal`: an array or a number; for anything else the tangent stays `None`.
    - `tangent`: an array, or `None` for zero.
    - `allow_struct`: whether a `jax.ShapeDtypeStruct` may stand for an array as `primal`.

    **Returns:** an array of the shape of the primal and of the dtype of its tangents, which for
    integers is JAX's `float0`.

    >>> import jax.numpy as jnp
    >>> materialise_zeros(jnp.ones(2), None)
    Array([0., 0.], dtype=float32)
    """
    if tangent is not None:
        return tangent
    if is_array_like(primal):
        aval = jax.typeof(primal)
    elif allow_struct and isinstance(primal, jax.ShapeDtypeStruct):
        aval = ShapedArray(primal.shape, primal.dtype)
    else:
        return None
    return ad.instantiate_zeros(ad.Zero(aval.to_tangent_aval()))


# --- The type of a buffer inside a loop, which is an array elsewhere ---


class MaybeBuffer:
    """`MaybeBuffer[T]` is the type of a `T` or of the buffer that a loop makes of it.

    >>> isinstance(3, MaybeBuffer[int])
    True
    """

    def __class_getitem__(cls, item: Any) -> Any:
        return item | Buffer


# --- The floating-point numbers next to a given one ---


@jax.custom_jvp
def nextafter(x: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
    """The floating-point number after `x`. Its derivative is that of the identity.

    After zero, and after what XLA takes for zero, comes the smallest normal number.

    >>> print(nextafter(jnp.array(1.0)) - 1)
    1.1920929e-07
    """
    return _beside(x, 1)


@jax.custom_jvp
def prevbefore(x: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
    """The floating-point number before `x`. Its derivative is that of the identity.

    Before zero, and before what XLA takes for zero, comes the smallest normal number with a minus.

    >>> print(prevbefore(jnp.array(1.0)) - 1)
    -5.9604645e-08
    """
    return _beside(x, -1)


def _beside(x: Array, sign: int) -> Array:
    """The number beside `x`. In `jax.lax`, which is traced faster: solvers ask for it often."""
    dtype = jnp.result_type(x)
    x = jnp.asarray(x, dtype)
    tiny = jax.lax.full_like(x, sign * jnp.finfo(dtype).tiny)
    beside = jax.lax.nextafter(x, dtype.type(sign * float("inf")))
    return jax.lax.select(jax.lax.eq(x, dtype.type(0)), tiny, beside)


nextafter.defjvp(lambda primals, tangents: (nextafter(*primals), *tangents))
prevbefore.defjvp(lambda primals, tangents: (prevbefore(*primals), *tangents))


# --- Arrays in pretty-printed trees ---


@dataclasses.dataclass(frozen=True, slots=True)
class TreeWLCustom:
    """For `custom` of `wadler_lindig`: how `tree_pformat` shows arrays.

    - `truncate_leaf`: where it says `True` of a node, its type alone is shown, as in `MLP(...)`.
    - `short_arrays`: arrays as `f32[3,4]` instead of their values.
    - `struct_as_array`: a `jax.ShapeDtypeStruct` as `short_arrays` shows an array, if it does.

    >>> import jax.numpy as jnp
    >>> wl.pformat([jnp.ones(2)], custom=TreeWLCustom(lambda node: False, True, False))
    '[f32[2]]'
    """

    truncate_leaf: Callable[[Any], bool]
    short_arrays: bool
    struct_as_array: bool

    def __call__(self, obj: Any) -> wl.AbstractDoc | None:
        """The document of a node, or `None` where `wadler_lindig` knows one."""
        if self.truncate_leaf(obj):
            return wl.TextDoc(f"{type(obj).__name__}(...)")
        is_struct = isinstance(obj, jax.ShapeDtypeStruct) and self.struct_as_array
        if self.short_arrays and (is_struct or isinstance(obj, jax.Array)):
            return wl.TextDoc(tree_pformat(obj, struct_as_array=True))
        return None


# --- Shapes of what a function returns, kept from one call to the next ---


_MAX_CACHED = 256
"""At most this many functions and their static arguments are kept; the oldest go first."""


class _Output(Module):
    """What a function returns: JAX keeps the rest beside the shapes."""

    arrays: list[Any]
    rest: Rest = field(static=True)


class _Traced:
    """A function of the arrays of one call. JAX caches its traces.

    - `structure`: everything else in the call.
    """

    def __init__(self, structure: Structure):
        self.structure = structure
        rebuild = structure.rebuilder(cache=False)

        def of_arrays(arrays: list[Any]) -> _Output:
            fn, args, kwargs = rebuild(tuple(arrays))
            return _Output(*split(fn(*args, **kwargs)))

        self.of_arrays: Any = jax.jit(of_arrays)


_Table = collections.OrderedDict[Structure, _Traced]
_lasting: _Table = collections.OrderedDict()


def cached_filter_eval_shape(fn: Callable[..., Any], *args: PyTree, **kwargs: PyTree) -> PyTree:
    """`filter_eval_shape`, which traces `fn` once for arguments of the same shapes.

    As in `filter_jit`, everything but arrays is part of the key. If that is not hashable, `fn` is
    traced each time.

    >>> import jax.numpy as jnp
    >>> cached_filter_eval_shape(jnp.sum, jnp.ones(2))
    ShapeDtypeStruct(shape=(), dtype=float32)
    """
    call = fn, args, kwargs
    try:
        arrays, structure = flatten(call, with_abstract=True)
    except TypeError:
        return filter_eval_shape(fn, *args, **kwargs)
    table = _lasting
    if structure.anchor is not None:
        # A cached entry must not keep a function alive that was defined in another.
        table = attached(structure.anchor, "__eqxlike_shapes__", collections.OrderedDict)
    traced = table.get(structure)
    if traced is None or not traced.structure.is_current():
        # The Structure holds these very objects, since parts may be compared by identity.
        traced = _Traced(flatten(call, with_abstract=True, is_private=True)[1])
        table[structure] = traced
        if len(table) > _MAX_CACHED:
            table.popitem(last=False)
    output = traced.of_arrays.eval_shape(arrays)
    return output.rest.merge(output.arrays)
