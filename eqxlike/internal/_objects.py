"""Small utilities that libraries built on Equinox import."""

import collections
import dataclasses
import os
import random
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import wadler_lindig as wl
from jax.interpreters import ad
from jaxtyping import Array, ArrayLike, Inexact, PyTree

from .. import Module, field, filter_eval_shape, is_array_like, tree_pformat
from .._pytree import flag_leaves
from .._transforms._jit._arguments import attached
from ..extend import Rest, Structure, flatten, split
from ..loops import Buffer

# --- Static values ---


Value = TypeVar("Value")


class Static(Module, Generic[Value]):
    """A Module with one static field, to pass a value through a filtered transformation.

    **Arguments:**

    - `value`: any value without arrays. It is compared by equality, like all static fields.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> squared, name = eqx.filter_jit(lambda x: (x**2, Static("square")))(jnp.ones(()))
        >>> name.value
        'square'
    """

    value: Value = field(static=True)


# --- Enumerations ---


class ContainerMeta(type):
    """A metaclass that replaces the values of class attributes by numbers.

    Indexing the class with a number returns the value.

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


# --- Partition with a hashable part ---


def hashable_partition(
    pytree: PyTree, filter_fn: Callable[[Any], bool]
) -> tuple[tuple[Any, ...], Hashable]:
    """Splits a tree into the leaves for which `filter_fn` is true, and the rest.

    **Returns:** `(dynamic_leaves, static)`. `dynamic_leaves` is a tuple of the leaves for which
    `filter_fn` is true, with `None` for the other leaves. `static` has all other leaves and the
    tree structure. `static` is hashable if all its leaves are hashable.

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
    """The inverse of `hashable_partition`."""
    leaves, treedef = static
    return treedef.unflatten(
        other if leaf is None else leaf for leaf, other in zip(dynamic_leaves, leaves, strict=True)
    )


# --- Random keys for tests ---


# `eq=True` would remove the hash, but libraries pass instances to cached functions.
@dataclasses.dataclass(init=False, eq=False)
class GetKey:
    """Returns a new random key at each call, for tests.

    If the environment variable `EQX_GETKEY_SEED` is set, its value is the seed. Otherwise the seed
    is random. The `repr` of this object shows the seed, so that pytest prints it if a test fails.

    **Arguments:**

    - `seed`: an integer to use as the seed.

    >>> GetKey(3).seed
    3
    """

    seed: int
    call: int
    key: Array

    def __init__(self, seed: int | None = None):
        if seed is None:
            # The global state of `random` is not used, since a test may have seeded it.
            drawn = random.SystemRandom().randrange(2**31)
            seed = int(os.environ.get("EQX_GETKEY_SEED", drawn))
        self.seed = seed
        self.call = 0
        self.key = jax.random.PRNGKey(seed)

    def __call__(self) -> Array:
        self.call += 1
        return jax.random.fold_in(self.key, self.call)


# --- Named sentinels ---


def str2jax(msg: str) -> Any:
    """Creates a sentinel for pytrees: an object without leaves whose `repr` is `msg`.

    Each call creates a new class, so no two sentinels are equal.

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


# Equinox has these two functions for its documentation generator. Here they have no effect.


def doc_repr(obj: Value, string: str) -> Value:
    """Returns `obj`. In Equinox, the documentation shows `string` instead of `obj`."""
    return obj


def doc_remove_args(*args: str) -> Callable[[Value], Value]:
    """Makes a decorator without effect. In Equinox, it hides the parameters `args` in the docs."""
    return lambda fn: fn


# --- Broadcasting from the leading axis ---


def left_broadcast_to(arr: ArrayLike, shape: tuple[int, ...]) -> Array:
    """Appends axes of length one to `arr`, and broadcasts it to `shape`.

    **Raises:** `ValueError` if `shape` has fewer axes than `arr`, or if the leading axes of `shape`
    do not fit the shape of `arr`.

    >>> print(left_broadcast_to(jnp.arange(2), (2, 3)))
    [[0 0 0]
     [1 1 1]]
    """
    arr = jnp.asarray(arr)
    return jnp.broadcast_to(arr.reshape(arr.shape + (1,) * (len(shape) - arr.ndim)), shape)


# --- Arrays with the shapes of a function's output ---


def eval_zero(fn: Callable[..., Any], *inputs: PyTree) -> PyTree:
    """Makes zeros with the shapes and dtypes of the output of `fn(*inputs)`.

    `fn` is traced, but not run.

    Leaves of the output that are not arrays are returned unchanged.

    >>> eval_zero(lambda x: (x > 0, 2 * x), jnp.ones(2))
    (Array([False, False], dtype=bool), Array([0., 0.], dtype=float32))
    """

    def zeros(leaf: Any) -> Any:
        return jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

    return jtu.tree_map(zeros, filter_eval_shape(fn, *inputs))


def eval_empty(fn: Callable[..., Any], *inputs: PyTree) -> PyTree:
    """Does the same as `eval_zero`: in JAX, `jnp.empty` makes zeros too."""
    return eval_zero(fn, *inputs)


# --- Zero tangents ---


def materialise_zeros(primal: Any, tangent: Any, allow_struct: bool = False) -> Any:
    """Returns the tangent, or an array of zeros if the tangent is `None`.

    **Arguments:**

    - `primal`: an array or a number. If it is any other value, the result is `None`.
    - `tangent`: an array, or `None` for zero.
    - `allow_struct`: if `True`, `primal` may also be a `jax.ShapeDtypeStruct`.

    **Returns:** an array with the shape of the primal and the dtype of its tangents. The tangents
    of integers have JAX's dtype `float0`.

    >>> import jax.numpy as jnp
    >>> materialise_zeros(jnp.ones(2), None)
    Array([0., 0.], dtype=float32)
    """
    if tangent is not None:
        return tangent
    if is_array_like(primal) or (allow_struct and isinstance(primal, jax.ShapeDtypeStruct)):
        return ad.instantiate_zeros(ad.Zero(jax.typeof(primal).to_tangent_aval()))
    return None


# --- The type of a loop buffer or array ---


class MaybeBuffer:
    """`MaybeBuffer[T]` is the union of `T` and `Buffer`, which replaces an array in a loop.

    >>> isinstance(3, MaybeBuffer[int])
    True
    """

    def __class_getitem__(cls, item: Any) -> Any:
        return item | Buffer


# --- Adjacent floating-point numbers ---


@jax.custom_jvp
def nextafter(x: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
    """The next floating-point number after `x`. The derivative is 1, as for the identity.

    If `x` is zero, or a subnormal number that XLA treats as zero, the result is the smallest normal
    number.

    >>> print(nextafter(jnp.array(1.0)) - 1)
    1.1920929e-07
    """
    return _adjacent(x, 1)


@jax.custom_jvp
def prevbefore(x: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
    """The floating-point number before `x`. The derivative is 1, as for the identity.

    If `x` is zero, or a subnormal number that XLA treats as zero, the result is minus the smallest
    normal number.

    >>> print(prevbefore(jnp.array(1.0)) - 1)
    -5.9604645e-08
    """
    return _adjacent(x, -1)


def _adjacent(x: Array, sign: int) -> Array:
    """The adjacent number. Solvers call this often, so it uses `jax.lax`, which traces faster."""
    dtype = jnp.result_type(x)
    x = jnp.asarray(x, dtype)
    tiny = jax.lax.full_like(x, sign * jnp.finfo(dtype).tiny)
    adjacent = jax.lax.nextafter(x, dtype.type(sign * float("inf")))
    return jax.lax.select(jax.lax.eq(x, dtype.type(0)), tiny, adjacent)


nextafter.defjvp(lambda primals, tangents: (nextafter(*primals), *tangents))
prevbefore.defjvp(lambda primals, tangents: (prevbefore(*primals), *tangents))


# --- Arrays in pretty-printed trees ---


@dataclasses.dataclass(frozen=True, slots=True)
class TreeWLCustom:
    """Formats arrays as `tree_pformat` does. Pass it as the argument `custom` of `wadler_lindig`.

    - `truncate_leaf`: a function that takes a node. If it returns `True`, only the type of the node
      is shown, such as `MLP(...)`.
    - `short_arrays`: whether to show arrays as `f32[3,4]` instead of their values.
    - `struct_as_array`: whether `short_arrays` also applies to `jax.ShapeDtypeStruct`.

    >>> import jax.numpy as jnp
    >>> wl.pformat([jnp.ones(2)], custom=TreeWLCustom(lambda node: False, True, False))
    '[f32[2]]'
    """

    truncate_leaf: Callable[[Any], bool]
    short_arrays: bool
    struct_as_array: bool

    def __call__(self, obj: Any) -> wl.AbstractDoc | None:
        """The document of a node, or `None` to use wadler_lindig's default."""
        if self.truncate_leaf(obj):
            return wl.TextDoc(f"{type(obj).__name__}(...)")
        is_struct = isinstance(obj, jax.ShapeDtypeStruct) and self.struct_as_array
        if self.short_arrays and (is_struct or isinstance(obj, jax.Array)):
            return wl.TextDoc(tree_pformat(obj, struct_as_array=True))
        return None


# --- Cached output shapes ---


_MAX_CACHED = 256
"""Maximum number of cache entries. An entry is a function with its static arguments. The oldest
entry is dropped first.
"""


class _Output(Module):
    """The output of a function. Its static part is in the tree structure."""

    arrays: list[Any]
    rest: Rest = field(static=True)


class _Traced:
    """A call, converted to a function of its arrays. JAX caches the traces of this function.

    - `structure`: the static part of the call.
    """

    def __init__(self, structure: Structure):
        self.structure = structure
        rebuild = structure.rebuilder(cache=False)

        def of_arrays(arrays: list[Any]) -> _Output:
            fn, args, kwargs = rebuild(tuple(arrays))
            return _Output(*split(fn(*args, **kwargs)))

        self.of_arrays: Any = jax.jit(of_arrays)


_Table = collections.OrderedDict[Structure, _Traced]
_cache: _Table = collections.OrderedDict()


def cached_filter_eval_shape(fn: Callable[..., Any], *args: PyTree, **kwargs: PyTree) -> PyTree:
    """Does the same as `filter_eval_shape`, but traces `fn` once for arguments of the same shapes.

    As in `filter_jit`, everything that is not an array is part of the cache key. If an argument
    cannot be part of a key because it is not hashable, `fn` is traced at each call.

    >>> import jax.numpy as jnp
    >>> cached_filter_eval_shape(jnp.sum, jnp.ones(2))
    ShapeDtypeStruct(shape=(), dtype=float32)
    """
    call = fn, args, kwargs
    try:
        arrays, structure = flatten(call, with_abstract=True)
    except TypeError:
        return filter_eval_shape(fn, *args, **kwargs)
    table = _cache
    if structure.anchor is not None:
        # A function that was defined inside another function may be short-lived, and the global
        # cache must not keep it alive. So its entries are attached to the function.
        table = attached(structure.anchor, "__eqxlike_shapes__", collections.OrderedDict)
    traced = table.get(structure)
    if traced is None or not traced.structure.is_current():
        # Some static objects are compared by identity. A private Structure holds the objects of
        # this call, and not equal objects of an earlier call.
        traced = _Traced(flatten(call, with_abstract=True, is_private=True)[1])
        table[structure] = traced
        if len(table) > _MAX_CACHED:
            table.popitem(last=False)
    output = traced.of_arrays.eval_shape(arrays)
    return output.rest.merge(output.arrays)


# --- Functions as Modules whose children are the closed-over values ---


class _Code:
    """A function without its closure, compared by its code, defaults and globals."""

    def __init__(self, function: types.FunctionType):
        self._function = function

    def _parts(self) -> tuple[Any, ...]:
        function = self._function
        keywords = function.__kwdefaults__ or {}
        identities = [*(function.__defaults__ or ()), *keywords.values(), function.__globals__]
        return (
            function.__code__,
            function.__qualname__,
            len(function.__defaults__ or ()),
            tuple(keywords),
            tuple(map(id, identities)),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Code) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash(self._function.__code__)

    def __repr__(self) -> str:
        return repr(self._function)

    def with_closure(self, contents: tuple[Any, ...]) -> types.FunctionType:
        """Returns the function with `contents` as its closure."""
        function = self._function
        cells = tuple(map(types.CellType, contents))
        rebuilt = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )
        rebuilt.__kwdefaults__ = function.__kwdefaults__
        return rebuilt


class _Closure(Module):
    """A function whose children are the values it closes over."""

    fn: _Code
    contents: tuple[Any, ...] | None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.fn.with_closure(self.contents or ())(*args, **kwargs)


def closure_to_pytree(tree: PyTree) -> PyTree:
    """Replaces each function in a tree by a Module whose children are the values it closes over.

    JAX then sees the arrays in closures. If a function that returns a function is called twice, the
    two results have equal tree structures. Optax makes its optimisers by calling such functions.
    Global variables do not become children.

    **Arguments:**

    - `tree`: any pytree, or a function.

    **Raises:** `ValueError` if a function closes over itself, or over a variable that has no value.

    !!! example

        >>> import jax
        >>> def scaling_by(factor):
        ...     return lambda x: factor * x
        >>> scale = closure_to_pytree(scaling_by(2.0))
        >>> jax.tree.map(lambda leaf: 3 * leaf if leaf == 2.0 else leaf, scale)(1.0)
        6.0
    """
    return _convert(tree, ())


def _convert(tree: PyTree, around: tuple[Any, ...]) -> PyTree:
    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, types.FunctionType):
            return leaf
        if leaf in around:
            raise ValueError(
                f"closure_to_pytree cannot convert {leaf.__qualname__}, which closes over itself. "
                "Pass the function to itself as an argument."
            )
        if leaf.__closure__ is None:
            return _Closure(_Code(leaf), None)
        contents = tuple(
            _convert(_contents(leaf, number), (*around, leaf))
            for number in range(len(leaf.__closure__))
        )
        return _Closure(_Code(leaf), contents)

    return jtu.tree_map(convert, tree)


def _contents(function: types.FunctionType, number: int) -> Any:
    try:
        return (function.__closure__ or ())[number].cell_contents
    except ValueError:
        name = function.__code__.co_freevars[number]
        raise ValueError(
            f"closure_to_pytree cannot convert {function.__qualname__}, which closes over "
            f"`{name}`: this variable has no value yet."
        ) from None
