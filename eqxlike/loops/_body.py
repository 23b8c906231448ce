"""Traces a user's loop body and condition, and makes functions of lists of arrays from them."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jaxtyping import Array, PyTree

from .._compat import vary, varying_axes
from .._dtypes import is_key
from .._partition import find_static_difference, split
from .._pytree import describe_node, find_difference, is_array_like, tree_pformat
from ._buffers import Buffer
from ._counted import Condition
from ._scan import Arrays, Operands, Step
from ._step import clear_written

Buffers = Callable[[PyTree], Any]
"""A function that takes a carry and returns its buffers: arrays, or nodes that contain arrays."""

_MAX_CASTS = 4
"""To cast the carry, the body is traced again at most this many times, plus once for each array."""


# --- Conversion between trees and lists of arrays ---


class TreeSpec:
    """The structure of a tree: its treedef, its static leaves and the types of its random keys."""

    def __init__(self, tree: PyTree):
        leaves, self._rest = split(tree, is_array_like)
        self._key_impls = [_impl_of_key(leaf) for leaf in leaves]

    def unflatten(self, arrays: Arrays) -> PyTree:
        """Rebuilds the tree from its arrays."""
        return self._rest.merge(
            array if impl is None else jr.wrap_key_data(array, impl=impl)
            for array, impl in zip(arrays, self._key_impls, strict=True)
        )


def take_arrays(tree: PyTree) -> list[Array]:
    """The arrays of a tree. A random key is replaced by its `jax.random.key_data`."""
    leaves, _ = split(tree, is_array_like)
    return [
        jnp.asarray(leaf) if _impl_of_key(leaf) is None else jr.key_data(leaf) for leaf in leaves
    ]


def _impl_of_key(leaf: Any) -> Any:
    return jr.key_impl(leaf) if is_key(leaf) else None


# --- Loop bodies and conditions ---


@dataclasses.dataclass(frozen=True)
class Body:
    """A traced loop body.

    - `consts`: the arrays that the body closes over, and then the consts of a loop's condition.
    - `num_own_consts`: the number of consts that the body closes over.
    - `step`: the body as a function of lists of arrays.
    - `reading_step`: the same step, but without writes to buffers. `None` if the carry has no
      buffers.
    - `carry`: the arrays of the initial carry, cast to the dtypes that the body returns.
    - `spec`: the structure of the carry, with arrays in place of buffers.
    - `y_spec`: the structure of the output of a step.
    - `is_buffer`: for each array of the carry, whether it is a buffer.
    - `is_outer_buffer`: for each array of the carry, whether it is a buffer of this loop and of an
      outer loop.
    - `outer`: the buffers of outer loops, by their leaf index in the carry.
    """

    consts: list[Array]
    num_own_consts: int
    step: Step
    reading_step: Step | None
    carry: list[Array]
    spec: TreeSpec
    y_spec: TreeSpec
    is_buffer: tuple[bool, ...]
    is_outer_buffer: tuple[bool, ...]
    outer: dict[int, Buffer]

    def clear_written(self, operands: Operands, run: Callable[[Operands], Arrays]) -> Operands:
        """The operands. Cotangents of the carry are zeroed where the loop writes to a buffer."""
        is_inner_buffer = list(map(operator.ne, self.is_buffer, self.is_outer_buffer))
        operands = clear_written(is_inner_buffer, operands, run)
        return clear_written(self.is_outer_buffer, operands, run, is_inside=True)

    def unflatten(self, arrays: Arrays) -> PyTree:
        """Rebuilds the carry as the user sees it after the loop."""
        leaves, treedef = jtu.tree_flatten(self.spec.unflatten(arrays))
        return treedef.unflatten(
            self.outer[index].holding(leaf) if index in self.outer else leaf
            for index, leaf in enumerate(leaves)
        )


def trace_body(
    name: str,
    body: Callable[[PyTree, PyTree], Any],
    init: PyTree,
    x_spec: TreeSpec,
    x: Sequence[jax.ShapeDtypeStruct],
    buffers: Buffers | None = None,
    axes: frozenset[Any] = frozenset(),
) -> Body:
    """Traces `body(carry, x) -> (carry, y)`.

    **Arguments:**

    - `name`: the name of the body in error messages.
    - `init`: the initial carry.
    - `x_spec`, `x`: the structure of the input of a step, and the types of its arrays.
    - `buffers`: function that chooses the buffers in the carry. `None` for no buffers.
    - `axes`: inside `jax.shard_map`, the mesh axes along which devices may run different numbers of
      steps. The carry is cast to vary along these axes.

    **Raises:** `ValueError` if the body changes the structure, a shape, a dtype or a static leaf of
    the carry. The message names the path.
    """
    buffer_indices = _find_buffers(init, buffers)
    leaves, treedef = jtu.tree_flatten(init, is_leaf=_is_buffer)
    outer = {index: leaf for index, leaf in enumerate(leaves) if _is_buffer(leaf)}
    init = treedef.unflatten(leaf.array if _is_buffer(leaf) else leaf for leaf in leaves)
    spec, carry = TreeSpec(init), take_arrays(init)
    flat = _FlatBody(name, body, spec, x_spec, buffer_indices, outer)
    carry, is_active = [vary(array, axes) for array in carry], vary(jnp.asarray(True), axes)
    closed = jax.make_jaxpr(flat)(carry, list(x), is_active)
    # Each further trace casts at least one array to its final dtype or mesh axes, so this number of
    # traces is enough.
    for _ in range(_MAX_CASTS + len(carry)):
        if not flat.casts:
            break
        carry = [
            vary(array if array.dtype == dtype else array.astype(dtype), further)
            for array, (dtype, further) in zip(carry, flat.casts, strict=True)
        ]
        closed = jax.make_jaxpr(flat)(carry, list(x), is_active)
    closed = _with_consts_varied(closed)
    consts, y_spec = list(map(jnp.asarray, closed.consts)), flat.y_spec
    step, reading_step = _step_of(closed, 0, len(carry), axes), None
    if buffer_indices:
        reader = dataclasses.replace(flat, is_writing=False)
        reading = _with_consts_varied(jax.make_jaxpr(reader)(carry, list(x), is_active))
        reading_step = _step_of(reading, len(consts), len(carry), axes)
        consts += map(jnp.asarray, reading.consts)
    arrays = [index for index, leaf in enumerate(jtu.tree_leaves(init)) if is_array_like(leaf)]
    is_buffer = tuple(index in buffer_indices for index in arrays)
    is_outer_buffer = tuple(index in buffer_indices and index in outer for index in arrays)
    return Body(
        consts=consts,
        num_own_consts=len(consts),
        step=step,
        reading_step=reading_step,
        carry=carry,
        spec=spec,
        y_spec=y_spec,
        is_buffer=is_buffer,
        is_outer_buffer=is_outer_buffer,
        outer=outer,
    )


def _find_buffers(init: PyTree, buffers: Buffers | None) -> set[int]:
    """The leaf indices of the buffers in the carry.

    **Raises:** `TypeError` if `buffers` chooses something other than arrays of the carry.
    """
    if buffers is None:
        return set()
    leaves, treedef = jtu.tree_flatten(init, is_leaf=_is_buffer)
    chosen = buffers(treedef.unflatten(map(_Marker, range(len(leaves)), leaves)))
    buffer_indices = set()
    for marker in jtu.tree_leaves(chosen):
        leaf = marker._leaf if isinstance(marker, _Marker) else marker
        if not isinstance(marker, _Marker) or not (is_array_like(leaf) or _is_buffer(leaf)):
            raise TypeError(
                "buffers must return arrays of the carry, or nodes of the carry that contain "
                f"arrays: it returned {tree_pformat(leaf)}."
            )
        buffer_indices.add(marker._index)
    return buffer_indices


def _is_buffer(node: Any) -> bool:
    return isinstance(node, Buffer)


class _Marker:
    """Placeholder for a leaf of the carry in the call of `buffers`."""

    def __init__(self, index: int, leaf: Any):
        self._index = index
        self._leaf = leaf

    def __getattr__(self, name: str) -> Any:
        return getattr(self._leaf, name)


@dataclasses.dataclass(eq=False)
class _FlatBody:
    """A body as a function of lists of arrays. Tracing it sets `y_spec` and `casts`.

    - `buffers`: the leaf indices of the buffers in the carry.
    - `outer`: the buffers of outer loops, by their leaf index in the carry.
    - `y_spec`: the structure of the output of a step.
    - `casts`: for each array of the carry, the dtype and the additional mesh axes that it must be
      cast to. Empty if no array needs a cast.
    """

    name: str
    body: Callable[[PyTree, PyTree], Any]
    spec: TreeSpec
    x_spec: TreeSpec
    buffers: set[int]
    outer: dict[int, Buffer]
    is_writing: bool = True
    y_spec: TreeSpec = dataclasses.field(init=False)
    casts: list[tuple[Any, frozenset[Any]]] = dataclasses.field(init=False)

    def __call__(self, carry: Arrays, x: Arrays, is_active: Any) -> tuple[list[Array], list[Array]]:
        old = self.spec.unflatten(carry)
        leaves, treedef = jtu.tree_flatten(old)
        user_carry = treedef.unflatten(
            self._user_leaf(index, leaf, is_active) for index, leaf in enumerate(leaves)
        )
        new, y = self.body(user_carry, self.x_spec.unflatten(x))
        new = _without_buffers(self.name, new, self.buffers | self.outer.keys())
        _check_carry(self.name, old, new)
        arrays = take_arrays(new)
        self.casts = _casts(self.name, old, carry, arrays)
        self.y_spec = TreeSpec(y)
        return arrays, take_arrays(y)

    def _user_leaf(self, index: int, leaf: Any, is_active: Any) -> Any:
        """The array or `Buffer` that the user's body gets for a leaf of the carry."""
        outer = self.outer.get(index)
        if index not in self.buffers:
            return leaf if outer is None else outer.holding(leaf)
        if outer is None:
            return Buffer(leaf, is_active, self.is_writing)
        return Buffer(leaf, is_active & outer.is_active, self.is_writing and outer.is_writable)


def _without_buffers(name: str, new: PyTree, buffers: set[int]) -> PyTree:
    """Returns the carry with arrays in place of buffers; raises if a buffer is missing."""
    leaves, treedef = jtu.tree_flatten(new, is_leaf=_is_buffer)
    for index, leaf in enumerate(leaves):
        if index in buffers and not _is_buffer(leaf):
            raise ValueError(
                f"{name} must return a buffer in the place of each buffer that it is given, such "
                "as `buffer.at[index].set(x)`: it returned "
                f"{describe_node(leaf)}."
            )
    return treedef.unflatten(leaf.array if _is_buffer(leaf) else leaf for leaf in leaves)


def _check_carry(name: str, old: PyTree, new: PyTree) -> None:
    difference = find_difference(old, new, _fits)
    if difference is None:
        # Two treedefs are equal even if a static field is `2` in one treedef and `2.0` in the
        # other. So compare the static fields too.
        trees = (
            jtu.tree_map(lambda x: None if is_array_like(x) else x, tree) for tree in (old, new)
        )
        difference = find_static_difference(*trees)
    if difference is not None:
        raise ValueError(
            f"{name} must return a carry with the structure, shapes and dtypes of its input: "
            f"{difference.explain('the carry', 'the returned carry')}."
        )


def _fits(old: Any, new: Any) -> bool | None:
    """Whether the body may return leaf `new` in place of `old`. Dtypes are checked later."""
    if is_array_like(old) or is_array_like(new):
        return is_array_like(old) and is_array_like(new) and jnp.shape(old) == jnp.shape(new)
    if jtu.all_leaves([old, new]):
        return find_static_difference(old, new) is None
    return None


def _casts(
    name: str, old: PyTree, carry: Arrays, arrays: Arrays
) -> list[tuple[Any, frozenset[Any]]]:
    """The dtype and the additional mesh axes to which each array of the initial carry is cast.

    Only weakly typed arrays are cast to another dtype, as in `jax.lax`.
    """
    casts: list[tuple[Any, frozenset[Any]]] = []
    for index, (one, other) in enumerate(zip(carry, arrays, strict=True)):
        dtype, axes = other.dtype, varying_axes(other) - varying_axes(one)
        if dtype != one.dtype and not jax.typeof(one).weak_type:
            paths = [path for path, leaf in jtu.tree_leaves_with_path(old) if is_array_like(leaf)]
            where = jtu.keystr(paths[index])
            raise ValueError(
                f"{name} must return a carry with the dtypes of its input: the carry{where} has "
                f"dtype {one.dtype}, and the returned carry{where} has dtype {other.dtype}."
            )
        casts.append((dtype, axes))
    needed = [a.dtype != dtype or axes for a, (dtype, axes) in zip(carry, casts, strict=True)]
    return casts if any(needed) else []


def _with_consts_varied(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Moves casts of closed-over arrays out of the loop, for `jax.shard_map`.

    These casts make arrays vary along mesh axes. The transpose of a cast sums over the devices. If
    the cast is outside of the loop, the sum is computed once, not in each step.
    """
    jaxpr, known, before, rest, varied = closed.jaxpr, set(closed.jaxpr.constvars), [], [], []
    for equation in jaxpr.eqns:
        is_known = not equation.effects and all(
            isinstance(var, Literal) or var in known for var in equation.invars
        )
        if is_known:
            before.append(equation)
            known.update(equation.outvars)
        if is_known and equation.primitive.name == "pvary":
            varied += equation.outvars
        else:
            rest.append(equation)
    if not varied:
        return closed
    first = jaxpr.replace(invars=[], outvars=varied, eqns=before)
    values = jaxpr_as_fun(ClosedJaxpr(first, closed.consts))()
    used, kept = {var for var in jaxpr.outvars if not isinstance(var, Literal)}, []
    for equation in reversed(rest):
        if equation.effects or not used.isdisjoint(equation.outvars):
            kept.insert(0, equation)
            used.update(var for var in equation.invars if not isinstance(var, Literal))
    consts = [*zip(jaxpr.constvars, closed.consts, strict=True), *zip(varied, values, strict=True)]
    vars, arrays = zip(*[pair for pair in consts if pair[0] in used], strict=True)
    return ClosedJaxpr(jaxpr.replace(constvars=list(vars), eqns=kept), list(arrays))


def _step_of(closed: ClosedJaxpr, start: int, num_carry: int, axes: frozenset[Any]) -> Step:
    """Makes a step of a traced body. The body's own consts start at index `start` of all consts."""
    function = _with_consts_from(start, closed)

    def step(consts: Arrays, carry: Arrays, x: Arrays, is_active: Any) -> Any:
        returned = function(consts, *carry, *x, vary(jnp.asarray(is_active), axes))
        return returned[:num_carry], returned[num_carry:]

    return step


def _with_consts_from(start: int, closed: ClosedJaxpr) -> Callable[..., list[Array]]:
    """A function of the consts of the loop and of the inputs of the jaxpr."""
    jaxpr, end = closed.jaxpr, start + len(closed.consts)

    def function(consts: Arrays, *inputs: Any) -> list[Array]:
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, list(consts[start:end])))(*inputs)

    return function


def trace_condition(
    name: str, condition: Callable[[PyTree], Any], body: Body
) -> tuple[Body, Condition, frozenset[Any]]:
    """Traces a condition.

    **Returns:** the body, with the arrays that the condition closes over as last consts; the
    condition as a function of arrays; and the mesh axes along which the condition varies.

    **Raises:** `TypeError` unless the condition returns one boolean.
    """

    def flat(carry: Arrays) -> Array:
        returned = condition(body.unflatten(carry))
        dtype = jnp.result_type(returned) if is_array_like(returned) else None
        if dtype != jnp.bool_ or jnp.shape(returned) != ():
            raise TypeError(
                f"{name} must return one boolean, of shape (): it returned "
                f"{describe_node(returned)}{'' if dtype is None else f', {returned!r}'}."
            )
        return jnp.asarray(returned)

    closed = jax.make_jaxpr(flat)(body.carry)
    function = _with_consts_from(len(body.consts), closed)
    body = dataclasses.replace(body, consts=[*body.consts, *map(jnp.asarray, closed.consts)])
    axes = varying_axes(closed.out_avals[0])
    return body, lambda consts, carry: function(consts, *carry)[0], axes
