"""The body and the condition that a user wrote, traced to functions of lists of arrays."""

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
from ._flat._counted_while import Condition
from ._flat._scan import Arrays, Step
from ._flat._step import clear_written

Buffers = Callable[[PyTree], Any]
"""From a carry to its buffers: arrays, or nodes that hold some."""

_MAX_CASTS = 4
"""How often, at most, the body is traced again for other dtypes of the carry."""


# --- From trees to lists of arrays, and back ---


class Form:
    """A tree without the values of its arrays."""

    def __init__(self, tree: PyTree):
        leaves, self._rest = split(tree, is_array_like)
        self._key_impls = [_impl_of_key(leaf) for leaf in leaves]

    def unflatten(self, arrays: Arrays) -> PyTree:
        """The tree of this form with these arrays."""
        return self._rest.merge(
            array if impl is None else jr.wrap_key_data(array, impl=impl)
            for array, impl in zip(arrays, self._key_impls, strict=True)
        )


def take_arrays(tree: PyTree) -> list[Array]:
    """The arrays of a tree, with `jax.random.key_data` of random keys."""
    leaves, _ = split(tree, is_array_like)
    return [
        jnp.asarray(leaf) if _impl_of_key(leaf) is None else jr.key_data(leaf) for leaf in leaves
    ]


def _impl_of_key(leaf: Any) -> Any:
    return jr.key_impl(leaf) if is_key(leaf) else None


# --- The body of a loop, and its condition ---


@dataclasses.dataclass(frozen=True)
class Body:
    """The body of a loop.

    - `consts`: the arrays that it closes over.
    - `step`: the body as a function of lists of arrays. `reading_step`: the same without the writes
      to its buffers; `None` if it has no buffers.
    - `carry`: the arrays to start with, in the dtypes that the body returns.
    - `form`, `y_form`: the forms of the carry, with arrays for buffers, and of a step's output.
    - `is_buffer`, `is_outer_buffer`: for each array of the carry, whether it is a buffer, and
      whether an outer loop has it as a buffer too.
    - `outer`: the buffers of outer loops in the carry, by the place of their leaf.
    """

    consts: list[Array]
    step: Step
    reading_step: Step | None
    carry: list[Array]
    form: Form
    y_form: Form
    is_buffer: tuple[bool, ...]
    is_outer_buffer: tuple[bool, ...]
    outer: dict[int, Buffer]

    def clear_written(
        self, operands: Arrays, run: Callable[[Arrays, Arrays], Arrays]
    ) -> list[Array]:
        """The carry to start with. Its cotangents are zeroed where the loop writes to a buffer."""
        is_inner_buffer = list(map(operator.ne, self.is_buffer, self.is_outer_buffer))
        carry = clear_written(is_inner_buffer, operands, self.carry, run)
        return clear_written(self.is_outer_buffer, operands, carry, run, is_inside=True)

    def unflatten(self, arrays: Arrays) -> PyTree:
        """The carry as the tree that the user has outside of the loop."""
        leaves, treedef = jtu.tree_flatten(self.form.unflatten(arrays))
        return treedef.unflatten(
            self.outer[place].holding(leaf) if place in self.outer else leaf
            for place, leaf in enumerate(leaves)
        )


def trace_body(
    name: str,
    body: Callable[[PyTree, PyTree], Any],
    init: PyTree,
    x_form: Form,
    x: Sequence[jax.ShapeDtypeStruct],
    buffers: Buffers | None = None,
    axes: frozenset[Any] = frozenset(),
) -> Body:
    """Traces `body(carry, x) -> (carry, y)`.

    **Arguments:**

    - `name`: of the body, in messages.
    - `init`: the carry to start with.
    - `x_form`, `x`: the form of a step's input, and the types of its arrays.
    - `axes`: inside `jax.shard_map`, the axes of the mesh along which devices may run different
      numbers of steps. The carry varies along them.

    **Raises:** `ValueError` naming the path if the returned carry has another structure, shape or
    dtype, or other static leaves.
    """
    places = _find_buffers(init, buffers)
    leaves, treedef = jtu.tree_flatten(init, is_leaf=_is_buffer)
    outer = {place: leaf for place, leaf in enumerate(leaves) if _is_buffer(leaf)}
    init = treedef.unflatten(leaf.array if _is_buffer(leaf) else leaf for leaf in leaves)
    form, carry = Form(init), take_arrays(init)
    flat = _FlatBody(name, body, form, x_form, places, outer)
    carry, is_active = [vary(array, axes) for array in carry], vary(jnp.asarray(True), axes)
    closed = jax.make_jaxpr(flat)(carry, list(x), is_active)
    # Each further trace casts at least one array to its final dtype or axes.
    for _ in range(_MAX_CASTS + len(carry)):
        if not flat.casts:
            break
        carry = [
            vary(array if array.dtype == dtype else array.astype(dtype), further)
            for array, (dtype, further) in zip(carry, flat.casts, strict=True)
        ]
        closed = jax.make_jaxpr(flat)(carry, list(x), is_active)
    closed = _with_consts_varied(closed)
    consts, y_form = list(map(jnp.asarray, closed.consts)), flat.y_form
    step, reading_step = _step_of(closed, slice(len(consts)), len(carry), axes), None
    if places:
        reader = dataclasses.replace(flat, is_writing=False)
        reading = _with_consts_varied(jax.make_jaxpr(reader)(carry, list(x), is_active))
        reading_step = _step_of(reading, slice(len(consts), None), len(carry), axes)
        consts += map(jnp.asarray, reading.consts)
    arrays = [place for place, leaf in enumerate(jtu.tree_leaves(init)) if is_array_like(leaf)]
    is_buffer = tuple(place in places for place in arrays)
    is_outer_buffer = tuple(place in places and place in outer for place in arrays)
    return Body(consts, step, reading_step, carry, form, y_form, is_buffer, is_outer_buffer, outer)


def _find_buffers(init: PyTree, buffers: Buffers | None) -> set[int]:
    """The places of the buffers among the leaves of the carry.

    **Raises:** `TypeError` if anything but arrays of the carry was chosen.
    """
    if buffers is None:
        return set()
    leaves, treedef = jtu.tree_flatten(init, is_leaf=_is_buffer)
    chosen = buffers(treedef.unflatten(map(_Marker, range(len(leaves)), leaves)))
    places = set()
    for marker in jtu.tree_leaves(chosen):
        leaf = marker._leaf if isinstance(marker, _Marker) else marker
        if not isinstance(marker, _Marker) or not (is_array_like(leaf) or _is_buffer(leaf)):
            raise TypeError(
                "buffers must return arrays of the carry, or nodes of it that hold some: it "
                f"returned {tree_pformat(leaf)}."
            )
        places.add(marker._place)
    return places


def _is_buffer(node: Any) -> bool:
    return isinstance(node, Buffer)


class _Marker:
    """Represents a leaf of the carry in the tree that `buffers` chooses from."""

    def __init__(self, place: int, leaf: Any):
        self._place = place
        self._leaf = leaf

    def __getattr__(self, name: str) -> Any:
        return getattr(self._leaf, name)


@dataclasses.dataclass(eq=False)
class _FlatBody:
    """A body as a function of lists of arrays. A trace of it sets `y_form` and `casts`.

    - `buffers`: the places of the leaves of the carry that are buffers.
    - `outer`: the buffers of outer loops, by the place of their leaf.
    - `y_form`: the form of a step's output.
    - `casts`: for each array of the carry, the dtype and the additional mesh axes to cast it to;
      empty if no array needs a cast.
    """

    name: str
    body: Callable[[PyTree, PyTree], Any]
    form: Form
    x_form: Form
    buffers: set[int]
    outer: dict[int, Buffer]
    is_writing: bool = True
    y_form: Form = dataclasses.field(init=False)
    casts: list[tuple[Any, frozenset[Any]]] = dataclasses.field(init=False)

    def __call__(self, carry: Arrays, x: Arrays, is_active: Any) -> tuple[list[Array], list[Array]]:
        old = self.form.unflatten(carry)
        leaves, treedef = jtu.tree_flatten(old)
        given = treedef.unflatten(
            self._as_given(place, leaf, is_active) for place, leaf in enumerate(leaves)
        )
        new, y = self.body(given, self.x_form.unflatten(x))
        new = _without_buffers(self.name, new, self.buffers | self.outer.keys())
        _check_carry(self.name, old, new)
        arrays = take_arrays(new)
        self.casts = _casts(self.name, old, carry, arrays)
        self.y_form = Form(y)
        return arrays, take_arrays(y)

    def _as_given(self, place: int, leaf: Any, is_active: Any) -> Any:
        """A leaf of the carry, as the user's body gets it."""
        outer = self.outer.get(place)
        if place not in self.buffers:
            return leaf if outer is None else outer.holding(leaf)
        if outer is None:
            return Buffer(leaf, is_active, self.is_writing)
        return Buffer(leaf, is_active & outer.is_active, self.is_writing and outer.is_writable)


def _without_buffers(name: str, new: PyTree, buffers: set[int]) -> PyTree:
    """The carry with arrays for its buffers. Raises `ValueError` if a buffer was not returned."""
    leaves, treedef = jtu.tree_flatten(new, is_leaf=_is_buffer)
    for place, leaf in enumerate(leaves):
        if place in buffers and not _is_buffer(leaf):
            raise ValueError(
                f"{name} must return a buffer where it was given one, such as what "
                f"`buffer.at[index].set(x)` returns: it returned {describe_node(leaf)}."
            )
    return treedef.unflatten(leaf.array if _is_buffer(leaf) else leaf for leaf in leaves)


def _check_carry(name: str, old: PyTree, new: PyTree) -> None:
    difference = find_difference(old, new, _fits)
    if difference is None:
        # Treedefs are equal if a static field is `2` in one and `2.0` in the other.
        trees = (
            jtu.tree_map(lambda x: None if is_array_like(x) else x, tree) for tree in (old, new)
        )
        difference = find_static_difference(*trees)
    if difference is not None:
        raise ValueError(
            f"{name} must return a carry of the form that it was given: "
            f"{difference.explain('the carry', 'what it returned')}."
        )


def _fits(old: Any, new: Any) -> bool | None:
    """Whether one leaf may follow another in a carry; dtypes are checked later."""
    if is_array_like(old) or is_array_like(new):
        return is_array_like(old) and is_array_like(new) and jnp.shape(old) == jnp.shape(new)
    if jtu.all_leaves([old, new]):
        return find_static_difference(old, new) is None
    return None


def _casts(
    name: str, old: PyTree, carry: Arrays, arrays: Arrays
) -> list[tuple[Any, frozenset[Any]]]:
    """Casts of the initial carry, to other dtypes and to additional mesh axes to vary along.

    Only weakly typed arrays are cast to other dtypes, as in `jax.lax`.
    """
    casts: list[tuple[Any, frozenset[Any]]] = []
    for place, (one, other) in enumerate(zip(carry, arrays, strict=True)):
        dtype, axes = other.dtype, varying_axes(other) - varying_axes(one)
        if dtype != one.dtype and not jax.typeof(one).weak_type:
            paths = [path for path, leaf in jtu.tree_leaves_with_path(old) if is_array_like(leaf)]
            where = jtu.keystr(paths[place])
            raise ValueError(
                f"{name} must return a carry of the form that it was given: the carry{where} has "
                f"dtype {one.dtype}, and what it returned{where} has dtype {other.dtype}."
            )
        casts.append((dtype, axes))
    needed = [a.dtype != dtype or axes for a, (dtype, axes) in zip(carry, casts, strict=True)]
    return casts if any(needed) else []


def _with_consts_varied(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Inside `jax.shard_map`, casts arrays that the body closes over to varying before the loop.

    The transpose of the cast sums over the devices: now once, instead of in each step.
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


def _step_of(closed: ClosedJaxpr, of_consts: slice, num_carry: int, axes: frozenset[Any]) -> Step:
    """A traced body as a step, for which `of_consts` selects its part of the consts."""
    jaxpr = closed.jaxpr

    def step(consts: Arrays, carry: Arrays, x: Arrays, is_active: Any) -> Any:
        function = jaxpr_as_fun(ClosedJaxpr(jaxpr, list(consts[of_consts])))
        returned = function(*carry, *x, vary(jnp.asarray(is_active), axes))
        return returned[:num_carry], returned[num_carry:]

    return step


def trace_condition(
    name: str, condition: Callable[[PyTree], Any], body: Body
) -> tuple[list[Array], Condition, frozenset[Any]]:
    """The arrays that a condition closes over, the condition as a function of arrays, and the mesh
    axes along which it varies.

    **Raises:** `TypeError` unless it returns one boolean.
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
    axes = varying_axes(closed.out_avals[0])

    def of_arrays(consts: Arrays, carry: Arrays) -> Array:
        return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*carry)[0]

    return list(map(jnp.asarray, closed.consts)), of_arrays, axes
