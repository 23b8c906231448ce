"""Flattening a tree into its arrays and its Structure, and caching the result on Modules.

The file begins with `flatten`, which walks over the tree. The functions that flatten one type of
node by one level follow, then the code for `Row`s of many leaves, and the checking mode, which
compares every cached partition with a new partition. Then comes `split`, for transformations that
cache nothing between calls. The last part compares the static values of two trees.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._compat import Tracer
from .._module import (
    CachedPartition,
    Initialising,
    Module,
    ModuleMeta,
    get_cached,
    name_again,
    names_in,
    set_cached,
)
from .._pytree import Difference, children_with_keys, flag_leaves, is_array, is_traced_reference
from ._static_key import (
    ATOMS,
    PLAIN_TYPES,
    Container,
    Snapshot,
    StaticKey,
    is_hashable,
    plain_key,
    snapshot_of,
)
from ._structure import (
    ARRAY,
    NOTHING,
    DictKeys,
    DictNode,
    ForeignMeta,
    ForeignNode,
    ListNode,
    ModuleNode,
    NamedTupleNode,
    Row,
    RowLeaves,
    Structure,
    TupleNode,
    identity_leaf,
    intern,
    make_private,
    opaque_leaf,
    static_leaf,
)
from ._writers import as_tuple, concrete_array_types, flatten_one_level

_MAX_DEPTH = 20_000
"""Maximum depth of a tree. A deeper tree, or a cycle, raises `RecursionError`. The walk itself is
not recursive.
"""


def flatten(
    tree: Any,
    *,
    with_abstract: bool = False,
    is_output: bool = False,
    by_identity: bool = False,
    is_private: bool = False,
    root: Callable[[], str] = lambda: "tree",
) -> tuple[list[Any], Structure]:
    """The arrays of `tree`, in tree order, and its Structure.

    A Module can cache its partition if no descendant is a mutable node, such as a list or a dict
    (`Structure.is_cacheable`). A bound method does not cache its partition
    (`Structure.is_cacheable_module`). `flatten` caches the partitions of the outermost Modules that
    can be cached, for the next call. A cached partition is valid as long as the lists and dicts in
    the static fields do not change.

    **Arguments:**

    - `tree`: any pytree.
    - `with_abstract`: if `True`, each `jax.ShapeDtypeStruct` counts as an array, for ahead-of-time
      lowering. Nothing is cached then.
    - `is_output`: if `True`, static leaves need not be hashable or comparable, since the output of
      a function is not part of a cache key.
    - `by_identity`: if `True`, static leaves that cannot be hashed or compared are accepted, and
      compared by identity.
    - `is_private`: if `True`, the Structure holds the static objects of `tree` itself, even if a
      Structure with equal objects exists. So a rebuilt tree has the objects of `tree`. Nothing is
      cached then.
    - `root`: a function that returns the name of the tree in a message.

    **Returns:** `(arrays, structure)`.

    **Raises:**

    - `TypeError`, with the path of the leaf, if a static leaf cannot be hashed or compared.
    - `RecursionError` if the tree is too deep or has a cycle.
    - `PartitionError` if a Module was changed and `checking_partitions` is active.
    """
    arrays: list[Any] = []
    # Modules that may cache their partition, each with the range of its arrays. At the end, only
    # the outermost Modules are left in this list.
    candidates: list[_Candidate] = []
    containers: list[Container] = []
    frames: list[_Frame] = []
    # The outermost node is a tuple whose only child is `tree`.
    frame = _Frame(None, _Opened(TupleNode, _no_meta, None, (tree,), lambda index: root()))
    make_unhashable = opaque_leaf if is_output else identity_leaf if by_identity else None
    # A rebuilt output must have the static objects that the function returned, not equal objects.
    make = make_private if is_private or is_output else intern
    caches = not with_abstract and not is_private
    checks = caches and is_checking()
    while True:
        structures = frame.structures
        for value in frame.children:
            node_type, cached = type(value), None
            if node_type in concrete_array_types:
                arrays.append(value)
                structures.append(ARRAY)
                continue
            if isinstance(node_type, ModuleMeta):
                cached = _unless_changed(get_cached(value)) if caches else None
                if not checks and cached is not None and cached is not Initialising:
                    structure = cached.structure.interned or cached.structure
                    # The interned Structure may hold equal objects, but an output keeps its own
                    # objects.
                    if structure.is_exact or not is_output:
                        arrays += cached.arrays
                        structures.append(structure)
                        if (snapshot := cached.structure.snapshot) is not None:
                            containers += snapshot.containers
                        continue
            is_atom = node_type in ATOMS
            node = None if is_atom else _open(value)
            if node is None:
                is_abstract = with_abstract and isinstance(value, jax.ShapeDtypeStruct)
                if not is_atom and (
                    is_abstract or isinstance(value, np.ndarray) or is_array_of_jax(value)
                ):
                    arrays.append(value)
                    structures.append(ARRAY)
                    continue
                try:
                    structures.append(static_leaf(value, make))
                except Exception as error:
                    if make_unhashable is None:
                        message = _explain(value, value, False, error, [*frames, frame])
                        raise TypeError(message) from error
                    structures.append(make_unhashable(value))
                continue
            if len(frames) >= _MAX_DEPTH:
                raise RecursionError(
                    f"a pytree is nested more than {_MAX_DEPTH} deep, or contains itself"
                )
            frames.append(frame)
            frame = _Frame(value, node, len(arrays), len(candidates), len(containers), cached)
            if len(node.children) >= _MIN_ROW and node.structure_type.takes_sequence:
                row = _make_row(node.children, with_abstract=with_abstract)
                if row is not None:
                    frame.structures.append(row[0])
                    frame.children = iter(())
                    arrays += row[1]
            break
        else:
            if not frames:
                if caches:
                    _cache(candidates, arrays, containers)
                return arrays, structures[0]
            closed = frame
            frame = frames.pop()
            structure_type, make_meta, static, _, _ = closed.node
            try:
                key = NOTHING if static is None else StaticKey(static, of_node=True)
                containers += key.containers
                children = tuple(structures)
                structure = make(structure_type, type(closed.value), make_meta, key, children)
            except Exception as error:
                message = _explain(closed.value, static, True, error, [*frames, frame])
                raise TypeError(message) from error
            frame.structures.append(structure)
            if structure_type is ModuleNode and closed.cached is not Initialising:
                if checks and closed.cached is not None:
                    _check(closed.value, closed.cached, arrays[closed.first_array :], structure)
                if structure.is_cacheable_module:
                    del candidates[closed.num_candidates :]
                    array_range = slice(closed.first_array, len(arrays))
                    container_range = slice(closed.first_container, len(containers))
                    candidates.append((closed.value, array_range, container_range, structure))


class _Opened(NamedTuple):
    """A node flattened by one level, with the data for interning the node.

    The Structures of the children are not part of it.

    - `structure_type`: the subclass of `Structure`.
    - `make_meta`: a function without arguments that returns the `meta` of a new Structure.
    - `static`: the static part of the node itself.
    - `children`: the children, which are flattened next.
    - `name_child`: a function that takes the index of a child and returns its name in a path.
    """

    structure_type: type[Structure]
    make_meta: Callable[[], Any]
    static: Any
    children: Sequence[Any]
    name_child: Callable[[int], str]


@dataclasses.dataclass(slots=True)
class _Frame:
    """A node whose children are being walked.

    - `first_array`, `num_candidates`, `first_container`: the number of arrays, candidates and
      containers that the walk had found when it reached the node. So `arrays[first_array:]` are the
      arrays of the node, once its children have been walked.
    - `cached`: for a Module, the content of its slot when the walk reached it.
    - `structures`: the Structures of the children walked so far.
    - `children`: an iterator over the remaining children.
    """

    value: Any
    node: _Opened
    first_array: int = 0
    num_candidates: int = 0
    first_container: int = 0
    cached: Any = None
    structures: list[Structure] = dataclasses.field(default_factory=list)
    children: Iterator[Any] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.children = iter(self.node.children)


_Candidate = tuple[Module, slice, slice, Structure]
"""A Module, the range of its arrays, the range of its containers, and its Structure."""


class _WithOwnContainers(NamedTuple):
    """Replaces the Structure in a cached partition if the Module has its own static containers.

    These containers are equal to the containers in the interned Structure, but are other objects.
    """

    interned: Structure
    snapshot: Snapshot | None


def _unless_changed(cached: Any) -> Any:
    """Returns the content of a slot, or `None` if a static container in it has changed."""
    if cached is None or cached is Initialising:
        return cached
    if (snapshot := cached.structure.snapshot) is not None:
        interned = (cached.structure.interned or cached.structure).snapshot
        if not (snapshot.is_current() and (interned is snapshot or interned.is_current())):
            return None
    return cached


def _cache(candidates: list[_Candidate], arrays: list[Any], containers: list[Container]) -> None:
    for module, array_range, container_range, structure in candidates:
        dynamic = tuple(arrays[array_range])
        if concrete_array_types.issuperset(map(type, dynamic)):
            inside = containers[container_range]
            snapshot = snapshot_of(inside) if inside else None
            if structure.snapshot is not snapshot:
                structure = _WithOwnContainers(structure.interned or structure, snapshot)
            set_cached(module, CachedPartition(dynamic, structure))


def _explain(value: Any, static: Any, of_node: bool, error: Exception, frames: list[_Frame]) -> str:
    """The error message if the `static` part of `value` has no `StaticKey`."""
    path = "".join(each.node.name_child(len(each.structures)) for each in frames)
    try:
        StaticKey(static, of_node=of_node)
        what = "not comparable"
    except Exception:
        what = "not hashable"
    return (
        f"the static part of {path}, of type {type(value).__name__}, is {what} ({error}). "
        "Everything that is not an array is static, and part of the cache key of a compiled "
        "function. So it must be hashable, and its `==` must return a bool."
    )


# --- Flattening each type of node by one level ---


def _open(value: Any) -> _Opened | None:
    """Flattens `value` by one level; returns `None` if `value` is a leaf, such as `None`."""
    node_type = type(value)
    open_as = _OF_PYTHON.get(node_type)
    if open_as is not None:
        return open_as(value)
    if isinstance(node_type, ModuleMeta):
        return _open_module(value)
    if is_array_of_jax(value):
        return None
    flattened = flatten_one_level(value)
    if flattened is None:
        return None
    children, data = flattened
    # If a namedtuple is not registered with JAX, JAX returns its class as the data.
    if data is node_type and isinstance(value, tuple):
        children, names = as_tuple(value, slice(None)), node_type._fields
        return _Opened(NamedTupleNode, _no_meta, None, children, lambda i: f".{names[i]}")
    return _Opened(ForeignNode, lambda: ForeignMeta(value, data), data, (*children,), "[{}]".format)


def _no_meta() -> None:
    """The `make_meta` of a node that needs no `meta`."""


def _open_sequence(value: tuple[Any, ...] | list[Any]) -> _Opened:
    structure_type = TupleNode if type(value) is tuple else ListNode
    return _Opened(structure_type, _no_meta, None, value, "[{}]".format)


def _open_dict(value: dict[Any, Any]) -> _Opened:
    try:
        children, keys = flatten_one_level(value)  # pyright: ignore
    except Exception as error:
        raise TypeError(
            "the keys of a dict in a pytree must be sortable, but this dict has keys of the types "
            f"{', '.join(sorted({type(key).__name__ for key in value}))}"
        ) from error
    as_inserted = lambda: DictKeys(keys, tuple(value))  # noqa: E731
    return _Opened(DictNode, as_inserted, keys, children, lambda index: f"[{keys[index]!r}]")


_OF_PYTHON = {tuple: _open_sequence, list: _open_sequence, dict: _open_dict}


def _open_module(value: Module) -> _Opened:
    codec = type(value)._eqxlike_class.codec
    children, statics = codec.flatten(value)
    # While `__init__` runs, some fields may be missing. Then `statics` is an `_Incomplete`.
    is_complete = type(statics) is tuple
    names = codec.layout.dynamic_names if is_complete else statics[0]
    static = (is_complete, *statics)
    return _Opened(ModuleNode, lambda: statics, static, children, lambda i: f".{names[i]}")


# --- Which leaves are arrays ---


def is_array_of_jax(value: Any) -> bool:
    """Returns `True` if `value` is a JAX array, a tracer, a traced reference or a NumPy scalar.

    This function also adds the type of a JAX array or NumPy scalar to `concrete_array_types`.
    """
    if isinstance(value, Tracer):
        return isinstance(value, jax.Array) or is_traced_reference(value)
    if not isinstance(value, jax.Array | np.generic):
        return False
    concrete_array_types.add(type(value))
    return True


def are_concrete_arrays(values: Iterable[Any]) -> bool:
    """Returns `True` if all of `values` are arrays and not tracers.

    This function also adds types to `concrete_array_types`, as `is_array_of_jax` does.
    """
    return all(
        type(value) in concrete_array_types
        or (is_array_of_jax(value) and type(value) in concrete_array_types)
        for value in values
    )


# --- Rows: a node with many leaves needs no Structure and no generated code for each leaf ---


_MIN_ROW = 64
"""With fewer leaves than this, a Structure and generated code for each leaf are faster."""


def _make_row(
    children: Sequence[Any], *, with_abstract: bool
) -> tuple[Row, tuple[Any, ...]] | None:
    """The `Row` of these children, and its arrays.

    The result is `None` unless each child is an array or has one of the `PLAIN_TYPES`.
    """
    types = [*map(type, children)]
    known = {*types}
    arrays = known & concrete_array_types
    for leaf_type in known - arrays - PLAIN_TYPES:
        is_abstract = with_abstract and leaf_type is jax.ShapeDtypeStruct
        leaves = (x for x in children if type(x) is leaf_type)
        if not is_abstract and not all(
            is_array_of_jax(x) or isinstance(x, np.ndarray) for x in leaves
        ):
            return None
        arrays.add(leaf_type)
    count = len(types)
    if arrays == known:
        make_meta = lambda: RowLeaves((None,) * count, tuple(range(count)), ())  # noqa: E731
        row = intern(Row, object, make_meta, StaticKey((count,)), ())
        return row, tuple(children)  # pyright: ignore[reportReturnType]
    array_places = tuple(place for place, leaf_type in enumerate(types) if leaf_type in arrays)
    static_places = tuple(place for place, leaf_type in enumerate(types) if leaf_type not in arrays)
    statics = tuple(children[place] for place in static_places)

    def make_meta() -> RowLeaves:
        pairs = zip(children, types, strict=True)
        leaves = tuple(None if leaf_type in arrays else leaf for leaf, leaf_type in pairs)
        return RowLeaves(leaves, array_places, static_places)

    # `statics` have only `PLAIN_TYPES`, so this key is as immutable and exact as the key of `None`.
    static = StaticKey(None)
    static.key = (count, array_places, plain_key(statics))
    row = intern(Row, object, make_meta, static, ())
    return row, tuple(children[place] for place in array_places)  # pyright: ignore


# --- The checking mode ---


_depth = int(os.environ.get("EQXLIKE_CHECK_PARTITIONS", "0") not in ("", "0"))
_listeners: list[Callable[[], None]] = []


class PartitionError(RuntimeError):
    """A Module was changed in place: its cached partition differs from its current fields."""


def is_checking() -> bool:
    return _depth > 0


def when_switched_on(listener: Callable[[], None]) -> None:
    """Registers a function without arguments, which is called each time the mode is switched on."""
    _listeners.append(listener)


@contextlib.contextmanager
def checking_partitions() -> Iterator[None]:
    """Context manager that compares every cached partition with a new partition.

    Inside it, filtered calls do not take their fast path. Each Module is flattened again, and each
    leaf must be the same object as in the cached partition. The environment variable
    `EQXLIKE_CHECK_PARTITIONS=1` switches this mode on for a whole program.

    The mode applies to all threads of the process. It makes filtered calls many times slower; use
    it in tests, or to find code that changes a Module through its `__dict__`.

    **Raises:** `PartitionError` in the filtered call that receives a changed Module.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> double = eqx.filter_jit(lambda x: 2 * x)
        >>> with eqx.checking_partitions():
        ...     print(double(jnp.array(3.0)))
        6.0
    """
    global _depth
    _depth += 1
    for listener in _listeners:
        listener()
    try:
        yield
    finally:
        _depth -= 1


def _check(
    module: Module, cached: CachedPartition, arrays: list[Any], structure: Structure
) -> None:
    """Raises `PartitionError` if the cached partition of `module` is out of date.

    `arrays` and `structure` are the current partition. Arrays are compared by identity.
    """
    is_same = structure is (cached.structure.interned or cached.structure)
    if not is_same or [*map(id, arrays)] != [*map(id, cached.arrays)]:
        raise PartitionError(
            f"a {type(module).__name__} was changed after its partition was cached: {module!r}. "
            "A Module is frozen: do not change it through its `__dict__` or `object.__setattr__`. "
            "`eqxlike.tree_at` makes a changed copy."
        )


# --- Splitting a tree into dynamic and static leaves, without a cache ---


class Rest:
    """A tree whose dynamic leaves were removed. `merge` puts new leaves in their place.

    Two `Rest`s are equal if they may share a trace. This requires the same treedef, the same static
    leaves, and the same positions of the removed leaves.

    - `treedef`: the treedef of the whole tree.
    """

    __slots__ = ("_is_dynamic", "_leaves", "_paths", "treedef")

    def __init__(self, leaves: list[Any], is_dynamic: list[bool], treedef: Any):
        self._leaves = leaves
        self._is_dynamic = is_dynamic
        self._paths: tuple[str | None, ...] | None = None
        self.treedef = treedef

    def __repr__(self) -> str:
        return f"Rest({self.treedef})"

    def __eq__(self, other: object) -> bool:
        if type(other) is not Rest:
            return NotImplemented
        return (
            self._is_dynamic == other._is_dynamic
            and self.treedef == other.treedef
            and all(map(is_same_static, self._leaves, other._leaves))
        )

    def __hash__(self) -> int:
        # The leaves are left out, since some of them may not be hashable.
        return hash((self.treedef, tuple(self._is_dynamic)))

    def leaves(self, dynamic: Iterable[Any]) -> list[Any]:
        """All leaves of the tree: the values of `dynamic`, in order, replace the removed leaves."""
        dynamic = iter(dynamic)
        return [
            next(dynamic) if taken else leaf
            for taken, leaf in zip(self._is_dynamic, self._leaves, strict=True)
        ]

    def leaves_into(self, other: Any, dynamic: Iterable[Any]) -> list[Any]:
        """The same as `leaves`, but every static leaf is replaced by `other`."""
        dynamic = iter(dynamic)
        return [next(dynamic) if taken else other for taken in self._is_dynamic]

    def merge(self, dynamic: Iterable[Any]) -> PyTree:
        """Returns the whole tree: the values of `dynamic`, in order, replace the removed leaves."""
        tree = self.treedef.unflatten(self.leaves(dynamic))
        if self._paths is not None:
            name_again(tree, self._paths)
        return tree

    def merge_into(self, other: Any, dynamic: Iterable[Any]) -> PyTree:
        """The same as `merge`, but every static leaf is replaced by `other`.

        If `other` is `None`, the result has the structure of a gradient.
        """
        return self.treedef.unflatten(self.leaves_into(other, dynamic))

    def take(self, leaves: Iterable[Any]) -> list[Any]:
        """Given a value for each leaf of the tree, selects the values of the removed leaves."""
        return [leaf for taken, leaf in zip(self._is_dynamic, leaves, strict=True) if taken]


UNTRACED: Any = None
"""A placeholder for the `Rest`, or other data, of an output until the function has been traced."""


def split(tree: PyTree, is_dynamic: Callable[[Any], bool] = is_array) -> tuple[list[Any], Rest]:
    """Takes the leaves for which `is_dynamic` is true out of `tree`.

    **Returns:** `(dynamic, rest)`. `rest.merge(dynamic)` returns the tree again.
    """
    leaves, treedef = jtu.tree_flatten(tree)
    dynamic, rest = split_leaves(leaves, treedef, flag_leaves(tree, leaves, is_dynamic))
    # The paths give the layers in a merged tree the names of the layers in `tree`.
    rest._paths = names_in(tree)
    return dynamic, rest


def split_leaves(leaves: list[Any], treedef: Any, is_dynamic: list[bool]) -> tuple[list[Any], Rest]:
    """Does the same as `split` for a flattened tree. `is_dynamic` has a flag for each leaf."""
    dynamic = [leaf for leaf, taken in zip(leaves, is_dynamic, strict=True) if taken]
    static = [None if taken else leaf for leaf, taken in zip(leaves, is_dynamic, strict=True)]
    return dynamic, Rest(static, is_dynamic, treedef)


# --- Whether two static values, or two trees, may share a trace ---


def is_same_static(first: Any, second: Any) -> bool:
    """Returns `True` if two static leaves are interchangeable in a trace at this moment.

    As in `filter_jit`, leaves are compared by type and value, but functions and unhashable leaves
    are compared by identity.

    >>> import jax
    >>> is_same_static(1, 1), is_same_static(1, True), is_same_static(1, 1.0)
    (True, False, False)
    >>> is_same_static(lambda x: x, lambda x: x), is_same_static(jax.nn.relu, jax.nn.relu)
    (False, True)
    """
    if first is second:
        return True
    # Both keys must be alive during the comparison. A key contains the `id`s of objects, and keeps
    # these objects alive.
    keys = [StaticKey(each, by_identity=not is_hashable(each)) for each in (first, second)]
    return keys[0].key == keys[1].key


def find_static_difference(first: PyTree, second: PyTree) -> Difference | None:
    """The first difference between two trees, ignoring their arrays; `None` if they share a trace.

    The difference is a static leaf, or a node whose type, children or static fields differ.

    >>> import jax
    >>> from jax.tree_util import keystr
    >>> found = find_static_difference({"a": 1.0, "b": (2, 3)}, {"a": 1.0, "b": (2, True)})
    >>> keystr(found.path), found.first, found.second
    ("['b'][1]", 3, True)
    """
    structures = [flatten(tree, by_identity=True)[1] for tree in (first, second)]
    if structures[0] is structures[1]:
        return None
    children, others = children_with_keys(first), children_with_keys(second)
    if type(first) is type(second) and [key for key, _ in children] == [key for key, _ in others]:
        for (key, child), (_, other) in zip(children, others, strict=True):
            if found := find_static_difference(child, other):
                return found._replace(path=(key, *found.path))
    return Difference((), first, second)
